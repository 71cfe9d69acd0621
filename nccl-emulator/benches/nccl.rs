//! How fast the emulator moves data between processes, beside copies of the same bytes.
//!
//! ```text
//! cargo bench -p nccl-emulator --bench nccl [-- RANKS [MAX_BYTES]]
//! ```
//!
//! The method of nccl-tests: a number of operations is enqueued, the stream is synchronized once,
//! and the time is divided by their number; it is the longest of all ranks. Buffers shift from one
//! operation to the next, so that large ones do not stay in a cache. Beside it stand copies of as
//! many bytes in the same kind of memory, made by all ranks at the same time; the two take turns,
//! and what is printed is the median of the turns. Nothing here says anything about a GPU.

use std::env;
use std::ffi::c_void;
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream};
use nccl_sys::{Api, ncclComm_t, ncclDataType_t as Kind, ncclRedOp_t as Op, ncclUniqueId};

const TURNS: usize = 7;
const RANK: &str = "NCCL_EMULATOR_BENCH_RANK";
const PLACE: &str = "NCCL_EMULATOR_BENCH_PLACE";

fn main() {
    let mut arguments = env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"));
    let ranks: i32 = arguments
        .next()
        .map_or(2, |ranks| ranks.parse().expect("a number of ranks"));
    let max: usize = arguments
        .next()
        .map_or(64 << 20, |max| max.parse().expect("a number of bytes"));
    if let Ok(rank) = env::var(RANK) {
        return Bench::join(rank.parse().expect("a rank"), ranks, max).run();
    }
    let place = env::temp_dir().join(format!("nccl-emulator-bench-{}", std::process::id()));
    fs::create_dir_all(&place).expect("a place for the unique id");
    let start = |rank: i32| {
        Command::new(env::current_exe().expect("this program"))
            .args([ranks.to_string(), max.to_string()])
            .env(RANK, rank.to_string())
            .env(PLACE, &place)
            .spawn()
            .expect("a process for the rank")
    };
    let children: Vec<_> = (0..ranks).map(start).collect();
    let succeeded = children
        .into_iter()
        .map(|mut child| child.wait())
        .all(|end| end.is_ok_and(|end| end.success()));
    fs::remove_dir_all(&place).expect("the place is ours");
    assert!(succeeded, "a rank failed");
}

struct Bench {
    api: Api,
    rank: i32,
    ranks: i32,
    max: usize,
    comm: ncclComm_t,
    _gpu: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    send: *mut c_void,
    receive: *mut c_void,
    scalar: *mut c_void,
    /// Two halves of `max` bytes each, for the copies beside.
    plain: *mut u8,
}

/// Calls a function of NCCL, which must succeed.
macro_rules! nccl {
    ($bench:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let function = $bench.$function.expect("the emulator has it");
        // SAFETY: the arguments are valid for the call and for the work that it enqueues.
        let code = unsafe { function($($argument),*) }.0;
        assert_eq!(code, 0, stringify!($function));
    }};
}

/// Shared memory, as the emulator's devices have it.
fn shared_memory(bytes: usize) -> *mut u8 {
    // SAFETY: plain calls; the mapping is new and stays for the life of the process.
    unsafe {
        let fd = libc::memfd_create(c"copies".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "memfd_create");
        let fd = OwnedFd::from_raw_fd(fd);
        assert_eq!(libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t), 0);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let base = libc::mmap(
            null_mut(),
            bytes,
            access,
            libc::MAP_SHARED,
            fd.as_raw_fd(),
            0,
        );
        assert_ne!(base, libc::MAP_FAILED);
        libc::madvise(base, bytes, libc::MADV_HUGEPAGE);
        libc::memset(base, 1, bytes);
        base.cast()
    }
}

/// Binds this process to a core of its own, as far as there are any.
fn bind(rank: usize) {
    // SAFETY: all-zero is an empty set; the calls read and write this set only.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let cores = libc::sysconf(libc::_SC_NPROCESSORS_ONLN).max(1) as usize;
        libc::CPU_SET(rank % cores, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
    (values[low] + values[high]) / 2.0
}

impl Bench {
    fn join(rank: i32, ranks: i32, max: usize) -> Self {
        bind(rank as usize);
        nccl_emulator::install().expect("the emulator");
        // SAFETY: what answers to NCCL's name now is the emulator.
        let api = unsafe { nccl_sys::Loader::new().load() }.expect("NCCL").api;
        let gpu = CudaContext::new(rank as usize).expect("a device");
        let stream = gpu.new_stream().expect("a stream");
        let file = PathBuf::from(env::var_os(PLACE).expect("a place")).join("id");
        let mut id = ncclUniqueId::default();
        if rank == 0 {
            nccl!(api, ncclGetUniqueId(&mut id));
            let part = file.with_extension("part");
            fs::write(&part, id.internal.map(|byte| byte as u8)).expect("the place is writable");
            fs::rename(part, &file).expect("the place is writable");
        }
        while !file.exists() {
            thread::sleep(Duration::from_millis(1));
        }
        let bytes: [u8; 128] = fs::read(file)
            .expect("the id")
            .try_into()
            .expect("128 bytes");
        id.internal = bytes.map(|byte| byte as std::ffi::c_char);
        let mut comm = null_mut();
        nccl!(api, ncclCommInitRank(&mut comm, ranks, id, rank));
        let memory = |bytes: usize| {
            let mut memory = null_mut();
            nccl!(api, ncclMemAlloc(&mut memory, bytes));
            // SAFETY: as many bytes were just allocated.
            unsafe { cudarc::driver::result::memset_d8_sync(memory.addr() as u64, 1, bytes) }
                .expect("memset");
            memory
        };
        let (send, receive, scalar) = (memory(max), memory(max), memory(8));
        let plain = shared_memory(2 * max);
        Self {
            api,
            rank,
            ranks,
            max,
            comm,
            _gpu: gpu,
            stream,
            send,
            receive,
            scalar,
            plain,
        }
    }

    fn cuda_stream(&self) -> nccl_sys::cudaStream_t {
        self.stream.cu_stream().cast()
    }

    fn sync(&self) {
        self.stream.synchronize().expect("the stream ends well");
    }

    /// The largest of all ranks' values; all are here when it returns.
    fn largest(&self, value: f64) -> f64 {
        let address = self.scalar.addr() as u64;
        // SAFETY: the scalar has room for one value, and nothing uses it now.
        unsafe { cudarc::driver::result::memcpy_htod_sync(address, &[value]) }.expect("a copy");
        let (scalar, kind, stream) = (self.scalar, Kind::ncclFloat64, self.cuda_stream());
        nccl!(
            self.api,
            ncclAllReduce(scalar, scalar, 1, kind, Op::ncclMax, self.comm, stream)
        );
        self.sync();
        let mut result = [0.0];
        // SAFETY: as above.
        unsafe { cudarc::driver::result::memcpy_dtoh_sync(&mut result, address) }.expect("a copy");
        result[0]
    }

    fn barrier(&self) {
        self.largest(0.0);
    }

    /// Seconds of one call of `body`, out of `count` and what `after` takes.
    fn time(&self, count: usize, body: impl Fn(usize), after: impl Fn()) -> f64 {
        self.barrier();
        let start = Instant::now();
        (0..count).for_each(body);
        after();
        self.largest(start.elapsed().as_secs_f64() / count as f64)
    }

    /// Where operation number `at` on `bytes` begins.
    fn shift(&self, bytes: usize, at: usize) -> usize {
        bytes * (at % (self.max / bytes).max(1))
    }

    fn copy(&self, bytes: usize, at: usize) {
        let shift = self.shift(bytes, at);
        // SAFETY: both halves have `max` bytes, and `shift + bytes` are no more.
        unsafe {
            libc::memcpy(
                self.plain.add(self.max + shift).cast(),
                self.plain.add(shift).cast(),
                bytes,
            )
        };
    }

    /// Prints the medians of an operation and of copies of as many bytes, taken in turns.
    fn compare(&self, name: &str, bytes: usize, operation: impl Fn(usize)) {
        let count = ((16 << 20) / bytes.max(4096)).clamp(3, 2000);
        (0..3).for_each(&operation);
        self.sync();
        let (mut operations, mut copies) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            copies.push(self.time(count, |at| self.copy(bytes, at), || ()));
            operations.push(self.time(count, &operation, || self.sync()));
        }
        let (operation, copy) = (median(operations) * 1e6, median(copies) * 1e6);
        if self.rank == 0 {
            let speed = bytes as f64 / operation / 1e3;
            let ratio = operation / copy;
            println!(
                "{name:>12} {bytes:>10} B {operation:>10.2} us {speed:>7.2} GB/s   copy {copy:>10.2} us   x {ratio:.2}"
            );
        }
    }

    fn run(&self) {
        let peer = self.rank ^ 1;
        let (api, comm, stream) = (&self.api, self.comm, self.cuda_stream());
        let n = self.ranks as usize;
        let at = |base: *mut c_void, offset: usize| base.wrapping_byte_add(offset);
        if peer < self.ranks {
            for bytes in [8, 1024] {
                self.compare("send+recv", bytes, |turn| {
                    let shift = self.shift(bytes, turn);
                    nccl!(api, ncclGroupStart());
                    nccl!(
                        api,
                        ncclSend(
                            at(self.send, shift),
                            bytes,
                            Kind::ncclUint8,
                            peer,
                            comm,
                            stream
                        )
                    );
                    nccl!(
                        api,
                        ncclRecv(
                            at(self.receive, shift),
                            bytes,
                            Kind::ncclUint8,
                            peer,
                            comm,
                            stream
                        )
                    );
                    nccl!(api, ncclGroupEnd());
                });
            }
            self.compare("synchronized", 8, |_| {
                nccl!(api, ncclGroupStart());
                nccl!(
                    api,
                    ncclSend(self.send, 8, Kind::ncclUint8, peer, comm, stream)
                );
                nccl!(
                    api,
                    ncclRecv(self.receive, 8, Kind::ncclUint8, peer, comm, stream)
                );
                nccl!(api, ncclGroupEnd());
                self.sync();
            });
        }
        let sizes = || {
            (10..)
                .step_by(2)
                .map(|power| 1usize << power)
                .take_while(|&bytes| bytes <= self.max)
        };
        for bytes in sizes() {
            self.compare("all-to-all", bytes, |turn| {
                let shift = self.shift(bytes, turn);
                let (send, receive) = (at(self.send, shift), at(self.receive, shift));
                nccl!(
                    api,
                    ncclAlltoAll(send, receive, bytes / n, Kind::ncclUint8, comm, stream)
                );
            });
        }
        for bytes in sizes() {
            self.compare("all-reduce", bytes, |turn| {
                let shift = self.shift(bytes, turn);
                let (send, receive) = (at(self.send, shift), at(self.receive, shift));
                nccl!(
                    api,
                    ncclAllReduce(
                        send,
                        receive,
                        bytes / 4,
                        Kind::ncclFloat32,
                        Op::ncclSum,
                        comm,
                        stream
                    )
                );
            });
        }
        // Bytes are those of the larger of the two buffers, as in nccl-tests.
        let (float, byte) = (Kind::ncclFloat32, Kind::ncclUint8);
        for bytes in sizes() {
            self.compare("broadcast", bytes, |turn| {
                let shift = self.shift(bytes, turn);
                let (send, receive) = (at(self.send, shift), at(self.receive, shift));
                nccl!(
                    api,
                    ncclBroadcast(send, receive, bytes, byte, 0, comm, stream)
                );
            });
        }
        for bytes in sizes() {
            self.compare("all-gather", bytes, |turn| {
                let shift = self.shift(bytes, turn);
                let (send, receive) = (at(self.send, shift), at(self.receive, shift));
                nccl!(
                    api,
                    ncclAllGather(send, receive, bytes / n, byte, comm, stream)
                );
            });
        }
        for bytes in sizes() {
            self.compare("reduce-scat.", bytes, |turn| {
                let shift = self.shift(bytes, turn);
                let (send, receive) = (at(self.send, shift), at(self.receive, shift));
                let (count, sum) = (bytes / 4 / n, Op::ncclSum);
                nccl!(
                    api,
                    ncclReduceScatter(send, receive, count, float, sum, comm, stream)
                );
            });
        }
        nccl!(api, ncclCommDestroy(comm));
    }
}

//! The ranks that use the emulator, by NCCL's C functions or through the safe crate. Their orders and answers are those
//! of `benches/mpi/all_to_all.c`.

use std::ffi::{c_char, c_void};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nccl::Request;
use nccl::cudarc::driver::{CudaContext, result};
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Reduction, ncclUniqueId};
use nccl_tools::raw::operations::Stream;
use nccl_tools::raw::{Address, Comm, Memory};
use nccl_tools::{machine, nccl_call, perf};

use super::Outcome;
use super::by_crate::ByCrate;
use super::operation::Operation;

/// Operations that are enqueued before the stream is waited for: the default of nccl-tests.
pub(crate) const BATCH: usize = 20;

struct Rank {
    rank: usize,
    ranks: usize,
    /// The size of each buffer.
    room: usize,
    comm: Comm,
    cuda: std::sync::Arc<nccl::cudarc::driver::CudaStream>,
    stream: Stream,
    from: Memory,
    to: Memory,
    scalar: Memory,
    by_crate: Option<ByCrate>,
}

/// Runs rank `rank` of `ranks` until the driver closes the connection. With `by_crate` it also has a communicator of the
/// safe crate, made before the other: NCCL asks for a profiler once, and the crate has to offer its own before that.
/// The init that is reported is then the second of the process.
pub(crate) fn run(rank: usize, ranks: usize, room: usize, socket: &str, by_crate: bool) -> Outcome {
    // First, so that threads of the emulator run on the same core.
    machine::bind(rank)?;
    perf::install(ranks).map_err(|failure| failure.to_string())?;
    let mut driver = UnixStream::connect(socket)?;
    let mut lines = BufReader::new(driver.try_clone()?).lines();
    let mut id = ncclUniqueId::default();
    if rank == 0 {
        succeed(nccl_call!(ncclGetUniqueId(&mut id)), "ncclGetUniqueId")?;
    }
    let own = machine::cores()?
        .iter()
        .map(usize::to_string)
        .collect::<Vec<_>>();
    let hex: String = id
        .internal
        .iter()
        .map(|&byte| format!("{:02x}", byte as u8))
        .collect();
    writeln!(driver, "rank {rank} {} {hex}", own.join(","))?;
    let hex = lines.next().ok_or("no id")??;
    for (at, byte) in id.internal.iter_mut().enumerate() {
        let digits = hex.get(2 * at..2 * at + 2).ok_or("too short an id")?;
        *byte = u8::from_str_radix(digits, 16)? as c_char;
    }
    let by_crate = by_crate
        .then(|| ByCrate::new(rank, ranks, &format!("{socket}-crate")))
        .transpose()?;
    let (rank, init) = Rank::new(rank, ranks, room, id, by_crate)?;
    writeln!(driver, "ready {}", init.as_nanos())?;
    for line in lines {
        let answer = rank.obey(&line?)?;
        writeln!(driver, "{answer}")?;
    }
    succeed(rank.comm.destroy(), "ncclCommDestroy")
}

fn succeed(code: u32, function: &str) -> Outcome {
    match code {
        0 => Ok(()),
        code => Err(format!(
            "{function} returned {code}: {}",
            nccl_tools::raw::last_error()
        )
        .into()),
    }
}

impl Rank {
    /// The rank, and the duration of its `ncclCommInitRank`.
    fn new(
        rank: usize,
        ranks: usize,
        room: usize,
        id: ncclUniqueId,
        by_crate: Option<ByCrate>,
    ) -> Outcome<(Self, Duration)> {
        let context = CudaContext::new(rank)?;
        let cuda = context.new_stream()?;
        let mut comm = Comm::NULL;
        let (n, own) = (ranks as i32, rank as i32);
        let begun = Instant::now();
        succeed(
            nccl_call!(ncclCommInitRank(&mut comm.0, n, id, own)),
            "ncclCommInitRank",
        )?;
        let init = begun.elapsed();
        let this = Self {
            rank,
            ranks,
            room,
            comm,
            stream: Stream::of(&cuda),
            cuda,
            from: allocate(room)?,
            to: allocate(room)?,
            scalar: allocate(size_of::<f32>())?,
            by_crate,
        };
        Ok((this, init))
    }

    fn by_crate(&self) -> Outcome<&ByCrate> {
        let by_crate = self.by_crate.as_ref();
        Ok(by_crate.ok_or("this rank has no communicator of the crate")?)
    }

    fn obey(&self, order: &str) -> Outcome<String> {
        let words: Vec<&str> = order.split(' ').collect();
        match words[..] {
            ["run", operation, bytes, count] => {
                let operation = Operation::named(operation).ok_or("no such operation")?;
                self.time(operation, bytes.parse()?, count.parse()?)
            }
            ["cycles", bytes, count] => {
                self.time_cycles(Operation::AllToAll, bytes.parse()?, count.parse()?)
            }
            ["cycles-by-crate", bytes, count] => {
                self.time_cycles(Operation::AllToAllByCrate, bytes.parse()?, count.parse()?)
            }
            ["check", operation, bytes] => {
                let operation = Operation::named(operation).ok_or("no such operation")?;
                let right = self.is_right(operation, bytes.parse()?)?;
                Ok(String::from(if right { "right" } else { "wrong" }))
            }
            _ => Err(format!("{order:?} is no order").into()),
        }
    }

    fn time(&self, operation: Operation, bytes: usize, count: usize) -> Outcome<String> {
        self.barrier()?;
        let begun = now();
        self.run(operation, bytes, count)?;
        Ok(format!("{begun} {}", now()))
    }

    /// Runs `count` operations, and waits after each [`BATCH`] of them, and after the last.
    fn run(&self, operation: Operation, bytes: usize, count: usize) -> Outcome {
        for turn in 0..count {
            if operation == Operation::AllToAllByCrate {
                let done = self.start_by_crate(bytes, turn)?;
                self.by_crate()?.settle(turn, count, &done)?;
                continue;
            }
            self.start(operation, bytes, turn)?;
            if (turn + 1).is_multiple_of(BATCH) || turn + 1 == count {
                self.cuda.synchronize()?;
            }
        }
        Ok(())
    }

    /// Returns the nanoseconds of each of `count` cycles of [`BATCH`] all-to-alls, measured as the example measures its rows: between
    /// two cycles it measures all-to-alls in place, which are copied there from the other buffer.
    fn time_cycles(&self, operation: Operation, bytes: usize, count: usize) -> Outcome<String> {
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            for turn in 0..BATCH {
                let (to, from) = self.places(bytes, turn);
                self.start_between(Operation::AllToAll, bytes, (from, to))?;
                self.copy(from, to, bytes)?;
            }
            self.cuda.synchronize()?;
            self.start(Operation::AllToAll, bytes, 0)?;
            self.cuda.synchronize()?;
            self.by_crate()?.meet()?;
            self.barrier()?;
            let begun = now();
            self.run(operation, bytes, BATCH)?;
            times.push((now() - begun).to_string());
        }
        Ok(times.join(" "))
    }

    /// Returns when all ranks are here.
    fn barrier(&self) -> Outcome {
        let (x, stream) = (self.scalar.pointer(), self.stream.raw());
        let (kind, sum) = (Kind::ncclFloat32, Reduction::ncclSum);
        let code = nccl_call!(ncclAllReduce(x, x, 1, kind, sum, self.comm.0, stream));
        succeed(code, "ncclAllReduce")?;
        Ok(self.cuda.synchronize()?)
    }

    /// Enqueues one operation on `bytes`. Buffers shift from one to the next as in nccl-tests.
    fn start(&self, operation: Operation, bytes: usize, turn: usize) -> Outcome {
        self.start_between(operation, bytes, self.places(bytes, turn))
    }

    fn start_between(
        &self,
        operation: Operation,
        bytes: usize,
        (from, to): (Memory, Memory),
    ) -> Outcome {
        let (x, y, stream) = (from.pointer(), to.pointer(), self.stream.raw());
        let (kind, sum, count) = (
            Kind::ncclFloat32,
            Reduction::ncclSum,
            bytes / size_of::<f32>(),
        );
        let (part, comm) = (count / self.ranks, self.comm.0);
        match operation {
            Operation::AllToAll => {
                let code = nccl_call!(ncclAlltoAll(x, y, part, kind, comm, stream));
                succeed(code, "ncclAlltoAll")
            }
            Operation::AllReduce => {
                let code = nccl_call!(ncclAllReduce(x, y, count, kind, sum, comm, stream));
                succeed(code, "ncclAllReduce")
            }
            Operation::SendRecv => {
                let (kind, peer) = (Kind::ncclInt8, self.rank as i32 ^ 1);
                nccl_call!(ncclGroupStart());
                nccl_call!(ncclSend(x, bytes, kind, peer, comm, stream));
                nccl_call!(ncclRecv(y, bytes, kind, peer, comm, stream));
                succeed(nccl_call!(ncclGroupEnd()), "ncclGroupEnd")
            }
            Operation::AllToAllByCrate => Err("the crate has a loop of its own".into()),
            Operation::Memcpy => Err("copies are made by the other program".into()),
        }
    }

    fn places(&self, bytes: usize, turn: usize) -> (Memory, Memory) {
        let shift = bytes * (turn % (self.room / bytes).max(1));
        (self.from.from(shift), self.to.from(shift))
    }

    /// Enqueues a copy.
    fn copy(&self, from: Memory, to: Memory, bytes: usize) -> Outcome {
        let (from, to) = (from.pointer().addr() as u64, to.pointer().addr() as u64);
        // SAFETY: both are as long, and the stream is waited for before they end.
        Ok(unsafe { result::memcpy_dtod_async(to, from, bytes, self.cuda.cu_stream()) }?)
    }

    /// As [`start`](Self::start), an all-to-all through the safe crate.
    fn start_by_crate(&self, bytes: usize, turn: usize) -> Outcome<Request> {
        let by_crate = self.by_crate()?;
        let (from, to) = self.places(bytes, turn);
        let (from, to) = (from.pointer().addr() as u64, to.pointer().addr() as u64);
        // SAFETY: the memory is as long, and the two streams are not used at the same time.
        unsafe { by_crate.start(from, to, bytes / size_of::<f32>()) }
    }

    fn is_right(&self, operation: Operation, bytes: usize) -> Outcome<bool> {
        let count = bytes / size_of::<f32>();
        let part = count / self.ranks;
        let sent: Vec<f32> = (0..count).map(|index| element(self.rank, index)).collect();
        let mut received = vec![-1f32; count];
        let (from, to) = (
            self.from.pointer().addr() as u64,
            self.to.pointer().addr() as u64,
        );
        // SAFETY: both buffers are at least as long as the vectors, and nothing is pending on them.
        unsafe {
            result::memcpy_htod_sync(from, &sent)?;
            result::memcpy_htod_sync(to, &received)?;
        }
        match operation {
            Operation::AllToAllByCrate => self.start_by_crate(bytes, 0)?.wait()?,
            _ => self.start(operation, bytes, 0)?,
        }
        self.cuda.synchronize()?;
        // SAFETY: as above.
        unsafe { result::memcpy_dtoh_sync(&mut received, to) }?;
        let expected = |index: usize| match operation {
            Operation::AllToAll | Operation::AllToAllByCrate => {
                element(index / part, self.rank * part + index % part)
            }
            Operation::AllReduce => (0..self.ranks).map(|rank| element(rank, index)).sum(),
            Operation::SendRecv | Operation::Memcpy => element(self.rank ^ 1, index),
        };
        Ok(received
            .iter()
            .enumerate()
            .all(|(index, &value)| value == expected(index)))
    }
}

/// The element that `rank` sends at `index`: sums of it are exact.
pub(crate) fn element(rank: usize, index: usize) -> f32 {
    (rank + 1) as f32 + (index % 251) as f32
}

/// Allocates device memory by NCCL's own function, with every page in place.
fn allocate(bytes: usize) -> Outcome<Memory> {
    let mut pointer: *mut c_void = std::ptr::null_mut();
    succeed(
        nccl_call!(ncclMemAlloc(&mut pointer, bytes)),
        "ncclMemAlloc",
    )?;
    // SAFETY: as many bytes were just allocated.
    unsafe { result::memset_d8_sync(pointer.addr() as u64, 0, bytes) }?;
    Ok(Memory {
        at: Address(pointer),
        len: bytes,
    })
}

/// Nanoseconds of the clock that all processes share, and that MPI's ranks read.
fn now() -> i64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

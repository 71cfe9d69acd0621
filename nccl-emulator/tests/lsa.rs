//! The all-to-all by loads and stores, launched as a program launches its kernel: three devices of a process, whose windows
//! are plain memory that all of them reach. Every test runs in a process of its own, because a wait that does not end would
//! block the other tests.

mod captures;
mod ranks;

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUresult as Code;
use cudarc::driver::{CudaContext, CudaStream, result, sys};
use lsa_protocol::{BLOCK_THREADS, KERNEL, Layout, Outcome, STAND_IN_PTX};
use nccl_emulator::{ViolationKind, violations};

use captures::{code, memory, read};
use ranks::alone;

const RANKS: u32 = 3;
const CAPACITY: u64 = 4096;

/// A word of the host that devices reach at its own address.
struct HostWord(*mut c_void);

impl HostWord {
    fn new() -> Self {
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the memory is new, and as large as it is.
        let memory = unsafe { result::malloc_host(2 * size_of::<u32>(), flags) }.unwrap();
        let this = Self(memory);
        this.set(0);
        this
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: four bytes at the start of an allocation, which nothing accesses otherwise than atomically. The status has one
        // more word behind it.
        unsafe { AtomicU32::from_ptr(self.0.cast()) }
    }

    fn set(&self, value: u32) {
        self.word().store(value, Ordering::Release);
    }

    fn get(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    fn address(&self) -> u64 {
        self.0.addr() as u64
    }
}

/// One rank: a device with a stream, a window, and the blocks that it sends and receives.
struct Rank {
    rank: u32,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    kernel: sys::CUfunction,
    window: u64,
    /// The addresses of all windows, in memory of the device.
    windows: u64,
    send: u64,
    recv: u64,
    status: HostWord,
}

/// All ranks, and what their launches share.
struct World {
    ranks: Vec<Rank>,
    abort: HostWord,
}

impl World {
    fn new() -> Self {
        nccl_emulator::install().unwrap();
        let layout = Layout::new(RANKS, CAPACITY).unwrap();
        let mut ranks: Vec<_> = (0..RANKS).map(|rank| Rank::new(rank, &layout)).collect();
        for one in &ranks {
            one.context.bind_to_thread().unwrap();
            for other in ranks.iter().filter(|other| other.rank != one.rank) {
                // SAFETY: both contexts are alive.
                unsafe { sys::cuCtxEnablePeerAccess(other.context.cu_ctx(), 0) }
                    .result()
                    .unwrap();
            }
        }
        let windows: Vec<_> = ranks.iter().map(|rank| rank.window).collect();
        for rank in &mut ranks {
            rank.windows = memory(&rank.context, size_of_val(windows.as_slice()));
            // SAFETY: the memory has as many bytes.
            unsafe { result::memcpy_htod_sync(rank.windows, &windows) }.unwrap();
        }
        let abort = HostWord::new();
        Self { ranks, abort }
    }

    /// Launches the kernel on a rank.
    fn launch(&self, rank: u32, bytes: u64, epoch: u32, limit: Duration) {
        let shape = (RANKS, BLOCK_THREADS);
        self.try_launch(rank, bytes, epoch, limit, shape).unwrap();
    }

    fn try_launch(
        &self,
        rank: u32,
        mut bytes: u64,
        mut epoch: u32,
        limit: Duration,
        (blocks, threads): (u32, u32),
    ) -> Result<(), cudarc::driver::DriverError> {
        let this = &self.ranks[rank as usize];
        let (mut send, mut recv, mut windows) = (this.send, this.recv, this.windows);
        let (mut rank, mut ranks, mut capacity) = (rank, RANKS, CAPACITY);
        let (mut abort, mut status) = (self.abort.address(), this.status.address());
        let mut timeout = limit.as_nanos() as u64;
        let arguments: &mut [*mut c_void] = &mut [
            (&raw mut send).cast(),
            (&raw mut recv).cast(),
            (&raw mut bytes).cast(),
            (&raw mut windows).cast(),
            (&raw mut rank).cast(),
            (&raw mut ranks).cast(),
            (&raw mut epoch).cast(),
            (&raw mut capacity).cast(),
            (&raw mut abort).cast(),
            (&raw mut timeout).cast(),
            (&raw mut status).cast(),
        ];
        this.context.bind_to_thread().unwrap();
        // SAFETY: the arguments match the kernel's parameters; the emulator checks the addresses.
        unsafe {
            result::launch_kernel(
                this.kernel,
                (blocks, 1, 1),
                (threads, 1, 1),
                0,
                this.stream.cu_stream(),
                arguments,
            )
        }
    }

    fn outcome(&self, rank: u32) -> Outcome {
        Outcome::from_status(self.ranks[rank as usize].status.get())
    }
}

impl Rank {
    fn new(rank: u32, layout: &Layout) -> Self {
        let context = CudaContext::new(rank as usize).unwrap();
        // SAFETY: the tests order all accesses themselves.
        unsafe { context.disable_event_tracking() };
        let window = memory(&context, layout.window_bytes() as usize);
        let blocks = RANKS as usize * CAPACITY as usize;
        let (send, recv) = (memory(&context, blocks), memory(&context, blocks));
        let (text, name) = (
            CString::new(STAND_IN_PTX).unwrap(),
            CString::new(KERNEL).unwrap(),
        );
        // SAFETY: a text that ends with a zero, and a module that stays loaded.
        let kernel = unsafe {
            let module = result::module::load_data(text.as_ptr().cast()).unwrap();
            result::module::get_function(module, name).unwrap()
        };
        let stream = context.new_stream().unwrap();
        let status = HostWord::new();
        Self {
            rank,
            context,
            stream,
            kernel,
            window,
            windows: 0,
            send,
            recv,
            status,
        }
    }

    /// Writes the blocks for all ranks to the send buffer, and fills the receive buffer with `UNTOUCHED`.
    fn prepare(&self, bytes: u64, epoch: u32) {
        let blocks: Vec<u8> = (0..RANKS)
            .flat_map(|to| block(self.rank, to, epoch, bytes))
            .collect();
        self.context.bind_to_thread().unwrap();
        let all = RANKS as usize * CAPACITY as usize;
        // SAFETY: the memory has as many bytes, and nothing on a stream uses it.
        unsafe {
            if !blocks.is_empty() {
                result::memcpy_htod_sync(self.send, &blocks).unwrap();
            }
            result::memset_d8_sync(self.recv, UNTOUCHED, all).unwrap();
        }
        self.context.synchronize().unwrap();
    }

    /// Compares the received blocks with those that the ranks sent.
    fn check(&self, bytes: u64, epoch: u32) {
        self.context.bind_to_thread().unwrap();
        let mut expected: Vec<u8> = (0..RANKS)
            .flat_map(|from| block(from, self.rank, epoch, bytes))
            .collect();
        expected.resize(RANKS as usize * CAPACITY as usize, UNTOUCHED);
        let received = read(self.recv, expected.len());
        let wrong = received.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(
            wrong, None,
            "rank {} in epoch {epoch}, blocks of {bytes}",
            self.rank
        );
    }

    fn synchronize(&self) {
        self.context.bind_to_thread().unwrap();
        self.stream.synchronize().unwrap();
    }
}

const UNTOUCHED: u8 = 0xee;

/// The block that one rank sends to another in an epoch.
fn block(from: u32, to: u32, epoch: u32, bytes: u64) -> impl Iterator<Item = u8> {
    let seed = from * 31 + to * 7 + epoch * 101;
    (0..bytes as u32).map(move |at| (seed + at * 13 + at / 256) as u8)
}

#[test]
fn every_block_comes_to_its_rank_in_every_epoch() {
    let test = "every_block_comes_to_its_rank_in_every_epoch";
    alone(test, &[], || {
        let world = World::new();
        let mut epoch = 0;
        for bytes in [0, 1, 12, 16, 4096] {
            for turn in 0..3 {
                epoch += 1;
                for rank in &world.ranks {
                    rank.prepare(bytes, epoch);
                }
                // Each rank is launched first in one of the turns.
                for rank in 0..RANKS {
                    world.launch((rank + turn) % RANKS, bytes, epoch, Duration::ZERO);
                }
                for rank in &world.ranks {
                    rank.synchronize();
                    rank.check(bytes, epoch);
                }
            }
        }
        assert!((0..RANKS).all(|rank| world.outcome(rank) == Outcome::Done));
        assert!(violations().is_empty());
    });
}

#[test]
fn exchanges_follow_each_other_without_the_host() {
    let test = "exchanges_follow_each_other_without_the_host";
    alone(test, &[], || {
        let world = World::new();
        let epochs = 200;
        // The same blocks in each epoch: the host does not write them between two launches.
        for rank in &world.ranks {
            rank.prepare(CAPACITY, 1);
        }
        for rank in 0..RANKS {
            for epoch in 1..=epochs {
                world.launch(rank, CAPACITY, epoch, Duration::ZERO);
            }
        }
        for rank in &world.ranks {
            rank.synchronize();
            rank.check(CAPACITY, 1);
        }
        assert!((0..RANKS).all(|rank| world.outcome(rank) == Outcome::Done));
    });
}

#[test]
fn a_rank_that_is_not_launched_is_named_after_the_timeout() {
    let test = "a_rank_that_is_not_launched_is_named_after_the_timeout";
    alone(test, &[], || {
        let world = World::new();
        let limit = Duration::from_millis(50);
        let start = Instant::now();
        for rank in [0, 2] {
            world.ranks[rank as usize].prepare(16, 1);
            world.launch(rank, 16, 1, limit);
        }
        for rank in [0, 2] {
            world.ranks[rank as usize].synchronize();
            assert_eq!(world.ranks[rank as usize].status.get(), 1 + 1);
            assert_eq!(world.outcome(rank), Outcome::Missing(1));
        }
        assert!(start.elapsed() >= limit);
        // The context is still usable.
        assert_eq!(read(world.ranks[0].window, 1).len(), 1);
        assert!(violations().is_empty());
    });
}

#[test]
fn blocks_of_another_size_are_not_taken_and_their_ranks_are_named() {
    let test = "blocks_of_another_size_are_not_taken_and_their_ranks_are_named";
    alone(test, &[], || {
        let world = World::new();
        let limit = Duration::from_secs(10);
        for (rank, bytes) in [(0, 16), (1, 16), (2, 4096)] {
            world.ranks[rank as usize].prepare(bytes, 1);
            world.launch(rank, bytes, 1, limit);
        }
        for rank in &world.ranks {
            rank.synchronize();
        }
        assert_eq!(world.outcome(0), Outcome::Differs(2));
        assert_eq!(world.outcome(1), Outcome::Differs(2));
        assert!(matches!(world.outcome(2), Outcome::Differs(0 | 1)));
        // Of rank 2, rank 0 has received nothing.
        world.ranks[0].context.bind_to_thread().unwrap();
        let received = read(world.ranks[0].recv, 3 * 16);
        assert!(received[2 * 16..].iter().all(|&byte| byte == UNTOUCHED));
        assert!(violations().is_empty());
    });
}

#[test]
fn the_abort_flag_ends_a_wait_and_other_streams_go_on_before() {
    let test = "the_abort_flag_ends_a_wait_and_other_streams_go_on_before";
    alone(test, &[], || {
        let world = World::new();
        let first = &world.ranks[0];
        first.prepare(16, 1);
        world.launch(0, 16, 1, Duration::ZERO);
        let other = first.context.new_stream().unwrap();
        captures::fill(&other, first.recv + 3 * CAPACITY - 1, 9, 1).unwrap();
        other.synchronize().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        first.context.bind_to_thread().unwrap();
        // SAFETY: the stream is alive.
        let waiting = unsafe { sys::cuStreamQuery(first.stream.cu_stream()) };
        assert_eq!(waiting, Code::CUDA_ERROR_NOT_READY);
        assert_eq!(first.status.get(), 0);
        world.abort.set(1);
        first.synchronize();
        assert_eq!(world.outcome(0), Outcome::Aborted);
        // A block that has arrived is taken although the flag is set: rank 1 finds one block, and misses that of rank 2.
        world.launch(1, 16, 1, Duration::ZERO);
        world.ranks[1].synchronize();
        assert_eq!(world.outcome(1), Outcome::Aborted);
        assert!(violations().is_empty());
    });
}

#[test]
fn a_window_that_is_gone_costs_the_context_of_who_waits() {
    let test = "a_window_that_is_gone_costs_the_context_of_who_waits";
    alone(test, &[], || {
        let world = World::new();
        let first = &world.ranks[0];
        first.prepare(16, 1);
        world.launch(0, 16, 1, Duration::ZERO);
        std::thread::sleep(Duration::from_millis(20));
        // The free of another stream, which nothing orders with the launch.
        let other = first.context.new_stream().unwrap();
        // SAFETY: none; this is the misuse.
        unsafe { result::free_async(first.window, other.cu_stream()) }.unwrap();
        other.synchronize().unwrap();
        let lost = first.stream.synchronize();
        assert_eq!(code(lost), Code::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(violations()[0].kind(), ViolationKind::UseAfterFree);
    });
}

#[test]
fn a_grid_that_is_not_the_kernels_is_a_failed_launch() {
    let test = "a_grid_that_is_not_the_kernels_is_a_failed_launch";
    alone(test, &[], || {
        let world = World::new();
        let limit = Duration::from_secs(1);
        let shape = (RANKS, 2 * BLOCK_THREADS);
        world.try_launch(0, 16, 1, limit, shape).unwrap();
        let lost = world.ranks[0].stream.synchronize();
        assert_eq!(code(lost), Code::CUDA_ERROR_LAUNCH_FAILED);
    });
}

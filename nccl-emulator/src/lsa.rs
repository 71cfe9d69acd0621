//! The all-to-all by loads and stores: runs the protocol of the crate `lsa-protocol` in place of its kernel
//! (`crates/lsa-protocol/src/all_to_all.cu`).

use std::task::Poll;
use std::time::{Duration, Instant};

use cuda_emulator::kernels::{self, Launch, Progress};
use cuda_emulator::violations::Violation;
use lsa_protocol::{BLOCK_THREADS, Exchange, KERNEL, Layout, Machine, Outcome};

/// Registers the kernel with the driver.
pub(crate) fn provide() {
    kernels::provide_waiting(KERNEL, || {
        let mut state = None;
        move |launch: &mut Launch<'_>| step(&mut state, launch)
    });
}

/// The state of a launch.
struct State {
    arguments: Arguments,
    exchange: Exchange,
    start: Instant,
}

/// The arguments of the kernel.
struct Arguments {
    send: u64,
    recv: u64,
    bytes: u64,
    rank: u32,
    epoch: u32,
    abort_flag: u64,
    timeout: Option<Duration>,
    status: u64,
    layout: Layout,
    /// The address of each rank's window.
    windows: Vec<u64>,
}

impl Arguments {
    fn of(launch: &mut Launch<'_>) -> Result<Self, Violation> {
        let (rank, ranks, epoch): (u32, u32, u32) =
            (launch.argument(4), launch.argument(5), launch.argument(6));
        let (bytes, capacity): (u64, u64) = (launch.argument(2), launch.argument(7));
        assert_eq!(launch.grid(), [ranks, 1, 1]);
        assert_eq!(launch.block(), [BLOCK_THREADS, 1, 1]);
        assert!(rank < ranks, "rank {rank} of {ranks}");
        assert!(epoch != 0, "epoch 0 is that of flags that were never set");
        assert!(
            bytes <= capacity,
            "blocks of {bytes} bytes in slots of {capacity}"
        );
        let layout = Layout::new(ranks, capacity).unwrap_or_else(|error| panic!("{error}"));
        let timeout: u64 = launch.argument(9);
        Ok(Self {
            send: launch.argument(0),
            recv: launch.argument(1),
            bytes,
            rank,
            epoch,
            abort_flag: launch.argument(8),
            timeout: (timeout != 0).then(|| Duration::from_nanos(timeout)),
            status: launch.argument(10),
            layout,
            windows: launch.read(launch.argument(3), ranks as usize)?,
        })
    }
}

/// Continues a launch until it has to wait.
fn step(state: &mut Option<State>, launch: &mut Launch<'_>) -> Result<Progress, Violation> {
    let state = match state {
        Some(state) => state,
        None => {
            let arguments = Arguments::of(launch)?;
            launch.store_release(arguments.status + 4, arguments.epoch)?;
            state.insert(State {
                exchange: Exchange::new(arguments.rank, arguments.layout.ranks()),
                arguments,
                start: Instant::now(),
            })
        }
    };
    let missing = state.exchange.missing().len();
    let mut machine = Device {
        launch,
        arguments: &state.arguments,
        start: state.start,
    };
    match state.exchange.step(&mut machine)? {
        Poll::Pending if state.exchange.missing().len() < missing => Ok(Progress::Moved),
        Poll::Pending => Ok(Progress::Waiting),
        Poll::Ready(Outcome::Done) => Ok(Progress::Done),
        // The failure is already recorded in memory.
        Poll::Ready(Outcome::Missing(_) | Outcome::Differs(_) | Outcome::Aborted) => {
            Ok(Progress::Done)
        }
    }
}

/// The memory and the clock of one step of a launch.
struct Device<'a, 'l> {
    launch: &'a mut Launch<'l>,
    arguments: &'a Arguments,
    start: Instant,
}

impl Device<'_, '_> {
    /// The address of the flag that `source` sets in the window of `rank`.
    fn flag(&self, rank: u32, source: u32) -> u64 {
        let Arguments { layout, epoch, .. } = self.arguments;
        self.arguments.windows[rank as usize] + layout.flag_offset(*epoch, source)
    }

    /// The address of the size that `source` tells in the window of `rank`.
    fn size(&self, rank: u32, source: u32) -> u64 {
        let Arguments { layout, epoch, .. } = self.arguments;
        self.arguments.windows[rank as usize] + layout.size_offset(*epoch, source)
    }

    /// The address of the slot that `source` fills in the window of `rank`.
    fn slot(&self, rank: u32, source: u32) -> u64 {
        let Arguments { layout, epoch, .. } = self.arguments;
        self.arguments.windows[rank as usize] + layout.data_offset(*epoch, source)
    }

    /// The address of the word that records the failure of an exchange of this rank.
    fn failed_at(&self) -> u64 {
        let Arguments {
            layout,
            rank,
            windows,
            ..
        } = self.arguments;
        windows[*rank as usize] + layout.failed_offset()
    }

    fn copy(&mut self, to: u64, from: u64) -> Result<(), Violation> {
        self.launch.copy(to, from, self.arguments.bytes as usize)
    }

    /// The address of the block of a rank.
    fn block(&self, blocks: u64, rank: u32) -> u64 {
        blocks + u64::from(rank) * self.arguments.bytes
    }
}

impl Machine for Device<'_, '_> {
    type Error = Violation;

    fn keep(&mut self) -> Result<(), Violation> {
        let Arguments {
            send, recv, rank, ..
        } = *self.arguments;
        self.copy(self.block(recv, rank), self.block(send, rank))
    }

    fn push(&mut self, peer: u32) -> Result<(), Violation> {
        let Arguments { send, rank, .. } = *self.arguments;
        self.copy(self.slot(peer, rank), self.block(send, peer))
    }

    fn release(&mut self, peer: u32) -> Result<(), Violation> {
        let Arguments { rank, bytes, .. } = *self.arguments;
        let (size, flag) = (self.size(peer, rank), self.flag(peer, rank));
        self.launch.write(size, &[bytes])?;
        self.launch.store_release(flag, self.arguments.epoch)
    }

    fn acquire(&mut self, source: u32) -> Result<bool, Violation> {
        let flag = self.flag(self.arguments.rank, source);
        Ok(self.launch.load_acquire(flag)? == self.arguments.epoch)
    }

    fn is_as_large(&mut self, source: u32) -> Result<bool, Violation> {
        let Arguments { rank, bytes, .. } = *self.arguments;
        Ok(self.launch.read::<u64>(self.size(rank, source), 1)? == [bytes])
    }

    fn take(&mut self, source: u32) -> Result<(), Violation> {
        let Arguments { recv, rank, .. } = *self.arguments;
        self.copy(self.block(recv, source), self.slot(rank, source))
    }

    fn is_aborted(&mut self) -> Result<bool, Violation> {
        Ok(self.launch.load_acquire(self.arguments.abort_flag)? != 0)
    }

    fn failed(&mut self) -> Result<Option<Outcome>, Violation> {
        let outcome = Outcome::from_status(self.launch.load_acquire(self.failed_at())?);
        Ok((outcome != Outcome::Done).then_some(outcome))
    }

    fn fail(&mut self, outcome: Outcome) -> Result<(), Violation> {
        self.launch
            .store_release(self.failed_at(), outcome.status())?;
        self.launch
            .store_release(self.arguments.status, outcome.status())
    }

    fn is_overdue(&mut self) -> bool {
        let timeout = self.arguments.timeout;
        timeout.is_some_and(|timeout| self.start.elapsed() >= timeout)
    }
}

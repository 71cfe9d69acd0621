//! A communicator, and what all handles of it share.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use nccl_base::from_outside;

use super::handle::Turn;
use super::launch_mode::LaunchMode;
use super::revocation::Revocation;
use super::switch::Switch;
use super::timeouts::Timeouts;
use crate::abort::AbortSignal;
use crate::error::{Error, ErrorKind};
use crate::forked::{self, Resident};
use crate::graphs::Plans;
use crate::inside::{self, Inside, Place};
use crate::library::Library;
use crate::operation::{Operation, OperationKind, Shape};
use crate::peers::Supervisor;
use crate::reaper;
use crate::recorder::{Identity, Recording, Tracked, read_one};
use crate::standing::Overdue;
use crate::state::{Phase, State};
use crate::stats::Counting;
use crate::sync::Mutex;
use nccl_base::fault::{Fault, Roster};

/// The ranks that work together, seen from one of them (`ncclComm_t`).
///
/// Cheap to clone; the operations take `&self` and may be called from any thread. NCCL serves one call
/// on a communicator at a time, so concurrent callers take turns; all ranks must issue their operations
/// in the same order.
///
/// Dropping the last clone finalizes the communicator in the background, under a deadline, and aborts
/// it when that passes; [`finalize`](Self::finalize) does the same in the foreground and tells.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// use nccl::{ReduceOp, World};
///
/// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// let comm = World::single().communicator("demo").stream(&stream).build()?;
/// let mut y = stream.clone_htod(&[1i32, 2, 3])?;
/// comm.all_reduce_in_place(&mut y, ReduceOp::Max)?.wait()?;
/// comm.finalize()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Communicator {
    #[doc(hidden)]
    pub inner: Resident<Arc<Inner>>,
    /// Where the operations of this clone are put.
    pub(crate) stream: Resident<Arc<CudaStream>>,
    /// How long each may take.
    #[doc(hidden)]
    pub limit: Duration,
}

#[doc(hidden)]
pub struct Inner {
    pub(crate) library: Library,
    pub(crate) name: Arc<str>,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) host: Arc<str>,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) timeouts: Timeouts,
    /// How long NCCL may take to notice an abort.
    pub(crate) notice: Duration,
    pub(crate) phase: Arc<Phase>,
    /// What it recorded.
    pub(crate) tracked: Tracked,
    /// When its abort began, and how long NCCL may take for it.
    pub(crate) aborting: OnceLock<(Instant, Duration)>,
    /// What it counted.
    pub(crate) _counting: Counting,
    pub(crate) abort_signal: AbortSignal,
    pub(crate) handle: Turn,
    /// What the ranks know of each other's end of it; `None` where there is nobody else, or no way to
    /// reach them.
    pub(crate) board: Option<Arc<dyn Supervisor>>,
    /// Events of past requests, kept so that the next one creates none.
    pub(crate) marks: Mutex<Vec<Arc<CudaEvent>>>,
    /// Events for the watchdog's marks.
    pub(crate) events: Mutex<Vec<CudaEvent>>,
    /// What the watchdog ended it for.
    pub(crate) overdue: OnceLock<Overdue>,
    /// The graphs that captured its operations.
    pub(crate) plans: Plans,
    /// The memory that all ranks have registered as symmetric windows.
    pub(crate) windows: Mutex<Vec<std::ops::Range<u64>>>,
    /// Whether it was made so that NCCL uses no multiprocessors where copy engines can do the work.
    pub(crate) is_zero_cta: bool,
    /// Whether NCCL's calls on it wait.
    pub(crate) blocks: bool,
    /// What ends a call that waits; none for one that does not wait, or was made elsewhere.
    pub(crate) switch: Option<Arc<Switch>>,
    /// How many have it without being able to use it.
    pub(crate) kept: AtomicUsize,
    /// The launch mode that the program asked for; none where the ranks chose one.
    pub(crate) asked_mode: Option<LaunchMode>,
    /// The streams on which operations are not known to be done.
    pub(crate) in_use: Mutex<Vec<Arc<CudaStream>>>,
    /// While it is being aborted: the exit of the process waits for that.
    pub(crate) ending: Mutex<Option<reaper::Pending>>,
    /// Whether NCCL was left with a launch that had not come to rest.
    pub(crate) is_unsettled: AtomicBool,
    /// Whether more than kernels of NCCL's may use lent memory.
    pub(crate) lends_to_proxies: AtomicBool,
    /// The launch under way that it shares with other communicators.
    pub(crate) launch: Mutex<Option<Arc<SharedLaunch>>>,
    /// What it is to NCCL when it was revoked.
    pub(crate) revocation: Revocation,
    /// Captures happen on it, because nobody else puts anything there. And cudarc orders the streams of a context only while it
    /// counts one of its own streams there. Released by the reaper, after NCCL's part.
    pub(crate) own_stream: Option<Arc<CudaStream>>,
}

/// A launch of several communicators that NCCL carries out on a thread of its own. Held while one of them is aborted:
/// NCCL lets only the first abort wait for that thread, which goes on using all of them
/// (`ncclGroupJobAbort`, group.cc).
#[derive(Default)]
pub(crate) struct SharedLaunch(pub(super) Mutex<()>);

impl Inner {
    /// This thread enters a call on it ([`inside`](crate::inside)).
    #[inline]
    #[doc(hidden)]
    pub fn enter(&self, place: Place, limit: Duration) -> Inside {
        inside::enter(std::ptr::from_ref(self).addr(), place, limit)
    }
}

impl Communicator {
    /// This rank, from 0.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert!(comm.rank() < comm.world_size());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// Which rank of the world each of its ranks is, in order: the world of the epoch in which the communicator was made.
    /// Empty for one that was made without a `World`.
    ///
    /// Texts and events say a rank's number in the world beside that in the communicator where they differ.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.world_ranks(), [0]);
    /// let tp = comm.split("tp", Some(0), 0)?.expect("this rank has a color");
    /// assert_eq!(tp.world_ranks()[tp.rank()], 0);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn world_ranks(&self) -> &[usize] {
        let members = self.inner.tracked.track().identity.members.as_deref();
        members.unwrap_or_default()
    }

    /// The number of ranks.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.world_size(), 1);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.inner.world_size
    }

    /// The name it was made with.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.name(), "demo");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The stream on which operations are put: the one it was made with, or that of [`on`](Self::on).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.stream().cu_stream(), stream.cu_stream());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The same communicator with another stream for its operations.
    ///
    /// NCCL runs the operations of a communicator one after another, whatever their streams; on every
    /// rank in the same order. A stream that cannot carry operations is refused by the first one.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let context = cudarc::driver::CudaContext::new(0)?;
    /// # let stream = context.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let other = context.new_stream()?;
    /// let mut y = other.clone_htod(&[1.0f32, 2.0])?;
    /// comm.on(&other).all_reduce_in_place(&mut y, nccl::ReduceOp::Avg)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn on(&self, stream: &Arc<CudaStream>) -> Self {
        Self {
            inner: self.inner.clone(),
            stream: Resident::new(Arc::clone(stream)),
            limit: self.limit,
        }
    }

    /// The same communicator with another limit for its operations: for the call, and for
    /// [`Request::wait`](crate::Request::wait). `NCCL_RUN_TIMEOUT` in the environment wins over it.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// use std::time::Duration;
    /// # let mut y = stream.clone_htod(&[1.0f32, 2.0])?;
    /// let first_step = comm.within(Duration::from_secs(120));
    /// first_step.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn within(&self, limit: Duration) -> Self {
        Self {
            limit: from_outside::operation(limit),
            ..self.clone()
        }
    }

    /// How it calls NCCL; `None` for one that was made elsewhere and blocks.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.launch_mode(), Some(nccl::LaunchMode::BlockingChild));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn launch_mode(&self) -> Option<LaunchMode> {
        self.inner.launch_mode()
    }

    /// What it did last.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let x = stream.clone_htod(&[1.0f32; 8])?;
    /// # let mut y = stream.clone_htod(&[1.0f32; 8])?;
    /// comm.group(|group| {
    ///     group.isend(&x, 0)?;
    ///     group.irecv(&mut y, 0)
    /// })?;
    /// let recording = comm.recording();
    /// let [group] = &recording.calls[..] else { panic!("one call") };
    /// assert_eq!(group.operations[0].peer, Some(0));
    /// assert_eq!(group.operations[0].count, 8);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn recording(&self) -> Recording {
        read_one(self.inner.tracked.track())
    }

    /// What its ranks call it, where there are others.
    #[doc(hidden)]
    pub fn key(&self) -> Option<&str> {
        self.inner.board.as_ref().map(|board| board.key())
    }

    /// What ended the communicator on all of its ranks, the same on each of them; `None` while it is in
    /// use, and when its ranks do not know each other (as [`Error::fault`]).
    ///
    /// For those whose own error types lose it.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// if let Some(fault) = comm.fault() {
    ///     eprintln!("{fault}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        forked::check().ok()?;
        let board = self.inner.board.as_ref()?;
        if !self.inner.phase.get().is_aborted() {
            return None;
        }
        board.fault().map(|fault| Fault::clone(fault))
    }

    /// Where it is in its life.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// use nccl::CommunicatorState;
    ///
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.state(), CommunicatorState::Ready);
    /// comm.abort("an example")?;
    /// assert_eq!(comm.state(), CommunicatorState::Aborted);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn state(&self) -> State {
        self.inner.phase.get()
    }

    /// The library it lives in.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// println!("on NCCL {}", comm.library().version());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.inner.library
    }
}

impl Inner {
    /// As the recorder and the log name it.
    pub(crate) fn identity(&self) -> &Identity {
        &self.tracked.track().identity
    }

    pub(crate) fn launch_mode(&self) -> Option<LaunchMode> {
        match (self.blocks, &self.switch) {
            (false, _) => Some(LaunchMode::NonBlocking),
            (true, Some(_)) => Some(LaunchMode::BlockingChild),
            (true, None) => None,
        }
    }

    /// Whether NCCL's abort flag is up, also before the communicator counts as aborted.
    pub(crate) fn is_flag_up(&self) -> bool {
        self.switch
            .as_ref()
            .is_some_and(|switch| switch.is_pulled())
    }

    /// Whether NCCL's abort flag is up, or about to be.
    pub(crate) fn is_being_ended(&self) -> bool {
        self.phase.get().is_aborted() || self.is_flag_up()
    }

    /// The description of an operation that began at `started`.
    #[doc(hidden)]
    pub fn operation(
        &self,
        kind: OperationKind,
        shape: Shape,
        sequence: Option<u64>,
        started: Instant,
    ) -> Operation {
        Operation {
            kind,
            communicator: Arc::clone(&self.name),
            rank: self.rank,
            world_size: self.world_size,
            host: Arc::clone(&self.host),
            pid: std::process::id(),
            epoch: self.epoch(),
            roster: Arc::clone(self.roster()),
            sequence,
            plan: sequence
                .filter(|_| kind == OperationKind::Replay)
                .and_then(|sequence| self.plans.replayed_by(sequence)),
            shape,
            elapsed: started.elapsed(),
        }
    }

    /// Which ranks of the world, and of its launcher, its ranks are.
    pub(crate) fn roster(&self) -> &Arc<Roster> {
        &self.tracked.track().identity.roster
    }

    /// One of its ranks, as a text about another communicator names it.
    pub(crate) fn member(&self, rank: usize) -> String {
        let roster = self.roster();
        format!("{} of {}", roster.who(&[rank]), roster.named(&self.name))
    }

    /// That of the world that made it; 0 where there is none.
    pub(crate) fn epoch(&self) -> u64 {
        let home = self.tracked.track().identity.home.as_ref();
        home.map_or(0, |home| home.place().epoch)
    }

    /// The stream on which it captures.
    pub(crate) fn own_stream(&self) -> &Arc<CudaStream> {
        match &self.own_stream {
            Some(stream) => stream,
            None => unreachable!("it is taken when nobody has the communicator any more"),
        }
    }

    /// The error for whoever finds the communicator out of use.
    #[cold]
    pub(crate) fn out_of_use(&self) -> Error {
        let state = self.phase.get();
        match state {
            State::Aborting | State::Aborted | State::Leaked => Error::new(ErrorKind::Aborted {
                reason: self.abort_reason(),
            }),
            _ => Error::new(ErrorKind::Closed {
                state: state.text(),
            }),
        }
    }

    fn abort_reason(&self) -> String {
        let fault = self.board.as_ref().and_then(|board| board.fault());
        fault
            .map(ToString::to_string)
            .or_else(|| self.phase.reason())
            .unwrap_or_else(|| String::from("no reason was given"))
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("name", &self.inner.name)
            .field("rank", &self.inner.rank)
            .field("world_size", &self.inner.world_size)
            .field("state", &self.inner.phase.get())
            .finish()
    }
}

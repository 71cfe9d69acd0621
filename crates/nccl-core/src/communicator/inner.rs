//! The state that all handles of a communicator share.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use super::abort_flag_parent::AbortFlagParent;
use super::handle::{Handle, HandleLock, RawComm};
use super::launch_mode::LaunchMode;
use super::peer_kernels::{PeerKernel, PeerKernels};
use super::revocation::Revocation;
use super::timeouts::Timeouts;
use crate::abort::AbortSignal;
use crate::active_calls::{self, CallGuard, CallKind};
use crate::drop_queue;
use crate::error::{Error, ErrorKind, Result};
use crate::graphs::Plans;
use crate::library::Library;
use crate::operation::{Operation, OperationKind, Shape};
use crate::peers::Supervisor;
use crate::pending_call::Overdue;
use crate::recorder::{Identity, TrackHandle};
use crate::state::{Lifecycle, State};
use crate::stats::CounterHandle;
use crate::sync::Mutex;
use nccl_base::fault::Roster;

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
    pub(crate) abort_notice_timeout: Duration,
    pub(crate) lifecycle: Arc<Lifecycle>,
    /// The recording of its calls.
    pub(crate) track_handle: TrackHandle,
    /// When its abort began, and the timeout of that abort.
    pub(crate) abort_started: OnceLock<(Instant, Duration)>,
    /// Its statistics.
    pub(crate) _counting: CounterHandle,
    pub(crate) abort_signal: AbortSignal,
    pub(crate) handle: HandleLock,
    /// Supervises its end on all ranks; `None` for a single rank, or for ranks that cannot reach each other.
    pub(crate) supervisor: Option<Arc<dyn Supervisor>>,
    /// Events of past requests, kept so that the next one creates none.
    pub(crate) completion_events: Mutex<Vec<Arc<CudaEvent>>>,
    /// Events for the watchdog's marks.
    pub(crate) events: Mutex<Vec<CudaEvent>>,
    /// The overdue operation because of which the watchdog ended it.
    pub(crate) overdue_operation: OnceLock<Overdue>,
    /// The graphs that captured its operations.
    pub(crate) plans: Plans,
    /// The memory that all ranks have registered as symmetric windows.
    pub(crate) windows: Mutex<Vec<std::ops::Range<u64>>>,
    /// Held from the comparison of a window between the ranks until its registration.
    pub(crate) window_turn: Mutex<()>,
    /// Kernels that reach the memory of other ranks through its windows.
    pub(crate) peer_kernels: PeerKernels,
    /// Whether its ranks are connected for one-sided operations.
    pub(crate) has_window: AtomicBool,
    /// Whether its device memory is given back now (`suspend`). Set under the lock of `handle`.
    pub(crate) is_suspended: AtomicBool,
    /// The numbers of signals and of contexts for one-sided operations.
    pub(crate) rma_limits: (usize, usize),
    /// Whether it was made so that NCCL uses no multiprocessors where copy engines can do the work.
    pub(crate) is_zero_cta: bool,
    /// Whether NCCL's calls on it block.
    pub(crate) has_blocking_calls: bool,
    /// The abort-flag parent that ends a blocking call; `None` if calls do not block, or for a communicator made elsewhere.
    pub(crate) abort_flag_parent: Option<Arc<AbortFlagParent>>,
    /// The number of handles that cannot use it: `KeepAlive` and `TemporaryHandle`.
    pub(crate) non_user_handles: AtomicUsize,
    /// The launch mode that the program asked for; `None` if the ranks chose one.
    pub(crate) asked_mode: Option<LaunchMode>,
    /// The streams whose operations are not known to be done.
    pub(crate) in_use: Mutex<Vec<Arc<CudaStream>>>,
    /// Set while it is being aborted: the exit of the process waits for the abort.
    pub(crate) exit_hold: Mutex<Option<drop_queue::ExitHold>>,
    /// Whether NCCL was left with an unfinished launch.
    pub(crate) has_unfinished_launch: AtomicBool,
    /// Whether borrowed memory may be used by more than NCCL's kernels.
    pub(crate) lends_beyond_kernels: AtomicBool,
    /// The launch under way that it shares with other communicators.
    pub(crate) shared_launch: Mutex<Option<Arc<SharedLaunch>>>,
    /// The state of its revocation.
    pub(crate) revocation: Revocation,
    /// The stream for captures, on which no other work is put. Its existence also makes cudarc order the streams of the
    /// context, which cudarc does only while it counts a stream of its own there. Released by the drop queue, after NCCL's
    /// part.
    pub(crate) capture_stream: Option<Arc<CudaStream>>,
}

/// A launch of several communicators that NCCL carries out on a thread of its own. Locked while one of them is aborted:
/// NCCL makes only the first abort wait for that thread, which continues to use all of them (`ncclGroupJobAbort`,
/// group.cc).
#[derive(Default)]
pub(crate) struct SharedLaunch(pub(super) Mutex<()>);

impl Inner {
    /// Marks this thread as inside a call on this communicator ([`active_calls`](crate::active_calls)).
    #[inline]
    #[doc(hidden)]
    pub fn enter(&self, kind: CallKind, timeout: Duration) -> CallGuard {
        active_calls::enter(std::ptr::from_ref(self).addr(), kind, timeout)
    }
}

impl Inner {
    /// Returns its identity in the recorder and the log.
    pub(crate) fn identity(&self) -> &Identity {
        &self.track_handle.track().identity
    }

    pub(crate) fn launch_mode(&self) -> Option<LaunchMode> {
        match (self.has_blocking_calls, &self.abort_flag_parent) {
            (false, _) => Some(LaunchMode::NonBlocking),
            (true, Some(_)) => Some(LaunchMode::BlockingChild),
            (true, None) => None,
        }
    }

    /// Whether NCCL's abort flag is raised, even if the communicator does not count as aborted yet.
    pub(crate) fn is_abort_flag_raised(&self) -> bool {
        self.abort_flag_parent
            .as_ref()
            .is_some_and(|abort_flag_parent| abort_flag_parent.is_abort_flag_raised())
    }

    /// Whether NCCL's abort flag is raised, or about to be.
    pub(crate) fn is_being_ended(&self) -> bool {
        self.lifecycle.get().abort_has_begun() || self.is_abort_flag_raised()
    }

    /// Returns the description of an operation that began at `started`.
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
            generation: self.generation(),
            roster: Arc::clone(self.roster()),
            sequence,
            plan: sequence
                .filter(|_| kind == OperationKind::Replay)
                .and_then(|sequence| self.plans.replayed_by(sequence)),
            peer: shape.peer,
            root: shape.root,
            count: shape.count,
            data_type: shape.data_type,
            reduction: shape.reduction,
            elapsed: started.elapsed(),
        }
    }

    /// Returns the world and launcher ranks of its ranks.
    pub(crate) fn roster(&self) -> &Arc<Roster> {
        &self.track_handle.track().identity.roster
    }

    /// Returns the name of one of its ranks, for a text about another communicator.
    pub(crate) fn name_of_rank(&self, rank: usize) -> String {
        let roster = self.roster();
        format!("{} of {}", roster.who(&[rank]), roster.named(&self.name))
    }

    /// Returns the generation of the world that made it; 0 without a world.
    pub(crate) fn generation(&self) -> u64 {
        let scope = self.track_handle.track().identity.scope.as_ref();
        scope.map_or(0, |scope| scope.place().generation)
    }

    /// Returns the stream for captures.
    pub(crate) fn capture_stream(&self) -> &Arc<CudaStream> {
        match &self.capture_stream {
            Some(stream) => stream,
            None => unreachable!("taken only with the last handle"),
        }
    }

    /// Returns NCCL's pointer, while operations may be issued. Begins the abort if the abort signal has been
    /// given.
    pub(crate) fn ready(self: &Arc<Self>, handle: &Handle) -> Result<RawComm> {
        let raw = self
            .lifecycle
            .usable(handle.raw)
            .ok_or_else(|| self.out_of_use())?;
        if self.is_suspended.load(Ordering::Relaxed) {
            return Err(self.suspended());
        }
        if self.abort_signal.is_aborted() {
            self.abort_in_background("its abort signal was given");
            return Err(Error::new(ErrorKind::Aborted {
                reason: String::from("its abort signal was given"),
            }));
        }
        Ok(raw)
    }

    /// Returns the error for a call on a communicator that is out of use.
    #[cold]
    pub(crate) fn out_of_use(&self) -> Error {
        let state = self.lifecycle.get();
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
        let fault = self
            .supervisor
            .as_ref()
            .and_then(|supervisor| supervisor.fault());
        fault
            .map(ToString::to_string)
            .or_else(|| self.lifecycle.reason())
            .unwrap_or_else(|| String::from("no reason was given"))
    }

    /// Adds a kernel that reaches the memory of other ranks.
    #[doc(hidden)]
    pub fn add_peer_kernel(&self, kernel: Arc<dyn PeerKernel>) {
        self.peer_kernels.add(Arc::clone(&kernel));
        // An abort that began before the kernel was added has not told it to leave.
        if self.has_ended() {
            kernel.leave();
        }
    }

    /// Whether the communicator has ended, or its abort has begun.
    #[doc(hidden)]
    pub fn has_ended(&self) -> bool {
        let state = self.lifecycle.get();
        state.abort_has_begun() || state.is_final()
    }

    /// Returns how long other work may be ahead of an operation on its stream; `None` for no limit.
    #[doc(hidden)]
    pub fn queue_timeout(&self) -> Option<Duration> {
        self.timeouts.queue_timeout()
    }

    /// Tells kernels to leave, and waits for them until `deadline`.
    pub(super) fn end_peer_kernels(&self, deadline: Instant) -> bool {
        self.peer_kernels.leave();
        self.peer_kernels.wait(deadline, || false)
    }
}

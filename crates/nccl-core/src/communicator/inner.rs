//! What all handles of a communicator share.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use super::handle::{Handle, RawComm, Turn};
use super::launch_mode::LaunchMode;
use super::revocation::Revocation;
use super::switch::Switch;
use super::timeouts::Timeouts;
use crate::abort::AbortSignal;
use crate::error::{Error, ErrorKind, Result};
use crate::graphs::Plans;
use crate::inside::{self, Inside, Place};
use crate::library::Library;
use crate::operation::{Operation, OperationKind, Shape};
use crate::peers::Supervisor;
use crate::reaper;
use crate::recorder::{Identity, Tracked};
use crate::standing::Overdue;
use crate::state::{Phase, State};
use crate::stats::Counting;
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

    /// NCCL's pointer, while operations may be issued. Whoever finds the abort signal given begins the
    /// abort.
    pub(crate) fn ready(self: &Arc<Self>, handle: &Handle) -> Result<RawComm> {
        let raw = self
            .phase
            .usable(handle.raw)
            .ok_or_else(|| self.out_of_use())?;
        if self.abort_signal.is_aborted() {
            self.abort_in_background("its abort signal was given");
            return Err(Error::new(ErrorKind::Aborted {
                reason: String::from("its abort signal was given"),
            }));
        }
        Ok(raw)
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

//! The interface through which a communicator uses the connections to its other ranks.
//!
//! These traits are implemented above this crate, by the control plane. A communicator without
//! peers ([`Communicator::builder`](crate::Communicator::builder)) uses none of them.
//!
//! - [`Peers`]: the ranks of one world that this rank can reach beside NCCL;
//! - [`Supervisor`]: ends a communicator on all of its ranks, with the same fault;
//! - [`InitSupervisor`]: supervises the making of a communicator by its ranks;
//! - [`AbortHandle`]: the supervisor's handle to the communicator here.

use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream};
use once_cell::sync::OnceCell;

use nccl_base::departure::GatherOutcome;
use nccl_base::launch_mode::{LaunchMode, LaunchPreference};

use crate::communicator::{Inner, Timeouts};
use crate::error::{Error, Result};
use crate::fault::{Cause, Fault, Roster};
use crate::identity::RecorderScope;
use crate::library::Library;
use crate::recorder::IndexedCall;

/// The ranks of a world, as seen from one of them.
pub trait Peers: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Returns the job's name and generation.
    fn job(&self) -> (&str, u64);

    /// Returns this rank.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Describes a rank with its host and process.
    fn describe(&self, rank: usize) -> String;

    /// Returns the world and launcher ranks of a communicator of `members`.
    fn roster(&self, members: &[usize]) -> Roster;

    /// Returns the host of each of `members`, once they are known.
    fn hosts(&self, members: &[usize]) -> Option<Vec<String>>;

    /// Returns the ranks that have departed.
    fn departed(&self) -> Vec<usize>;

    /// Waits briefly until the handlers have processed all notices received so far.
    fn catch_up(&self);

    /// Returns the recorder scope under which the calls of this world's communicators are recorded.
    fn scope(&self) -> Arc<RecorderScope>;

    /// Sends `part` to all `members`, or to all ranks, and returns the parts of all of them.
    ///
    /// # Errors
    /// When a rank does not arrive by `deadline`, or has departed.
    fn exchange(
        &self,
        topic: &str,
        members: Option<&Arc<[usize]>>,
        part: &[u8],
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<Vec<u8>>>;

    /// Begins to supervise a communicator.
    fn supervise(&self, request: SupervisionRequest<'_>) -> Arc<dyn Supervisor>;

    /// Returns the supervisor of the making of communicator `name` by `members`, in which this rank is `rank`.
    fn supervise_init(
        &self,
        name: &str,
        members: Arc<[usize]>,
        rank: usize,
    ) -> Box<dyn InitSupervisor>;
}

/// A communicator that is to be supervised.
pub struct SupervisionRequest<'w> {
    /// The key that identifies it on all ranks.
    pub key: Arc<str>,
    /// Its name.
    pub name: &'w Arc<str>,
    /// The world ranks that are its ranks, in order.
    pub members: Arc<[usize]>,
    /// The same ranks, with their launcher ranks.
    pub roster: Arc<Roster>,
    /// This process's rank in it.
    pub rank: usize,
    /// How long the other ranks may take to confirm its end.
    pub confirm_timeout: Duration,
    /// The context of its device.
    pub context: &'w Arc<CudaContext>,
}

/// Ends a communicator on all of its ranks.
pub trait Supervisor: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Returns the key that identifies the communicator on all ranks.
    fn key(&self) -> &str;

    /// Returns the ranks of its world.
    fn peers(&self) -> &Arc<dyn Peers>;

    /// Returns the world ranks that are its ranks, in order.
    fn members(&self) -> &[usize];

    /// Returns the rank in the communicator of the world rank `member`.
    fn rank_of_member(&self, member: usize) -> usize;

    /// Names one of its ranks, with host and process where known.
    fn name_of(&self, rank: usize) -> String;

    /// Names `ranks`: a single rank with host and process, several in short form.
    fn names_of(&self, ranks: &[usize]) -> String;

    /// Lets this supervisor end `target` from now on; returns the fault if there is one already.
    fn attach(&self, target: AbortHandle) -> Option<Arc<Fault>>;

    /// Announces to all ranks that this rank ends the communicator because of `cause`. One of the announcements becomes the
    /// fault of all ranks.
    fn announce(self: Arc<Self>, cause: Cause);

    /// Returns the fault that ended it on all ranks.
    fn fault(&self) -> Option<&Arc<Fault>>;

    /// Returns the fault; before it is decided, the one that this rank has announced.
    fn fault_or_announced(&self) -> Option<&Arc<Fault>>;

    /// Whether `fault` is this rank's own announcement.
    fn is_own(&self, fault: &Fault) -> bool;

    /// Whether it has a fault, decided or announced: it has ended on all ranks, or is about to.
    fn has_fault(&self) -> bool {
        self.fault_or_announced().is_some()
    }

    /// Reports how far this rank has released the communicator, and waits until the other ranks have reported the same.
    /// Returns whether the wait is over for this rank. If not, some rank needs the end of all aborts, and this function is
    /// called again when the abort here has returned.
    fn report_release(&self, so_far: ReleaseProgress) -> bool;

    /// Reports through [`report_release`](Self::report_release) whether the abort here has returned.
    fn report_abort_returned(&self, freed: bool, needs_all: bool) {
        self.report_release(match (freed, needs_all) {
            (false, _) => ReleaseProgress::Nothing,
            (true, true) => ReleaseProgress::AllAndNeedsAll,
            (true, false) => ReleaseProgress::All,
        });
    }

    /// Returns a sentence that names the ranks that have not released the communicator, and says whether the world has
    /// formed another generation since.
    fn unconfirmed_text(&self) -> Option<&str>;

    /// Sends `part` for `topic` to the other ranks, once, and returns their parts.
    fn gather(
        &self,
        topic: &str,
        part: &[u8],
        timeout: Duration,
        interrupted: &dyn Fn() -> bool,
    ) -> GatherOutcome;

    /// Returns the number of the next call to be compared, from 1.
    fn next_check(&self) -> u64;

    /// Returns the handle of the supervised communicator; `None` while it is being made.
    fn target(&self) -> Option<AbortHandle>;

    /// Whether another rank has sent a query about the `collective_index`-th collective, or a later one.
    fn is_queried(&self, collective_index: u64) -> bool;

    /// Records that a rank has sent a query about the `collective_index`-th collective.
    fn set_queried(&self, collective_index: u64);

    /// Queries which ranks have not entered a collective that this rank entered `since` ago. For a sample, only asks how far
    /// apart the ranks arrived.
    fn query_stragglers(
        &self,
        collective_index: u64,
        call: &IndexedCall,
        since: Duration,
        is_sample: bool,
    );
}

/// How far a rank has released a communicator that is being aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseProgress {
    /// Its kernels have ended, and no other part of NCCL used borrowed memory.
    Kernels,
    /// Its kernels have ended. More than kernels used borrowed memory, so that it needs the end of all aborts.
    KernelsAndNeedsAll,
    /// Its abort has returned, and it needs the end of all other aborts.
    AllAndNeedsAll,
    /// Its abort has returned.
    All,
    /// Its abort has not returned in time.
    Nothing,
}

/// Supervises the making of a communicator: the ranks report to each other which of them cannot, and agree on one fault.
pub trait InitSupervisor {
    /// Returns the message in which this rank reports why it cannot take part.
    fn encode_failure(&self, error: &Error) -> Vec<u8>;

    /// Chooses the fault of all ranks from the messages of the ranks that cannot take part: returns the rank and its fault.
    fn choose_fault(&self, told: &[(usize, &[u8])]) -> Option<(usize, Fault)>;

    /// Returns the fault for ranks that request different launch modes.
    fn mode_mismatch(&self, modes: &[Option<LaunchMode>]) -> Fault;

    /// Returns the error with which this rank ends the creation because of `fault`, which is the same on all ranks.
    fn failed_by(&self, error: Error, fault: Arc<Fault>) -> Error;

    /// Returns this rank's error for an exchange that did not complete; `own` is this rank's own failure, if any.
    fn explain_failure(&self, own: Option<Error>, exchange: Error) -> Error;

    /// Returns the world and launcher ranks of its ranks.
    fn roster(&self) -> &Roster;
}

/// A query of another rank: whether this rank has entered a given collective. The answer is sent through it.
pub trait StragglerQuery: Send {
    /// Whether the query can still be answered.
    fn is_there(&self) -> bool;

    /// Returns the supervisor of the communicator on this rank; `None` if there is none.
    fn supervisor(&self) -> Option<Arc<dyn Supervisor>>;

    /// Returns an identifier that is equal for all queries of one connection.
    fn connection(&self) -> *const ();

    /// Answers how long ago this rank entered the collective; if it has not entered, what this rank did last.
    fn answer(&self, key: &str, collective_index: u64, entered: Option<Duration>, last: &str);
}

/// A weak handle to a communicator, with which a supervisor can end it.
#[derive(Clone)]
pub struct AbortHandle(pub(crate) Weak<Inner>);

impl AbortHandle {
    pub(crate) fn new(inner: &Arc<Inner>) -> Self {
        Self(Arc::downgrade(inner))
    }

    /// Begins an abort because of `fault`, which another rank reported. Never waits. `None` if the communicator is gone.
    #[must_use]
    pub fn begin_end(&self, fault: &Arc<Fault>) -> Option<PendingEnd> {
        let inner = self.0.upgrade()?;
        let begun = inner.begin_end(fault);
        Some(PendingEnd { inner, begun })
    }

    /// Returns the call in which the communicator currently waits, for the errors of other ranks.
    #[must_use]
    pub fn pending_call(&self) -> Option<String> {
        self.0.upgrade()?.track_handle.track().pending_call()
    }
}

/// A communicator that has to be ended, and whether its end began with this fault.
#[derive(Clone)]
pub struct PendingEnd {
    pub(crate) inner: Arc<Inner>,
    pub(crate) begun: bool,
}

/// The settings of a world for a communicator that its ranks are about to make.
#[derive(Clone)]
pub struct WorldParameters<'w> {
    /// Its peers.
    pub peers: Arc<dyn Peers>,
    /// The timeouts of its operations, unless the builder sets others.
    pub timeouts: Timeouts,
    /// The launch mode, unless the builder sets one.
    pub launch_mode: Option<LaunchMode>,
    /// Whether the communicator uses NCCL; a world of one rank can do without.
    pub needs_nccl: bool,
    /// The check to run before NCCL is started.
    pub check: &'w dyn PreflightCheck,
}

/// A world from which communicators are made. Only `nccl::World` implements this.
pub trait AsWorld {
    /// Returns the settings for communicators of this world.
    fn parameters(&self) -> WorldParameters<'_>;
}

/// The check before the first communicator of a world.
pub trait PreflightCheck: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Compares the setups with which the ranks are about to start NCCL; `setup` is `None` if this rank is not to be checked.
    ///
    /// # Errors
    /// The problem that keeps NCCL from starting, the same on all ranks.
    fn check(
        &self,
        setup: Option<InitSetup>,
        deadline: Instant,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<()>;
}

/// The setup with which a rank is about to start NCCL.
#[derive(Clone, Debug, Default)]
pub struct InitSetup {
    /// The stream of the communicator.
    pub stream: Option<Arc<CudaStream>>,
    /// The library to use.
    pub library: Option<Library>,
    /// The launch mode that was asked for.
    pub preference: Option<LaunchPreference>,
}

/// Makes the peers of ranks that are threads of this process.
pub type ConnectThreads = fn(usize) -> Vec<Arc<dyn Peers>>;

static CONNECT_THREADS: OnceCell<ConnectThreads> = OnceCell::new();

/// Sets how [`Communicator::init_all`](crate::Communicator::init_all) connects its ranks; without this, they have no
/// peers. Only the first call has an effect.
pub fn set_connect_threads(connect_threads: ConnectThreads) {
    let _ = CONNECT_THREADS.set(connect_threads);
}

/// Returns the peers of `size` ranks that are threads of this process; `None` before [`set_connect_threads`].
pub(crate) fn connect_threads(size: usize) -> Option<Vec<Arc<dyn Peers>>> {
    CONNECT_THREADS
        .get()
        .map(|connect_threads| connect_threads(size))
}

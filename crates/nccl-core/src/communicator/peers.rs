//! The ranks beside this one, as a communicator sees them: the border to what connects them.
//!
//! Everything here is implemented above this crate, by the control plane's side of a world. A communicator without
//! peers ([`Communicator::builder`](crate::Communicator::builder)) has none of it.
//!
//! - [`Peers`]: the ranks of one world that this rank can reach beside NCCL;
//! - [`Supervisor`]: what ends one communicator on all of its ranks, for one cause;
//! - [`Unmade`]: a communicator that its ranks are about to make;
//! - [`AbortHandle`]: what a supervisor may do to the communicator here.

use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;
use once_cell::sync::OnceCell;

use nccl_base::departure::Ended;
use nccl_base::launch_mode::{LaunchMode, Wish};

use crate::communicator::{Inner, Timeouts};
use crate::error::{Error, Result};
use crate::fault::{Cause, Fault, Roster};
use crate::identity::Home;
use crate::library::Library;
use crate::recorder::Turn;

/// The ranks of a world, as one of them reaches them.
pub trait Peers: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// The job's name and epoch.
    fn job(&self) -> (&str, u64);

    /// This one.
    fn rank(&self) -> usize;

    /// How many there are.
    fn size(&self) -> usize;

    /// A rank with its host and process.
    fn describe(&self, rank: usize) -> String;

    /// Which ranks of the world, and of the launcher, the ranks of a communicator of `members` are.
    fn roster(&self, members: &[usize]) -> Roster;

    /// The host of each of `members`, once they are known.
    fn hosts(&self, members: &[usize]) -> Option<Vec<String>>;

    /// The ranks that are gone.
    fn departed(&self) -> Vec<usize>;

    /// Waits a moment for what has been said to be heard here.
    fn catch_up(&self);

    /// Under which the calls of its communicators are recorded.
    fn home(&self) -> Arc<Home>;

    /// Gives `part` to all `members`, or to all ranks, and takes theirs.
    ///
    /// # Errors
    /// Whoever does not come until `deadline`, or is gone.
    fn round(
        &self,
        topic: &str,
        members: Option<&Arc<[usize]>>,
        part: &[u8],
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<Vec<u8>>>;

    /// Begins to look after a communicator.
    fn supervise(&self, ward: Ward<'_>) -> Arc<dyn Supervisor>;

    /// One that `members` are about to make, of which this is number `rank`.
    fn unmade(&self, name: &str, members: Arc<[usize]>, rank: usize) -> Box<dyn Unmade>;
}

/// A communicator that is to be supervised.
pub struct Ward<'w> {
    /// What all ranks call it.
    pub key: Arc<str>,
    /// Its name.
    pub name: &'w Arc<str>,
    /// The ranks of the world that are its ranks, in order.
    pub members: Arc<[usize]>,
    /// The same, with the launcher's.
    pub roster: Arc<Roster>,
    /// Which of them this is.
    pub rank: usize,
    /// How long the others may take to confirm its end.
    pub patience: Duration,
}

/// What ends one communicator on all of its ranks.
pub trait Supervisor: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// What all ranks call it.
    fn key(&self) -> &str;

    /// The ranks among which it is.
    fn peers(&self) -> &Arc<dyn Peers>;

    /// Those of them that are its ranks, in order.
    fn members(&self) -> &[usize];

    /// Which of its ranks is this one of the world.
    fn place_of(&self, member: usize) -> usize;

    /// One of its ranks, with host and process.
    fn name_of(&self, rank: usize) -> String;

    /// One of them with host and process, several in short form.
    fn names_of(&self, ranks: &[usize]) -> String;

    /// From now on it ends this one; the fault, if there is one already.
    fn protects(&self, target: AbortHandle) -> Option<Arc<Fault>>;

    /// This rank gives the communicator up: tells all others, of which the first to say so is right.
    fn announce(self: Arc<Self>, cause: Cause);

    /// What ended it on all ranks.
    fn fault(&self) -> Option<&Arc<Fault>>;

    /// The same, or what this rank has said that ends it.
    fn cause(&self) -> Option<&Arc<Fault>>;

    /// Whether the fault is what this rank said.
    fn is_own(&self, fault: &Fault) -> bool;

    /// Whether it is ended on all ranks, or about to be.
    fn is_at_fault(&self) -> bool {
        self.cause().is_some()
    }

    /// This rank has let go so far: tells the others, and waits until they have said how far they have. Whether that is
    /// all; otherwise it is to be called again with the end of the abort here.
    fn let_go(&self, so_far: LetGo) -> bool;

    /// The abort has come back here, or has not: as [`let_go`](Self::let_go).
    fn conclude(&self, freed: bool, needs_all: bool) {
        self.let_go(match (freed, needs_all) {
            (false, _) => LetGo::Nothing,
            (true, true) => LetGo::AllAndNeedsAll,
            (true, false) => LetGo::All,
        });
    }

    /// Who has not let go, as a sentence; and that the world has gone on since, if it has.
    fn conclusion(&self) -> Option<&str>;

    /// Gives the other ranks `part` for `topic`, once, and gets theirs.
    fn gather(
        &self,
        topic: &str,
        part: &[u8],
        patience: Duration,
        interrupted: &dyn Fn() -> bool,
    ) -> Ended;

    /// The number of the next call that is compared, from 1.
    fn next_check(&self) -> u64;

    /// What it is the end of; none while that is being made.
    fn target(&self) -> Option<AbortHandle>;

    /// Whether somebody has asked if this rank has entered the `turn`-th collective.
    fn is_asked_about(&self, turn: u64) -> bool;

    /// Somebody has.
    fn was_asked_about(&self, turn: u64);

    /// Asks who has not entered a collective that this rank entered so long ago; of a sample only how far apart they came.
    fn suspect(&self, turn: u64, call: &Turn, since: Duration, is_sample: bool);
}

/// How far a rank has let go of a communicator that is being aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LetGo {
    /// Its kernels are over, and nothing else of NCCL's used memory that was lent.
    Kernels,
    /// Its kernels are over. More than kernels used memory that was lent, so that it needs the end of all aborts.
    KernelsAndNeedsAll,
    /// Its abort has come back, and it needs the end of all others.
    AllAndNeedsAll,
    /// Its abort has come back.
    All,
    /// Its abort has not come back in time.
    Nothing,
}

/// A communicator that its ranks are about to make: they tell each other who cannot, and have one fault.
pub trait Unmade {
    /// What this rank tells the others of why it cannot take part.
    fn tell(&self, error: &Error) -> Vec<u8>;

    /// The fault of all ranks, of what those have told that cannot take part, by rank: whose, and which.
    fn elect(&self, told: &[(usize, &[u8])]) -> Option<(usize, Fault)>;

    /// The ranks want to call NCCL in different ways.
    fn differ(&self, modes: &[Option<LaunchMode>]) -> Fault;

    /// This rank ends with `error` because of `fault`, which all have.
    fn struck(&self, error: Error, fault: Arc<Fault>) -> Error;

    /// The error of this rank, of an exchange that did not come to its end; `own` is what went wrong here, if anything did.
    fn explain(&self, own: Option<Error>, exchange: Error) -> Error;

    /// Which ranks of the world, and of the launcher, its ranks are.
    fn roster(&self) -> &Roster;
}

/// Who asks whether this rank has entered a collective of a communicator, and takes the answer.
pub trait Asker: Send {
    /// Whether it can still be answered.
    fn is_there(&self) -> bool;

    /// What supervises the communicator here; none where there is none, or none any more.
    fn supervisor(&self) -> Option<Arc<dyn Supervisor>>;

    /// The same for all that came by one connection.
    fn connection(&self) -> *const ();

    /// How long ago this rank entered it; what it did last, if it has not.
    fn answer(&self, key: &str, turn: u64, entered: Option<Duration>, last: &str);
}

/// What may end a communicator, and keeps it not alive.
#[derive(Clone)]
pub struct AbortHandle(pub(crate) Weak<Inner>);

impl AbortHandle {
    pub(crate) fn new(inner: &Arc<Inner>) -> Self {
        Self(Arc::downgrade(inner))
    }

    /// It counts as ended from now on, because of `fault`, of which another rank told. Never waits. `None` when it is gone.
    #[must_use]
    pub fn begin_end(&self, fault: &Arc<Fault>) -> Option<Ending> {
        let inner = self.0.upgrade()?;
        let begun = inner.begin_end(fault);
        Some(Ending { inner, begun })
    }

    /// What it waits in, for the errors of other ranks.
    #[must_use]
    pub fn standing(&self) -> Option<String> {
        self.0.upgrade()?.tracked.track().standing()
    }
}

/// A communicator that is to be ended, and whether that began with this.
#[derive(Clone)]
pub struct Ending {
    pub(crate) inner: Arc<Inner>,
    pub(crate) begun: bool,
}

/// What a world gives to a communicator that its ranks are to make.
#[derive(Clone)]
pub struct Terms<'w> {
    /// Its ranks.
    pub peers: Arc<dyn Peers>,
    /// What its operations may take, unless the builder says otherwise.
    pub timeouts: Timeouts,
    /// How it calls NCCL, unless the builder says otherwise.
    pub launch_mode: Option<LaunchMode>,
    /// Whether it is NCCL's; a world of one rank can do without.
    pub needs_nccl: bool,
    /// What is looked at before NCCL is started.
    pub check: &'w dyn Check,
}

/// A world, as communicators are made from it. `nccl::World` is one, and nothing else.
pub trait AsWorld {
    /// What it gives to them.
    fn terms(&self) -> Terms<'_>;
}

/// The check before the first communicator of a world.
pub trait Check: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Compares what the ranks are about to start NCCL with; nothing of this rank's, if it is not to be.
    ///
    /// # Errors
    /// What keeps NCCL from starting, the same on all ranks.
    fn check(
        &self,
        about: Option<About>,
        deadline: Instant,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<()>;
}

/// What a rank is about to start NCCL with.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// The stream of the communicator.
    pub stream: Option<Arc<CudaStream>>,
    /// The library that it would use.
    pub library: Option<Library>,
    /// The launch mode that was asked for.
    pub wish: Option<Wish>,
}

/// Makes the peers of ranks that are threads of this process.
pub type OfThreads = fn(usize) -> Vec<Arc<dyn Peers>>;

static OF_THREADS: OnceCell<OfThreads> = OnceCell::new();

/// Says how [`Communicator::init_all`](crate::Communicator::init_all) lets its ranks know of each other. Before that each
/// stands for itself. The first one stays.
pub fn set_of_threads(of_threads: OfThreads) {
    let _ = OF_THREADS.set(of_threads);
}

/// The peers of `size` ranks that are threads of this process; none, if nothing connects them.
pub(crate) fn of_threads(size: usize) -> Option<Vec<Arc<dyn Peers>>> {
    OF_THREADS.get().map(|of_threads| of_threads(size))
}

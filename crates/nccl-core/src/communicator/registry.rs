//! All communicators of the process, and their joint abort.
//!
//! A communicator is in the list from before NCCL is called to make it. A call that makes a communicator is in the list
//! from its start, so that an abort also ends a call that still waits for the other ranks.
//!
//! If several ranks of a communicator live in one process, NCCL ends them together with the last one, and one
//! communicator may wait for a call inside another. So every communicator is signalled before any is waited for, and
//! libraries that support it (2.22) abort the non-blocking ones in one group.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::end_reason::EndReason;
use super::free::abort_in_a_group;
use super::handle::{Backoff, RawComm};
use super::timeouts::Timeouts;
use super::{Inner, SharedLaunch};
use crate::abort::AbortSignal;
use crate::error::{Error, ErrorKind};
use crate::events;
use crate::forked;
use crate::library::Capability;
use crate::state::{Lifecycle, NcclSide, State};
use crate::sync::Mutex;
use crate::threads;
use crate::time::deadline_after;
use nccl_base::fault::{Cause, Roster};

struct CommunicatorRegistry {
    pending_inits: Vec<Arc<InitRecord>>,
    communicators: Vec<Weak<Inner>>,
}

static REGISTRY: Mutex<CommunicatorRegistry> = Mutex::new(CommunicatorRegistry {
    pending_inits: Vec::new(),
    communicators: Vec::new(),
});

/// A call that makes a communicator. The call is over when this is dropped.
pub(crate) struct PendingInit(Arc<InitRecord>);

/// The state of a [`PendingInit`], which is kept after its end.
struct InitRecord {
    name: Arc<str>,
    rank: usize,
    /// How long the call may take to end after an abort has begun.
    timeout: Duration,
    /// Given when all communicators of the process are aborted.
    signal: AbortSignal,
    reason: OnceLock<String>,
    /// The lifecycle of the communicator, once there is one.
    lifecycle: OnceLock<Arc<Lifecycle>>,
    over: AtomicBool,
}

impl PendingInit {
    pub(crate) fn begin(name: &str, rank: usize, timeouts: &Timeouts) -> Arc<Self> {
        let record = Arc::new(InitRecord {
            name: Arc::from(name),
            rank,
            timeout: timeouts.disorderly_end(),
            signal: AbortSignal::new(),
            reason: OnceLock::new(),
            lifecycle: OnceLock::new(),
            over: AtomicBool::new(false),
        });
        let mut registry = REGISTRY.lock();
        registry
            .pending_inits
            .retain(|pending_init| !pending_init.is_over());
        registry.pending_inits.push(Arc::clone(&record));
        Arc::new(Self(record))
    }

    /// Returns the signal that is given when all communicators of the process are aborted.
    pub(crate) fn signal(&self) -> &AbortSignal {
        &self.0.signal
    }

    /// Records the lifecycle of the communicator that the call has made.
    pub(crate) fn set_lifecycle(&self, lifecycle: &Arc<Lifecycle>) {
        let _ = self.0.lifecycle.set(Arc::clone(lifecycle));
    }

    /// Replaces the error of a call that was ended by [`abort_all`].
    pub(crate) fn explain(&self, error: Error) -> Error {
        match self.0.reason.get() {
            Some(reason) => {
                let aborted = Error::new(ErrorKind::Aborted {
                    reason: reason.clone(),
                });
                // To the other ranks, this rank's program requested the abort; here the reason is known.
                match error.shared_fault() {
                    Some(fault) => aborted.before_nccl(fault),
                    None => aborted,
                }
            }
            None => error,
        }
    }
}

impl Drop for PendingInit {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Release);
    }
}

impl InitRecord {
    fn end(&self, reason: &str) {
        let _ = self.reason.set(reason.to_owned());
        self.signal.abort();
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Returns how the communicator ended. A communicator that was never made counts as aborted.
    fn state(&self) -> State {
        match (self.is_over(), self.lifecycle.get()) {
            (_, Some(lifecycle)) => lifecycle.get(),
            (true, None) => State::Aborted,
            (false, None) => State::Leaked,
        }
    }
}

/// Adds a communicator to the list.
pub(crate) fn register(inner: &Arc<Inner>) {
    let mut registry = REGISTRY.lock();
    registry
        .communicators
        .retain(|inner| inner.strong_count() > 0);
    registry.communicators.push(Arc::downgrade(inner));
}

/// The outcome of [`abort_all`] for all communicators of the process.
///
/// ```
/// # nccl_emulator::install_unless_gpu().unwrap();
/// let report = nccl::process::abort_all("the service is shutting down");
/// if report.communicators.iter().any(|ended| ended.state == nccl::CommunicatorState::Leaked) {
///     eprintln!("{report}"); // better end this process
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AbortReport {
    /// The communicators, in the order in which they were made; those that were still being made come last. NCCL did not free
    /// communicators whose state is [`Leaked`](State::Leaked): memory that they use must not be moved or freed.
    pub communicators: Vec<EndedCommunicator>,
}

/// The outcome of [`abort_all`] for one communicator of the process.
///
/// ```
/// # nccl_emulator::install_unless_gpu().unwrap();
/// for ended in nccl::process::abort_all("an example").communicators {
///     println!("{:?}, rank {}: {}", ended.name, ended.rank, ended.state);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndedCommunicator {
    /// Its name.
    pub name: String,
    /// This process's rank in it.
    pub rank: usize,
    /// [`Aborted`](State::Aborted) when NCCL has released it, or it was never made; [`Leaked`](State::Leaked) when NCCL
    /// has not released it within the abort timeout; [`Finalized`](State::Finalized) when its orderly end came first.
    pub state: State,
    roster: Arc<Roster>,
}

impl fmt::Display for AbortReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} communicators ended", self.communicators.len())?;
        for (at, ended) in self.communicators.iter().enumerate() {
            let before = if at == 0 { ": " } else { "; " };
            let (who, named) = (
                ended.roster.who(&[ended.rank]),
                ended.roster.named(&ended.name),
            );
            write!(f, "{before}{who} of {named} is {}", ended.state)?;
        }
        Ok(())
    }
}

/// Aborts all communicators of this process now, whatever they are doing, from any thread, including those that are still
/// being made.
///
/// This is [`Communicator::abort`](crate::Communicator::abort) for all of them at once: no abort waits for another
/// communicator of this process that would be aborted later. With NCCL 2.22.3 and later, non-blocking communicators whose
/// windows no kernel uses are aborted in one group; each other communicator is aborted on a thread of its own.
/// Communicators that are made afterwards are not affected.
///
/// Takes little longer than the largest sum of a communicator's abort and confirm timeouts. A communicator that NCCL has not
/// freed by then is leaked, and the report names it.
///
/// Wraps `ncclCommAbort` between `ncclGroupStart` and `ncclGroupEnd`.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// let world = nccl::World::single();
/// let (a, b) = (world.communicator("a"), world.communicator("b"));
/// let (a, b) = (a.stream(&stream).build()?, b.stream(&stream).build()?);
/// let report = nccl::process::abort_all("the service is shutting down");
/// assert!(report.communicators.iter().all(|ended| ended.state == nccl::CommunicatorState::Aborted));
/// assert!(a.finalize().is_err() && b.finalize().is_err());
/// # Ok(())
/// # }
/// ```
pub fn abort_all(reason: &str) -> AbortReport {
    if forked::is_child() {
        return AbortReport::default();
    }
    let (pending_inits, mut communicators) = {
        let mut registry = REGISTRY.lock();
        registry
            .pending_inits
            .retain(|pending_init| !pending_init.is_over());
        (registry.pending_inits.clone(), registry.communicators())
    };
    communicators.retain(|inner| !inner.lifecycle.get().is_final());
    pending_inits
        .iter()
        .for_each(|pending_init| pending_init.end(reason));
    abort_together(communicators.iter(), || EndReason::from(reason));
    let begun = Instant::now();
    for pending_init in &pending_inits {
        let mut backoff = Backoff::new();
        while !pending_init.is_over() && begun.elapsed() < pending_init.timeout {
            backoff.pause();
        }
    }
    let of = |inner: &Arc<Inner>, pending_init: &InitRecord| {
        let lifecycle = pending_init.lifecycle.get();
        lifecycle.is_some_and(|lifecycle| Arc::ptr_eq(lifecycle, &inner.lifecycle))
    };
    // Some communicators may have been completed just before the abort.
    let late = live_communicators();
    let late = late.iter().filter(|inner| {
        pending_inits
            .iter()
            .any(|pending_init| of(inner, pending_init))
    });
    abort_together(late, || EndReason::from(reason));

    let listed = |pending_init: &&Arc<InitRecord>| {
        !communicators.iter().any(|inner| of(inner, pending_init))
    };
    let of_communicators = communicators.iter().map(|inner| {
        (
            &inner.name,
            inner.rank,
            inner.lifecycle.get(),
            Arc::clone(inner.roster()),
        )
    });
    let of_pending_inits = pending_inits.iter().filter(listed);
    // For a communicator that was never made, the ranks are unknown.
    let of_pending_inits = of_pending_inits.map(|pending_init| {
        (
            &pending_init.name,
            pending_init.rank,
            pending_init.state(),
            Arc::default(),
        )
    });
    let ended = of_communicators
        .chain(of_pending_inits)
        .map(|(name, rank, state, roster)| EndedCommunicator {
            name: name.to_string(),
            rank,
            state,
            roster,
        });
    AbortReport {
        communicators: ended.collect(),
    }
}

impl CommunicatorRegistry {
    fn communicators(&self) -> Vec<Arc<Inner>> {
        self.communicators
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }
}

/// Returns the communicators that have not ended.
fn live_communicators() -> Vec<Arc<Inner>> {
    // If the last handle of a communicator is dropped meanwhile, it ends here, which must not happen under the lock.
    let mut communicators = REGISTRY.lock().communicators();
    communicators.retain(|inner| !inner.lifecycle.get().is_final());
    communicators
}

/// Begins the end of all communicators in the context of `first`; returns those whose end began here.
pub(super) fn begin_end_of_context(first: &Arc<Inner>, cause: &Cause) -> Vec<(Arc<Inner>, bool)> {
    let mut begun = Vec::new();
    // `first` begins first, because its cause names the operation.
    if first.begin_abort(EndReason::own(cause.clone())) {
        begun.push((Arc::clone(first), true));
    }
    let others = live_communicators();
    for other in others {
        if other.shares_context_with(first)
            && other.begin_abort(EndReason::own(cause.for_other_communicator()))
        {
            begun.push((other, true));
        }
    }
    begun
}

/// Aborts all these communicators, and waits until the aborts are done.
pub(crate) fn abort_together<'i, 'w>(
    all: impl Iterator<Item = &'i Arc<Inner>>,
    why: impl Fn() -> EndReason<'w>,
) {
    // All aborts begin before any is waited for.
    let all: Vec<_> = all
        .map(|inner| (Arc::clone(inner), inner.begin_abort(why())))
        .collect();
    end_together(all);
}

/// Carries out the aborts that began here, and waits for the others. Each uses a thread of its own, because it also
/// waits for reports of other ranks.
pub(super) fn end_together(all: Vec<(Arc<Inner>, bool)>) {
    let mut own: Vec<&Arc<Inner>> = Vec::new();
    own.extend(
        all.iter()
            .filter(|(_, begun)| *begun)
            .map(|(inner, _)| inner),
    );
    let mut in_groups: Vec<*const Inner> = Vec::new();
    while let Some(first) = own.first() {
        let library = first.library.clone();
        let (same, others) = own
            .into_iter()
            .partition(|inner| inner.library.is(&library));
        own = others;
        // A blocking communicator is aborted separately, because its abort-flag parent is aborted first, and then its calls
        // have to leave. So is a communicator whose windows are used by kernels, because those have to end first.
        let same = same
            .into_iter()
            .filter(|inner| inner.abort_flag_parent.is_none() && inner.peer_kernels.is_empty());
        let same: Vec<Arc<Inner>> = same.cloned().collect();
        if same.len() < 2 || !library.has(Capability::GroupAbort) {
            continue;
        }
        let members: Vec<_> = same.iter().map(Arc::as_ptr).collect();
        let spawned = threads::spawn("nccl-abort", move || free_in_a_group(&same));
        match spawned {
            Ok(_) => in_groups.extend(members),
            Err(error) => events::no_thread("for aborts", &error),
        }
    }
    std::thread::scope(|scope| {
        for (inner, begun) in &all {
            let in_group = in_groups.contains(&Arc::as_ptr(inner));
            let end = move || match (begun, in_group) {
                (true, true) => {
                    let span = events::abort_span(&inner.track_handle.track().identity);
                    let _entered = span.enter();
                    let freed = inner.lifecycle.wait_freed(inner.abort_timeout());
                    inner.finish_abort(freed)
                }
                (true, false) => inner.carry_out_abort(),
                (false, _) => inner.wait_for_end(),
            };
            let spawned = threads::scoped(scope, "nccl-abort", end);
            if let Err(error) = spawned {
                events::no_thread("to abort a communicator", &error);
                end();
            }
        }
    });
}

/// Frees communicators of one library whose aborts have begun.
fn free_in_a_group(all: &[Arc<Inner>]) {
    let timeouts = all.iter().map(|inner| inner.timeouts.abort);
    let timeout = timeouts.min().unwrap_or_default();
    all.iter().for_each(NcclSide::interrupt_calls);
    // A communicator whose current call does not end must not delay the others.
    let deadline = deadline_after(timeout / 4);
    let mut taken: Vec<(&Arc<Inner>, RawComm)> = Vec::with_capacity(all.len());
    for inner in all {
        match inner.handle.lock_until(deadline) {
            // If another thread has taken the pointer, that thread frees it. `pointer` keeps its value; its readers
            // check that the state is `Ready`, which it no longer is.
            Some(mut handle) => taken.extend(handle.raw.take().map(|raw| (inner, raw))),
            None => {
                let inner = Arc::clone(inner);
                let end = move || inner.lifecycle.end(&inner, inner.abort_timeout());
                let spawned = threads::spawn("nccl-abort", end);
                if let Err(error) = spawned {
                    events::no_thread("for an abort", &error);
                }
            }
        }
    }
    let Some((first, _)) = taken.first() else {
        return;
    };
    for (inner, _) in &taken {
        inner.destroy_plans();
        inner.watch_for_release();
    }
    let raws: Vec<RawComm> = taken.iter().map(|&(_, raw)| raw).collect();
    let launches = taken.iter().filter_map(|(inner, _)| inner.shared_launch());
    let mut launches: Vec<Arc<SharedLaunch>> = launches.collect();
    // All threads lock in the same order.
    launches.sort_by_key(Arc::as_ptr);
    launches.dedup_by_key(|launch| Arc::as_ptr(launch));
    let _first: Vec<_> = launches.iter().map(|launch| launch.0.lock()).collect();
    let freed = abort_in_a_group(&first.library, &raws);
    for ((inner, _), freed) in taken.iter().zip(freed) {
        let freed = freed.inspect_err(|failure| inner.log_not_freed(failure));
        inner.lifecycle.set_freed(freed.is_ok());
    }
}

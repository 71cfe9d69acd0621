//! The communicators of a rank, and the faults that end them: the fault decided for each, written once.
//!
//! ```text
//!            a fault of it, or the death of a member
//! (unknown) ──────────────▶ early ──register──▶ failed
//!     └──register──▶ registered ──────────────▶ failed ──forget──▶ (forgotten)
//!                        └──forget──▶ (forgotten)
//! ```
//!
//! One thread receives all notices, in the order in which all ranks receive them, while other threads register and
//! forget communicators. No fault may be missed: neither one that arrives before its communicator, nor one that arrives
//! while the communicator is made or dropped. So one lock covers every step, including the one that sets what is to be
//! ended: either that step finds the decided fault, or the decided fault finds its target. When the fault listener
//! fails a communicator that is not registered, the listener reports that there is nothing to end; if the communicator
//! is registered later, it does not report that again. For a communicator that has failed, the thread that forgets it
//! reports the end.
//!
//! `tests/loom/faults.rs` walks through the interleavings of these lines.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
#[cfg(not(loom))]
use std::sync::OnceLock;

use crate::sync::{Mutex, MutexGuard};

/// Maximum number of faults kept for communicators that this rank does not have.
const MAX_EARLY_FAULTS: usize = 256;

/// The fault decided for a communicator: written once.
#[cfg(not(loom))]
pub(super) type FaultCell<F> = OnceLock<F>;
#[cfg(loom)]
pub(crate) use under_loom::FaultCell;

/// See the module; `F` is a fault, `S` a supervisor, `D` how a rank departed.
pub(crate) struct FaultRegistry<F, S, D> {
    state: Mutex<RegistryState<F, S, D>>,
}

struct RegistryState<F, S, D> {
    entries: HashMap<Arc<str>, Entry<F, S>>,
    /// Faults of communicators that were not registered.
    early: VecDeque<EarlyFault<F>>,
    departed: HashMap<usize, DepartedRank<D>>,
    sequence: u64,
}

struct Entry<F, S> {
    members: Arc<[usize]>,
    name: Arc<str>,
    decided: Arc<FaultCell<F>>,
    supervisor: S,
}

struct EarlyFault<F> {
    key: String,
    fault: F,
    sequence: u64,
}

struct DepartedRank<D> {
    how: D,
    sequence: u64,
}

/// A communicator with a newly decided fault.
pub(crate) struct FailedCommunicator<S> {
    pub(crate) supervisor: S,
    pub(crate) key: Arc<str>,
    pub(crate) members: Arc<[usize]>,
}

/// Outcome of a fault.
pub(crate) enum FaultOutcome<S> {
    /// This fault has become the decided fault.
    Failed(FailedCommunicator<S>),
    /// The communicator had a decided fault before.
    AlreadyFailed,
    /// The communicator is not registered, or not yet; the fault is kept.
    Deferred,
}

/// Identity of a communicator: its members of the session, and its name.
pub(crate) struct CommunicatorRef<'w> {
    pub(crate) members: &'w Arc<[usize]>,
    pub(crate) name: &'w Arc<str>,
}

impl<F: Clone, S: Clone, D> FaultRegistry<F, S, D> {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(RegistryState {
                entries: HashMap::new(),
                early: VecDeque::new(),
                departed: HashMap::new(),
                sequence: 0,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, RegistryState<F, S, D>> {
        self.state.lock()
    }

    /// Registers a communicator. A fault that arrived earlier becomes its decided fault at once; `departure_fault`
    /// returns the fault that the departure of a rank means for it. Returns whether an early fault was kept: this rank
    /// has then reported that there is nothing to end.
    pub(crate) fn register(
        &self,
        key: &Arc<str>,
        communicator: &CommunicatorRef<'_>,
        decided: &Arc<FaultCell<F>>,
        supervisor: S,
        departure_fault: impl Fn(usize, &D) -> Option<F>,
    ) -> bool {
        let mut state = self.lock();
        let early = state.early.iter().position(|early| *early.key == **key);
        let early = early.and_then(|at| state.early.remove(at));
        let was_deferred = early.is_some();
        let departed = communicator
            .members
            .iter()
            .filter_map(|rank| Some((state.departed.get(rank)?.sequence, *rank)))
            .min();
        let first = match (early, departed) {
            (Some(early), Some((sequence, _))) if early.sequence < sequence => Some(early.fault),
            (Some(early), None) => Some(early.fault),
            (_, Some((_, rank))) => departure_fault(rank, &state.departed[&rank].how),
            (None, None) => None,
        };
        if let Some(fault) = first {
            let _ = decided.set(fault);
        }
        let entry = Entry {
            members: Arc::clone(communicator.members),
            name: Arc::clone(communicator.name),
            decided: Arc::clone(decided),
            supervisor,
        };
        state.entries.insert(Arc::clone(key), entry);
        was_deferred
    }

    /// Returns whether the communicator is known to have a decided fault.
    pub(crate) fn has_fault(&self, key: &str) -> bool {
        let state = self.lock();
        match state.entries.get(key) {
            Some(entry) => entry.decided.get().is_some(),
            None => state.early.iter().any(|early| early.key == key),
        }
    }

    /// Sets the target to end, with `set`; returns the decided fault if it has been written before.
    pub(crate) fn attach(&self, decided: &FaultCell<F>, set: impl FnOnce()) -> Option<F> {
        let _state = self.lock();
        set();
        decided.get().cloned()
    }

    /// Returns the supervisor of a communicator.
    pub(crate) fn find(&self, key: &str) -> Option<S> {
        Some(self.lock().entries.get(key)?.supervisor.clone())
    }

    pub(crate) fn members_of(&self, key: &str) -> Option<Arc<[usize]>> {
        Some(Arc::clone(&self.lock().entries.get(key)?.members))
    }

    pub(crate) fn name_of(&self, key: &str) -> Option<Arc<str>> {
        Some(Arc::clone(&self.lock().entries.get(key)?.name))
    }

    /// Forgets a communicator. Returns whether there was a decided fault by then.
    pub(crate) fn forget(&self, key: &str) -> bool {
        let entry = self.lock().entries.remove(key);
        entry.is_some_and(|entry| entry.decided.get().is_some())
    }

    /// Records a fault of a communicator.
    pub(crate) fn fail(&self, key: &str, fault: F) -> FaultOutcome<S> {
        let mut state = self.lock();
        state.sequence += 1;
        let sequence = state.sequence;
        if let Some((key, entry)) = state.entries.get_key_value(key) {
            return match entry.fail(key, fault) {
                Some(failed) => FaultOutcome::Failed(failed),
                None => FaultOutcome::AlreadyFailed,
            };
        }
        if state.early.iter().any(|early| early.key == key) {
            return FaultOutcome::AlreadyFailed;
        }
        if state.early.len() == MAX_EARLY_FAULTS {
            state.early.pop_front();
        }
        let key = key.to_owned();
        state.early.push_back(EarlyFault {
            key,
            fault,
            sequence,
        });
        FaultOutcome::Deferred
    }

    /// Fails all communicators for which `fault` returns a fault; `fault` gets their keys as well.
    pub(crate) fn fail_all(
        &self,
        fault: impl Fn(&str, &CommunicatorRef<'_>) -> Option<F>,
    ) -> Vec<FailedCommunicator<S>> {
        self.lock().fail_all(fault)
    }

    /// Records that `rank` has departed without a leave message, or has failed, and fails every communicator for which
    /// `departure_fault` returns a fault.
    pub(crate) fn mark_departed(
        &self,
        rank: usize,
        how: D,
        departure_fault: impl Fn(&CommunicatorRef<'_>) -> Option<F>,
    ) -> Vec<FailedCommunicator<S>> {
        let mut state = self.lock();
        if state.departed.contains_key(&rank) {
            return Vec::new();
        }
        state.sequence += 1;
        let sequence = state.sequence;
        state.departed.insert(rank, DepartedRank { how, sequence });
        state.fail_all(|_, communicator| departure_fault(communicator))
    }
}

impl<F, S: Clone, D> RegistryState<F, S, D> {
    fn fail_all(
        &self,
        fault: impl Fn(&str, &CommunicatorRef<'_>) -> Option<F>,
    ) -> Vec<FailedCommunicator<S>> {
        let fail = |(key, entry): (&Arc<str>, &Entry<F, S>)| {
            let (members, name) = (&entry.members, &entry.name);
            let fault = fault(key, &CommunicatorRef { members, name })?;
            entry.fail(key, fault)
        };
        self.entries.iter().filter_map(fail).collect()
    }
}

impl<F, S: Clone> Entry<F, S> {
    fn fail(&self, key: &Arc<str>, fault: F) -> Option<FailedCommunicator<S>> {
        self.decided.set(fault).ok()?;
        Some(FailedCommunicator {
            supervisor: self.supervisor.clone(),
            key: Arc::clone(key),
            members: Arc::clone(&self.members),
        })
    }
}

#[cfg(loom)]
mod under_loom {
    use std::ptr;

    use loom::sync::atomic::{AtomicPtr, Ordering};

    /// Replaces `OnceLock`, which loom lacks; its value is never freed.
    pub(crate) struct FaultCell<F>(AtomicPtr<F>);

    impl<F> Default for FaultCell<F> {
        fn default() -> Self {
            Self(AtomicPtr::new(ptr::null_mut()))
        }
    }

    impl<F> FaultCell<F> {
        pub(crate) fn set(&self, value: F) -> Result<(), ()> {
            let value = Box::into_raw(Box::new(value));
            let (set, failed) = (Ordering::AcqRel, Ordering::Acquire);
            let was = self.0.compare_exchange(ptr::null_mut(), value, set, failed);
            was.map(drop).map_err(drop)
        }

        pub(crate) fn get(&self) -> Option<&F> {
            // SAFETY: null, or a box that was published and is never freed.
            unsafe { self.0.load(Ordering::Acquire).as_ref() }
        }
    }
}

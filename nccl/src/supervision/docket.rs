//! The communicators of a rank, and the faults that end them: the verdict on each, written once.
//!
//! ```text
//!            a fault of it, or the death of a member
//! (unknown) ──────────────▶ early ──register──▶ struck
//!     └──register──▶ registered ──────────────▶ struck ──forget──▶ (gone)
//!                        └──forget──▶ (gone)
//! ```
//!
//! One thread hears all notices, in the order in which all ranks hear them, while other threads register and forget
//! communicators. No fault may be missed: neither one that comes before its communicator, nor one that comes while it
//! is made or dropped. So one lock covers every step, including the one that sets what is to be ended: either that
//! step finds the verdict, or the verdict finds its target. When the watch strikes a communicator that is not registered,
//! the watch reports that there is nothing to end, and the communicator, should it come, does not report that again; for
//! one that was struck, the thread that forgets it reports.
//!
//! `tests/loom/verdicts.rs` walks through the interleavings of these lines.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
#[cfg(not(loom))]
use std::sync::OnceLock;

use crate::sync::{Mutex, MutexGuard};

/// Maximum number of faults kept for communicators that this rank does not have.
const EARLY: usize = 256;

/// The verdict on a communicator: written once.
#[cfg(not(loom))]
pub(super) type Verdict<F> = OnceLock<F>;
#[cfg(loom)]
pub(crate) use under_loom::Verdict;

/// See the module; `F` is a fault, `B` leads to the holder of the verdict, `D` is how a rank died.
pub(crate) struct Docket<F, B, D> {
    state: Mutex<State<F, B, D>>,
}

struct State<F, B, D> {
    boards: HashMap<Arc<str>, Entry<F, B>>,
    /// Faults of communicators that were not registered.
    early: VecDeque<Early<F>>,
    gone: HashMap<usize, Gone<D>>,
    heard: u64,
}

struct Entry<F, B> {
    members: Arc<[usize]>,
    name: Arc<str>,
    verdict: Arc<Verdict<F>>,
    board: B,
}

struct Early<F> {
    key: String,
    fault: F,
    heard: u64,
}

struct Gone<D> {
    how: D,
    heard: u64,
}

/// A communicator with a new verdict.
pub(crate) struct Struck<B> {
    pub(crate) board: B,
    pub(crate) key: Arc<str>,
    pub(crate) members: Arc<[usize]>,
}

/// Outcome of a fault.
pub(crate) enum Heard<B> {
    /// The fault is the verdict.
    Struck(Struck<B>),
    /// There was a fault of this communicator before.
    Late,
    /// No such communicator is registered, or not yet; the fault is kept.
    Kept,
}

/// Identity of a communicator: its members of the line, and its name.
pub(crate) struct Who<'w> {
    pub(crate) members: &'w Arc<[usize]>,
    pub(crate) name: &'w Arc<str>,
}

impl<F: Clone, B: Clone, D> Docket<F, B, D> {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                boards: HashMap::new(),
                early: VecDeque::new(),
                gone: HashMap::new(),
                heard: 0,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<F, B, D>> {
        self.state.lock()
    }

    /// Registers a communicator. What has happened to it already is its verdict at once; `death` returns the fault that the
    /// death of a rank means. Returns whether an early fault was kept: this rank has then reported that there is nothing to end.
    pub(crate) fn register(
        &self,
        key: &Arc<str>,
        who: &Who<'_>,
        verdict: &Arc<Verdict<F>>,
        board: B,
        death: impl Fn(usize, &D) -> Option<F>,
    ) -> bool {
        let mut state = self.lock();
        let early = state.early.iter().position(|early| *early.key == **key);
        let early = early.and_then(|at| state.early.remove(at));
        let was_kept = early.is_some();
        let dead = who
            .members
            .iter()
            .filter_map(|rank| Some((state.gone.get(rank)?.heard, *rank)))
            .min();
        let first = match (early, dead) {
            (Some(early), Some((heard, _))) if early.heard < heard => Some(early.fault),
            (Some(early), None) => Some(early.fault),
            (_, Some((_, rank))) => death(rank, &state.gone[&rank].how),
            (None, None) => None,
        };
        if let Some(fault) = first {
            let _ = verdict.set(fault);
        }
        let entry = Entry {
            members: Arc::clone(who.members),
            name: Arc::clone(who.name),
            verdict: Arc::clone(verdict),
            board,
        };
        state.boards.insert(Arc::clone(key), entry);
        was_kept
    }

    /// Returns whether the communicator is known to have a verdict.
    pub(crate) fn has_verdict(&self, key: &str) -> bool {
        let state = self.lock();
        match state.boards.get(key) {
            Some(entry) => entry.verdict.get().is_some(),
            None => state.early.iter().any(|early| early.key == key),
        }
    }

    /// Sets, with `set`, what there is to end from now on; returns the verdict if it has been written before.
    pub(crate) fn protect(&self, verdict: &Verdict<F>, set: impl FnOnce()) -> Option<F> {
        let _state = self.lock();
        set();
        verdict.get().cloned()
    }

    /// Returns the holder of the verdict on a communicator.
    pub(crate) fn find(&self, key: &str) -> Option<B> {
        Some(self.lock().boards.get(key)?.board.clone())
    }

    pub(crate) fn members_of(&self, key: &str) -> Option<Arc<[usize]>> {
        Some(Arc::clone(&self.lock().boards.get(key)?.members))
    }

    pub(crate) fn name_of(&self, key: &str) -> Option<Arc<str>> {
        Some(Arc::clone(&self.lock().boards.get(key)?.name))
    }

    /// Forgets a communicator. Returns whether there was a verdict by then.
    pub(crate) fn forget(&self, key: &str) -> bool {
        let entry = self.lock().boards.remove(key);
        entry.is_some_and(|entry| entry.verdict.get().is_some())
    }

    /// Records a fault of a communicator.
    pub(crate) fn strike(&self, key: &str, fault: F) -> Heard<B> {
        let mut state = self.lock();
        state.heard += 1;
        let heard = state.heard;
        if let Some((key, entry)) = state.boards.get_key_value(key) {
            return match entry.strike(key, fault) {
                Some(struck) => Heard::Struck(struck),
                None => Heard::Late,
            };
        }
        if state.early.iter().any(|early| early.key == key) {
            return Heard::Late;
        }
        if state.early.len() == EARLY {
            state.early.pop_front();
        }
        let key = key.to_owned();
        state.early.push_back(Early { key, fault, heard });
        Heard::Kept
    }

    /// Strikes all communicators for which `fault` returns a fault; `fault` gets their keys as well.
    pub(crate) fn strike_all(&self, fault: impl Fn(&str, &Who<'_>) -> Option<F>) -> Vec<Struck<B>> {
        self.lock().strike_all(fault)
    }

    /// Records that `rank` is unreachable and strikes every communicator for which `death` returns a fault.
    pub(crate) fn bury(
        &self,
        rank: usize,
        how: D,
        death: impl Fn(&Who<'_>) -> Option<F>,
    ) -> Vec<Struck<B>> {
        let mut state = self.lock();
        if state.gone.contains_key(&rank) {
            return Vec::new();
        }
        state.heard += 1;
        let heard = state.heard;
        state.gone.insert(rank, Gone { how, heard });
        state.strike_all(|_, who| death(who))
    }
}

impl<F, B: Clone, D> State<F, B, D> {
    fn strike_all(&self, fault: impl Fn(&str, &Who<'_>) -> Option<F>) -> Vec<Struck<B>> {
        let strike = |(key, entry): (&Arc<str>, &Entry<F, B>)| {
            let (members, name) = (&entry.members, &entry.name);
            let fault = fault(key, &Who { members, name })?;
            entry.strike(key, fault)
        };
        self.boards.iter().filter_map(strike).collect()
    }
}

impl<F, B: Clone> Entry<F, B> {
    fn strike(&self, key: &Arc<str>, fault: F) -> Option<Struck<B>> {
        self.verdict.set(fault).ok()?;
        Some(Struck {
            board: self.board.clone(),
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
    pub(crate) struct Verdict<F>(AtomicPtr<F>);

    impl<F> Default for Verdict<F> {
        fn default() -> Self {
            Self(AtomicPtr::new(ptr::null_mut()))
        }
    }

    impl<F> Verdict<F> {
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

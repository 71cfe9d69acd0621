//! The life of a communicator, in one place.
//!
//! ```text
//!                 ┌──────────finalize──────────▶ Finalizing ──destroyed──▶ Finalized
//!                 │                                  │
//! (made) ──▶ Ready ──abort, or a call that failed────┴──▶ Aborting ──freed──────▶ Aborted
//!                                                            └──not in time──▶ Leaked
//! ```
//!
//! Who sets what: `Ready` is where a communicator starts, because one that failed to come up is never
//! handed out. `Finalizing` is won by exactly one caller of [`Phase::begin_finalize`], `Aborting` by
//! exactly one caller of [`Phase::begin_abort`]; that caller alone takes NCCL's pointer, so it is freed
//! once. The last three are final. `Leaked` means that NCCL did not give the communicator back in time:
//! nothing touches it any more.

//!
//! `tests/loom.rs` walks through the interleavings of abort, issue, finalize, and drop.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU8, Ordering};
#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU8, Ordering};
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, MutexGuard};

/// Where a communicator is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    Ready = 0,
    Finalizing = 1,
    Finalized = 2,
    Aborting = 3,
    Aborted = 4,
    Leaked = 5,
}

impl State {
    fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Ready,
            1 => Self::Finalizing,
            2 => Self::Finalized,
            3 => Self::Aborting,
            4 => Self::Aborted,
            _ => Self::Leaked,
        }
    }

    /// As an error says it.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Finalizing => "being finalized",
            Self::Finalized => "finalized",
            Self::Aborting => "being aborted",
            Self::Aborted => "aborted",
            Self::Leaked => "leaked: its abort did not finish in time",
        }
    }

    /// Whether an abort has begun: what the communicator was doing has no result.
    pub(crate) fn is_aborted(self) -> bool {
        matches!(self, Self::Aborting | Self::Aborted | Self::Leaked)
    }

    pub(crate) fn is_final(self) -> bool {
        matches!(self, Self::Finalized | Self::Aborted | Self::Leaked)
    }
}

/// The state of one communicator, shared by all threads that use it.
#[derive(Debug)]
pub(crate) struct Phase {
    state: AtomicU8,
    /// Why it was aborted. Locked while the abort begins, so that whoever sees one finds its reason.
    reason: Mutex<Option<String>>,
    /// Whether NCCL has let go of it; `None` while it has not. Set once, by whoever freed it.
    freed: Mutex<Option<bool>>,
    freed_bell: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Phase {
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU8::new(State::Ready as u8),
            reason: Mutex::new(None),
            freed: Mutex::new(None),
            freed_bell: Condvar::new(),
        }
    }

    pub(crate) fn get(&self) -> State {
        State::from_u8(self.state.load(Ordering::Acquire))
    }

    /// True for the one caller that is to finalize.
    pub(crate) fn begin_finalize(&self) -> bool {
        self.step(State::Ready, State::Finalizing)
    }

    /// True for the one caller that is to abort.
    pub(crate) fn begin_abort(&self, why: &str) -> bool {
        let mut reason = lock(&self.reason);
        // A finalize may begin between the two, but nothing goes back to `Ready`.
        let begun = self.step(State::Ready, State::Aborting)
            || self.step(State::Finalizing, State::Aborting);
        if begun {
            *reason = Some(why.to_owned());
        }
        begun
    }

    /// Why it was aborted; there from the moment on when an abort can be seen.
    pub(crate) fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }

    /// The finalizing caller is done; false if somebody began to abort meanwhile.
    pub(crate) fn finalized(&self) -> bool {
        self.step(State::Finalizing, State::Finalized)
    }

    /// The aborting caller got the communicator freed.
    pub(crate) fn aborted(&self) -> bool {
        self.step(State::Aborting, State::Aborted)
    }

    /// The aborting caller waited long enough.
    pub(crate) fn leaked(&self) -> bool {
        self.step(State::Aborting, State::Leaked)
    }

    /// Tells those who wait for it whether NCCL let go of the communicator.
    pub(crate) fn set_freed(&self, freed: bool) {
        *lock(&self.freed) = Some(freed);
        self.freed_bell.notify_all();
    }

    /// Whether NCCL let go of the communicator within `limit`.
    pub(crate) fn wait_freed(&self, limit: Duration) -> bool {
        let begun = Instant::now();
        let mut freed = lock(&self.freed);
        while freed.is_none() {
            let left = limit.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return false;
            }
            let waited = self.freed_bell.wait_timeout(freed, left);
            (freed, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        *freed == Some(true)
    }

    fn step(&self, from: State, to: State) -> bool {
        self.state
            .compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_one_caller_aborts_and_only_one_finalizes() {
        let phase = Phase::new();
        assert!(phase.begin_finalize());
        assert!(!phase.begin_finalize());
        assert!(
            phase.begin_abort("on purpose"),
            "a finalize that hangs can be aborted"
        );
        assert!(!phase.begin_abort("on purpose"));
        assert!(
            !phase.finalized(),
            "the finalizing caller learns that it was overtaken"
        );
        assert!(phase.aborted());
        assert!(!phase.leaked());
        assert_eq!(phase.get(), State::Aborted);
        assert_eq!(phase.reason().as_deref(), Some("on purpose"));
    }

    #[test]
    fn a_finalized_communicator_cannot_be_aborted() {
        let phase = Phase::new();
        assert!(phase.begin_finalize());
        assert!(phase.finalized());
        assert!(!phase.begin_abort("on purpose"));
        assert!(phase.get().is_final());
    }

    #[test]
    fn every_state_survives_the_way_through_a_number() {
        for state in [
            State::Ready,
            State::Finalizing,
            State::Finalized,
            State::Aborting,
            State::Aborted,
            State::Leaked,
        ] {
            assert_eq!(State::from_u8(state as u8), state);
            assert!(!state.text().is_empty());
        }
    }
}

//! The lifecycle of a communicator.
//!
//! ```text
//! Making ──made──▶ Ready ──finalize──▶ Finalizing ──destroyed──▶ Finalized
//!    │               │                     │
//!    └───────────────┴─────────────────────┴──abort, or a call that failed──▶ Aborting ──freed──▶ Aborted
//!                                                                               └──not in time──▶ Leaked
//!                                                    Aborted by a revoke ──not given back later──▶ Leaked
//! ```
//!
//! The states only advance, and the last three are final, with one exception: after a revoke NCCL keeps the communicator, and
//! `Aborted` becomes `Leaked` if a later abort does not free it. `Leaked` means that NCCL did not free the communicator in
//! time, and nothing uses it any more.
//!
//! # Who may set a state
//! The thread that makes the communicator sets `Ready` ([`Lifecycle::set_ready`]), unless an abort has begun. Of all threads,
//! exactly one caller of [`Lifecycle::begin_finalize`] sets `Finalizing`, and exactly one caller of [`Lifecycle::begin_abort`]
//! sets `Aborting`, from any of the three earlier states. The thread that set `Aborting` also records how the abort ended.
//!
//! # Who owns NCCL's pointer
//! The pointer is in one place at a time. Only its owner calls NCCL with it, and frees it.
//!
//! | state | the pointer |
//! |---|---|
//! | `Making` | is with the making thread, which checks the state while it waits; with the thread of a call that does not return |
//! | `Ready` | is in the slot, behind the communicator's lock: for calls, one at a time |
//! | `Finalizing` | was taken out by the finalizing thread, which checks the state while it waits |
//! | `Aborting` out of `Ready` | is taken out by the aborting thread once the lock is free: a call in progress checks the state, too |
//! | `Aborting` out of another | stays with its owner, which frees it and reports that to the aborting thread |
//! | no handle is left | is taken out by the thread that drops the last handle, unless a thread above has it |
//!
//! A split is made like any other communicator. While it is being made, it also ends with its parent, whose state the
//! making thread checks.
//!
//! The steps are here, with NCCL behind [`NcclSide`], so that `tests/loom` explores the interleavings
//! of this code: abort against init, issue, poll, finalize, drop and split.

use std::fmt;
use std::time::{Duration, Instant};

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU8, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::sync::{Condvar, Mutex};

/// The state of a communicator, from [`Communicator::state`](crate::Communicator::state).
///
/// ```
/// # fn example(comm: &nccl::Communicator) {
/// if comm.state() == nccl::CommunicatorState::Leaked {
///     eprintln!("NCCL may still use its memory: better end this process");
/// }
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum State {
    /// The ranks are connecting.
    Making = 0,
    /// In use.
    Ready = 1,
    /// Being finalized: operations in progress are waited for.
    Finalizing = 2,
    /// Finalized.
    Finalized = 3,
    /// Being aborted.
    Aborting = 4,
    /// Aborted, and NCCL has freed everything.
    Aborted = 5,
    /// Aborted, but NCCL did not return from the abort. Nothing uses the communicator any more, and memory that NCCL
    /// may still use is not freed.
    Leaked = 6,
}

impl State {
    fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Making,
            1 => Self::Ready,
            2 => Self::Finalizing,
            3 => Self::Finalized,
            4 => Self::Aborting,
            5 => Self::Aborted,
            _ => Self::Leaked,
        }
    }

    /// The state's text in error messages.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Making => "being made",
            Self::Ready => "ready",
            Self::Finalizing => "being finalized",
            Self::Finalized => "finalized",
            Self::Aborting => "being aborted",
            Self::Aborted => "aborted",
            Self::Leaked => "leaked: its abort did not finish in time",
        }
    }

    /// Whether an abort has begun: operations of the communicator have no result.
    pub(crate) fn abort_has_begun(self) -> bool {
        matches!(self, Self::Aborting | Self::Aborted | Self::Leaked)
    }

    #[doc(hidden)]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Finalized | Self::Aborted | Self::Leaked)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// How a communicator is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FreeMethod {
    Destroy,
    Abort,
}

/// NCCL's side of a communicator.
pub(crate) trait NcclSide {
    /// NCCL's pointer.
    type Raw: Copy;
    type Failure;

    /// Ends the calls in progress that hold the lock without checking the state, if that is possible.
    fn interrupt_calls(&self) {}

    /// Calls `use_slot` with the slot that the communicator's lock protects. The slot holds the pointer unless a thread has
    /// taken it. Waits for the call in progress.
    fn slot<R>(&self, use_slot: impl FnOnce(&mut Option<Self::Raw>) -> R) -> R;

    /// Frees the pointer. May block for as long as NCCL blocks. After an error, NCCL may still use memory that was lent to it.
    fn free(&self, method: FreeMethod, raw: Self::Raw) -> Result<(), Self::Failure>;
}

/// The remains of a communicator whose creation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartialInit<R> {
    /// NCCL has built nothing.
    Nothing,
    /// A pointer to free.
    Here(R),
    /// A call on the communicator, or the call that makes it, has not returned. The thread of that call has the pointer, and
    /// frees it if the call ever returns.
    HeldByStuckCall,
}

/// The result of finalizing a communicator.
pub(crate) struct Retired<E, F> {
    /// Whether all ranks completed the finalize.
    pub(crate) finalized: Result<(), E>,
    pub(crate) freed: Result<(), F>,
}

/// Destroys the communicator if `wait_until_idle` succeeds, and aborts it otherwise, after calling `aborting` with the error.
/// The caller owns the pointer.
pub(crate) fn retire<R: Copy, E, F>(
    raw: R,
    wait_until_idle: impl FnOnce(R) -> Result<(), E>,
    aborting: impl FnOnce(&E),
    free: impl FnOnce(FreeMethod, R) -> Result<(), F>,
) -> Retired<E, F> {
    let finalized = wait_until_idle(raw);
    let method = match &finalized {
        Ok(()) => FreeMethod::Destroy,
        Err(not_idle) => {
            aborting(not_idle);
            FreeMethod::Abort
        }
    };
    let freed = free(method, raw);
    Retired { finalized, freed }
}

/// The state of one communicator, shared by all threads that use it.
#[derive(Debug)]
#[doc(hidden)]
pub struct Lifecycle {
    state: AtomicU8,
    /// Why it was aborted, and when. Locked while the abort begins, so that a thread that sees the abort also finds its
    /// reason.
    reason: Mutex<Option<(String, Instant)>>,
    /// Whether NCCL has freed the communicator; `None` while unknown. Set once, by the thread that freed it.
    freed: Mutex<Option<bool>>,
    freed_changed: Condvar,
    /// Whether NCCL no longer uses lent memory, on any reachable rank, although an abort has not returned.
    released: AtomicBool,
}

impl Lifecycle {
    /// Returns the state of a communicator that is being made.
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU8::new(State::Making as u8),
            reason: Mutex::new(None),
            freed: Mutex::new(None),
            freed_changed: Condvar::new(),
            released: AtomicBool::new(false),
        }
    }

    #[doc(hidden)]
    pub fn get(&self) -> State {
        State::from_u8(self.state.load(Ordering::Acquire))
    }

    /// Returns true to the only caller that may finalize.
    pub(crate) fn begin_finalize(&self) -> bool {
        self.step(State::Ready, State::Finalizing)
    }

    /// Returns true to the only caller that may abort.
    pub(crate) fn begin_abort(&self, why: &str) -> bool {
        let mut reason = self.reason.lock();
        // The state may advance between these steps, but only in this order.
        let begun = self.step(State::Making, State::Aborting)
            || self.step(State::Ready, State::Aborting)
            || self.step(State::Finalizing, State::Aborting);
        if begun {
            *reason = Some((why.to_owned(), Instant::now()));
        }
        begun
    }

    /// Returns why it was aborted; present as soon as the abort is visible.
    pub(crate) fn reason(&self) -> Option<String> {
        self.reason.lock().as_ref().map(|(why, _)| why.clone())
    }

    /// Returns how long ago the abort began, if it has.
    #[doc(hidden)]
    pub fn aborted_for(&self) -> Option<Duration> {
        self.reason.lock().as_ref().map(|(_, at)| at.elapsed())
    }

    /// Marks the communicator as finalized. Returns false if an abort began meanwhile.
    pub(crate) fn set_finalized(&self) -> bool {
        self.step(State::Finalizing, State::Finalized)
    }

    /// Marks the communicator as aborted, after NCCL has freed it.
    pub(crate) fn set_aborted(&self) -> bool {
        self.step(State::Aborting, State::Aborted)
    }

    /// Marks the communicator as leaked: the abort did not end in time.
    pub(crate) fn set_leaked(&self) -> bool {
        self.step(State::Aborting, State::Leaked)
    }

    /// Marks a revoked communicator as leaked, because NCCL did not free the remains of it.
    pub(crate) fn set_leaked_after_revoke(&self) -> bool {
        self.step(State::Aborted, State::Leaked)
    }

    /// Records that NCCL uses no lent memory any more.
    pub(crate) fn set_released(&self) {
        self.released.store(true, Ordering::Release);
    }

    /// Whether an operation may return its error.
    pub(crate) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire) || self.get().is_final()
    }

    /// Records whether NCCL freed the communicator, and wakes the threads that wait for this.
    pub(crate) fn set_freed(&self, freed: bool) {
        *self.freed.lock() = Some(freed);
        self.freed_changed.notify_all();
    }

    /// Waits up to `timeout`, and returns whether NCCL freed the communicator.
    pub(crate) fn wait_freed(&self, timeout: Duration) -> bool {
        let begun = Instant::now();
        let mut freed = self.freed.lock();
        while freed.is_none() {
            let remaining = timeout.saturating_sub(begun.elapsed());
            if remaining.is_zero() {
                return false;
            }
            self.freed_changed.wait_for(&mut freed, remaining);
        }
        *freed == Some(true)
    }

    /// Stores the pointer of a communicator that is ready. Returns false if an abort has begun; the making thread then has to
    /// call [`free_unfinished`](Self::free_unfinished).
    pub(crate) fn set_ready<N: NcclSide>(&self, nccl: &N, raw: N::Raw) -> bool {
        // Done under the lock: a thread that finds `Ready` also finds the pointer, and an abort that came first
        // prevents both.
        nccl.slot(|slot| {
            let made = self.step(State::Making, State::Ready);
            if made {
                *slot = Some(raw);
            }
            made
        })
    }

    /// Frees what NCCL has built, after an abort has begun. To be called by the making thread; returns whether NCCL
    /// freed it.
    pub(crate) fn free_unfinished<N: NcclSide>(
        &self,
        nccl: &N,
        partial: PartialInit<N::Raw>,
    ) -> bool {
        let freed = match partial {
            PartialInit::Nothing => true,
            PartialInit::Here(raw) => nccl.free(FreeMethod::Abort, raw).is_ok(),
            PartialInit::HeldByStuckCall => false,
        };
        self.set_freed(freed);
        freed
    }

    /// Finalizes the communicator. Returns `None` if an abort came first and took the pointer.
    pub(crate) fn retire<N: NcclSide, E>(
        &self,
        nccl: &N,
        wait_until_idle: impl FnOnce(N::Raw) -> Result<(), E>,
        aborting: impl FnOnce(&E),
    ) -> Option<Retired<E, N::Failure>> {
        // Waits for an operation that is being issued, because the finalize includes that operation.
        let raw = nccl.slot(Option::take)?;
        let retired = retire(raw, wait_until_idle, aborting, |method, raw| {
            nccl.free(method, raw)
        });
        self.set_freed(retired.freed.is_ok());
        Some(retired)
    }

    /// Ends the communicator. To be called by the aborting thread. Waits up to `timeout` for the owner of the pointer, and
    /// returns whether NCCL freed the communicator.
    pub(crate) fn end<N: NcclSide>(&self, nccl: &N, timeout: Duration) -> bool {
        nccl.interrupt_calls();
        // A thread inside a call notices the abort and releases the lock.
        match nccl.slot(Option::take) {
            Some(raw) => {
                let freed = nccl.free(FreeMethod::Abort, raw).is_ok();
                self.set_freed(freed);
                freed
            }
            // The thread that makes or finalizes the communicator has the pointer, and frees it when it notices the abort.
            None => self.wait_freed(timeout),
        }
    }

    /// Takes the pointer when the last handle is dropped, if it is still to be freed.
    pub(crate) fn take_for_drop<R>(&self, slot: &mut Option<R>) -> Option<R> {
        // A leaked communicator must not be used.
        slot.take_if(|_| self.get() != State::Leaked)
    }

    /// Returns the pointer for a call, if calls are allowed; the caller holds the lock.
    #[inline]
    pub(crate) fn usable<R: Copy>(&self, slot: Option<R>) -> Option<R> {
        slot.filter(|_| self.get() == State::Ready)
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

    struct Nothing;

    impl NcclSide for Nothing {
        type Raw = ();
        type Failure = ();

        fn slot<R>(&self, use_slot: impl FnOnce(&mut Option<()>) -> R) -> R {
            use_slot(&mut None)
        }

        fn free(&self, _: FreeMethod, (): ()) -> Result<(), ()> {
            Ok(())
        }
    }

    fn ready() -> Lifecycle {
        let lifecycle = Lifecycle::new();
        assert!(!lifecycle.begin_finalize(), "it is being made");
        assert!(lifecycle.set_ready(&Nothing, ()));
        lifecycle
    }

    #[test]
    fn what_is_aborted_while_it_is_made_is_never_ready() {
        let lifecycle = Lifecycle::new();
        assert!(lifecycle.begin_abort("too late"));
        assert!(!lifecycle.set_ready(&Nothing, ()));
        assert!(lifecycle.free_unfinished(&Nothing, PartialInit::Here(())));
        assert!(
            lifecycle.end(&Nothing, Duration::ZERO),
            "the other has freed it"
        );
        assert!(lifecycle.set_aborted());
    }

    #[test]
    fn only_one_caller_aborts_and_only_one_finalizes() {
        let lifecycle = ready();
        assert!(!lifecycle.set_ready(&Nothing, ()), "it was made once");
        assert!(lifecycle.begin_finalize());
        assert!(!lifecycle.begin_finalize());
        assert!(
            lifecycle.begin_abort("on purpose"),
            "a finalize that hangs can be aborted"
        );
        assert!(!lifecycle.begin_abort("on purpose"));
        assert!(
            !lifecycle.set_finalized(),
            "the finalizing caller learns that it was overtaken"
        );
        assert!(lifecycle.set_aborted());
        assert!(!lifecycle.set_leaked());
        assert_eq!(lifecycle.get(), State::Aborted);
        assert_eq!(lifecycle.reason().as_deref(), Some("on purpose"));
    }

    #[test]
    fn a_finalized_communicator_cannot_be_aborted() {
        let lifecycle = ready();
        assert!(lifecycle.begin_finalize());
        assert!(lifecycle.set_finalized());
        assert!(!lifecycle.begin_abort("on purpose"));
        assert!(lifecycle.get().is_final());
    }

    #[test]
    fn every_state_survives_the_way_through_a_number() {
        for state in [
            State::Making,
            State::Ready,
            State::Finalizing,
            State::Finalized,
            State::Aborting,
            State::Aborted,
            State::Leaked,
        ] {
            assert_eq!(State::from_u8(state as u8), state);
            assert!(!state.to_string().is_empty());
        }
    }
}

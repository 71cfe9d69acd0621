//! The life of a communicator, in one place.
//!
//! ```text
//! Making ──made──▶ Ready ──finalize──▶ Finalizing ──destroyed──▶ Finalized
//!    │               │                     │
//!    └───────────────┴─────────────────────┴──abort, or a call that failed──▶ Aborting ──freed──▶ Aborted
//!                                                                               └──not in time──▶ Leaked
//!                                                    Aborted by a revoke ──not given back later──▶ Leaked
//! ```
//!
//! Nothing goes back, and the last three are final, but that NCCL still has what was revoked, and may fail to give it back when it
//! cannot be shrunk. `Leaked` means that NCCL did not give the communicator back in time: nothing touches it any more.
//!
//! # Who sets what
//! `Ready` is set by the thread that makes the communicator ([`Phase::made`]), if nobody began to abort it
//! meanwhile. `Finalizing` is won by exactly one caller of [`Phase::begin_finalize`], `Aborting` by exactly
//! one caller of [`Phase::begin_abort`], from any thread and out of each of the three states before. Whoever
//! won the abort also says how it ended.
//!
//! # Who has NCCL's pointer
//! It is in one place at a time, and whoever has it is the only one to call NCCL with it, and frees it.
//!
//! | state | the pointer |
//! |---|---|
//! | `Making` | is with the thread that makes it, which looks at the state while it waits; of a call that does not come back, with that call's own |
//! | `Ready` | lies in the slot, behind the communicator's lock: for calls, one at a time |
//! | `Finalizing` | was taken out by the thread that finalizes, which looks at the state while it waits |
//! | `Aborting` out of `Ready` | is taken out by the thread that aborts, as soon as the lock is free: a call that is under way looks at the state, too |
//! | `Aborting` out of another | stays with the thread that has it; it frees it, and says so to the one that aborts |
//! | no handle is left | is taken out by whoever drops the last one, unless one of the above has it |
//!
//! A split is made like any other communicator. While it is made it also ends with its parent, at which the
//! thread that makes it looks.
//!
//! The steps are here, with NCCL behind [`Native`], so that `tests/loom` walks through the interleavings
//! of these very lines: abort against init, issue, poll, finalize, drop and split.

use std::fmt;
use std::time::{Duration, Instant};

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU8, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::sync::{Condvar, Mutex};

/// Where a communicator is in its life; of [`Communicator::state`](crate::Communicator::state).
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
    /// The ranks come together.
    Making = 0,
    /// In use.
    Ready = 1,
    /// It comes to its end in order: what is under way is waited for.
    Finalizing = 2,
    /// It has come to its end in order.
    Finalized = 3,
    /// It is being ended before its time.
    Aborting = 4,
    /// It was ended before its time, and NCCL has let go of everything.
    Aborted = 5,
    /// It was ended before its time, and NCCL has not come back from that: nothing touches the communicator
    /// any more, and memory that NCCL may still use stays where it is.
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

    /// As an error says it.
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

    /// Whether an abort has begun: what the communicator was doing has no result.
    pub(crate) fn is_aborted(self) -> bool {
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

/// Which way a communicator is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Destroy,
    Abort,
}

/// NCCL's side of a communicator.
pub(crate) trait Native {
    /// Its pointer.
    type Raw: Copy;
    type Failure;

    /// Ends the calls under way that hold the lock and look at nothing, if there is a way to.
    fn break_in(&self) {}

    /// What is behind the communicator's lock: the pointer, unless somebody has taken it. Waits for the call
    /// that is under way.
    fn slot<R>(&self, look: impl FnOnce(&mut Option<Self::Raw>) -> R) -> R;

    /// Gives the pointer back. May block for as long as NCCL likes. When it fails, NCCL may still use what
    /// it was lent.
    fn free(&self, way: Way, raw: Self::Raw) -> Result<(), Self::Failure>;
}

/// What there is of a communicator that was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left<R> {
    /// NCCL has built nothing.
    Nothing,
    /// What is to be freed.
    Here(R),
    /// A call on it, or the one that makes it, has not come back: the thread of that call has it, and frees it
    /// if it ever comes back.
    Lost,
}

/// How a communicator ended that was to be finalized.
pub(crate) struct Retired<E, F> {
    /// Whether the ranks got to the end together.
    pub(crate) settled: Result<(), E>,
    pub(crate) freed: Result<(), F>,
}

/// Destroys what `settle` brought to its end, and aborts it otherwise, which `aborting` says to those who have
/// to know before. The caller has the pointer.
pub(crate) fn retire<R: Copy, E, F>(
    raw: R,
    settle: impl FnOnce(R) -> Result<(), E>,
    aborting: impl FnOnce(&E),
    free: impl FnOnce(Way, R) -> Result<(), F>,
) -> Retired<E, F> {
    let settled = settle(raw);
    let way = match &settled {
        Ok(()) => Way::Destroy,
        Err(unsettled) => {
            aborting(unsettled);
            Way::Abort
        }
    };
    let freed = free(way, raw);
    Retired { settled, freed }
}

/// The state of one communicator, shared by all threads that use it.
#[derive(Debug)]
#[doc(hidden)]
pub struct Phase {
    state: AtomicU8,
    /// Why it was aborted, and when. Locked while the abort begins, so that whoever sees one finds its reason.
    reason: Mutex<Option<(String, Instant)>>,
    /// Whether NCCL has let go of it; `None` while it has not. Set once, by whoever freed it.
    freed: Mutex<Option<bool>>,
    freed_bell: Condvar,
    /// Whether nothing of NCCL's uses lent memory any more, on any rank that can be reached, although an abort has not come
    /// back.
    let_go: AtomicBool,
}

impl Phase {
    /// Of a communicator that is being made.
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU8::new(State::Making as u8),
            reason: Mutex::new(None),
            freed: Mutex::new(None),
            freed_bell: Condvar::new(),
            let_go: AtomicBool::new(false),
        }
    }

    #[doc(hidden)]
    pub fn get(&self) -> State {
        State::from_u8(self.state.load(Ordering::Acquire))
    }

    /// True for the one caller that is to finalize.
    pub(crate) fn begin_finalize(&self) -> bool {
        self.step(State::Ready, State::Finalizing)
    }

    /// True for the one caller that is to abort.
    pub(crate) fn begin_abort(&self, why: &str) -> bool {
        let mut reason = self.reason.lock();
        // It may go on in between, but in this order.
        let begun = self.step(State::Making, State::Aborting)
            || self.step(State::Ready, State::Aborting)
            || self.step(State::Finalizing, State::Aborting);
        if begun {
            *reason = Some((why.to_owned(), Instant::now()));
        }
        begun
    }

    /// Why it was aborted; there from the moment on when an abort can be seen.
    pub(crate) fn reason(&self) -> Option<String> {
        self.reason.lock().as_ref().map(|(why, _)| why.clone())
    }

    /// How long ago it was aborted, if it was.
    #[doc(hidden)]
    pub fn aborted_for(&self) -> Option<Duration> {
        self.reason.lock().as_ref().map(|(_, at)| at.elapsed())
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

    /// NCCL did not give back what was left of a revoked one.
    pub(crate) fn leaked_after_revoke(&self) -> bool {
        self.step(State::Aborted, State::Leaked)
    }

    /// Nothing of NCCL's uses lent memory any more.
    pub(crate) fn let_go(&self) {
        self.let_go.store(true, Ordering::Release);
    }

    /// Whether an error of an operation may be handed out.
    pub(crate) fn has_let_go(&self) -> bool {
        self.let_go.load(Ordering::Acquire) || self.get().is_final()
    }

    /// Tells those who wait for it whether NCCL let go of the communicator.
    pub(crate) fn set_freed(&self, freed: bool) {
        *self.freed.lock() = Some(freed);
        self.freed_bell.notify_all();
    }

    /// Whether NCCL let go of the communicator within `limit`.
    pub(crate) fn wait_freed(&self, limit: Duration) -> bool {
        let begun = Instant::now();
        let mut freed = self.freed.lock();
        while freed.is_none() {
            let left = limit.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return false;
            }
            self.freed_bell.wait_for(&mut freed, left);
        }
        *freed == Some(true)
    }

    /// The thread that makes it hands the pointer over, which is ready. False if an abort has begun: then
    /// [`unmade`](Self::unmade) has to follow.
    pub(crate) fn made<N: Native>(&self, native: &N, raw: N::Raw) -> bool {
        // Under the lock: whoever finds it `Ready` also finds the pointer, and an abort that was there first
        // does not.
        native.slot(|slot| {
            let made = self.step(State::Making, State::Ready);
            if made {
                *slot = Some(raw);
            }
            made
        })
    }

    /// The thread that makes it gives up, after an abort has begun: frees what NCCL had built by then.
    pub(crate) fn unmade<N: Native>(&self, native: &N, left: Left<N::Raw>) -> bool {
        let freed = match left {
            Left::Nothing => true,
            Left::Here(raw) => native.free(Way::Abort, raw).is_ok(),
            Left::Lost => false,
        };
        self.set_freed(freed);
        freed
    }

    /// The thread that finalizes. `None` if an abort came first and took the pointer.
    pub(crate) fn retire<N: Native, E>(
        &self,
        native: &N,
        settle: impl FnOnce(N::Raw) -> Result<(), E>,
        aborting: impl FnOnce(&E),
    ) -> Option<Retired<E, N::Failure>> {
        // After an operation that is being issued: it is one of those to wait for.
        let raw = native.slot(Option::take)?;
        let retired = retire(raw, settle, aborting, |way, raw| native.free(way, raw));
        self.set_freed(retired.freed.is_ok());
        Some(retired)
    }

    /// The thread that aborts: whether NCCL let go of the communicator. Waits for whoever has the pointer, for
    /// `limit` at most.
    pub(crate) fn end<N: Native>(&self, native: &N, limit: Duration) -> bool {
        native.break_in();
        // A thread inside a call on it notices the abort and lets go of the lock.
        match native.slot(Option::take) {
            Some(raw) => {
                let freed = native.free(Way::Abort, raw).is_ok();
                self.set_freed(freed);
                freed
            }
            // Whoever makes or finalizes it has it, and frees it when it notices the abort.
            None => self.wait_freed(limit),
        }
    }

    /// Whoever drops the last handle: the pointer, if it is left to do.
    pub(crate) fn remains<R>(&self, slot: &mut Option<R>) -> Option<R> {
        // What is leaked is not touched.
        slot.take_if(|_| self.get() != State::Leaked)
    }

    /// The pointer for a call, if there may be one; the caller holds the lock.
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

    impl Native for Nothing {
        type Raw = ();
        type Failure = ();

        fn slot<R>(&self, look: impl FnOnce(&mut Option<()>) -> R) -> R {
            look(&mut None)
        }

        fn free(&self, _: Way, (): ()) -> Result<(), ()> {
            Ok(())
        }
    }

    fn ready() -> Phase {
        let phase = Phase::new();
        assert!(!phase.begin_finalize(), "it is being made");
        assert!(phase.made(&Nothing, ()));
        phase
    }

    #[test]
    fn what_is_aborted_while_it_is_made_is_never_ready() {
        let phase = Phase::new();
        assert!(phase.begin_abort("too late"));
        assert!(!phase.made(&Nothing, ()));
        assert!(phase.unmade(&Nothing, Left::Here(())));
        assert!(
            phase.end(&Nothing, Duration::ZERO),
            "the other has freed it"
        );
        assert!(phase.aborted());
    }

    #[test]
    fn only_one_caller_aborts_and_only_one_finalizes() {
        let phase = ready();
        assert!(!phase.made(&Nothing, ()), "it was made once");
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
        let phase = ready();
        assert!(phase.begin_finalize());
        assert!(phase.finalized());
        assert!(!phase.begin_abort("on purpose"));
        assert!(phase.get().is_final());
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

//! What ends a call of a blocking communicator: the idle parent whose abort flag it shares.
//!
//! ```text
//! parent   blocking = 0, splitShare = 1   never carries data; its abort raises the flag of both
//!    └ child   blocking = 1               carries all data; its pointer is the one in the handle
//! ```
//!
//! NCCL frees a blocking communicator under a thread that is inside it. So the end of one always goes:
//!
//! 1. no call enters the child any more: its state is not `Ready`, and whoever holds the lock looks at that;
//! 2. the parent is aborted ([`Switch::pull`]), without the child's lock: a thread inside the child sees the
//!    flag and comes out;
//! 3. nobody is inside the child: its lock was free once, because calls hold it while they are inside, and a
//!    finalize has come back ([`Switch::drained`]);
//! 4. the child is aborted.
//!
//! All of it happens on threads that may be given up. The parent has a lock of its own, which is held while
//! NCCL is called with it; the guard (`guard.rs`) has none at all: it looks at a word in which a call says
//! until when it may take.
//!
//! The word, [`Switch::inside`]: 0 while nobody is inside; otherwise the number of the call, until the guard replaces it by why it
//! ended the call. The call takes the word back when it comes out, and so learns of that exactly if the guard was first. How long
//! a call has been inside, the guard knows by itself, from the first look at which it was: no clock is read for it.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, compiler_fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nccl_sys as sys;

use super::handle::{RawComm, Unsettled, free};
use crate::abort::AbortSignal;
use crate::library::Library;
use crate::monitor::Bell;
use crate::state::{Phase, Way};
use crate::sync::{Mutex, MutexGuard};

const NOBODY: u64 = 0;
/// The guard ended the call because its limit passed.
const EXPIRED: u64 = u64::MAX;
/// The guard ended the call for another reason.
const INTERRUPTED: u64 = u64::MAX - 1;

/// A call has entered.
pub(super) static BELL: Bell = Bell::new();

/// See the module.
pub(crate) struct Switch {
    library: Library,
    parent: Mutex<Parent>,
    /// Where the split writes the child; kept until nobody can write there any more.
    slot: Mutex<Option<Box<AtomicPtr<sys::ncclComm>>>>,
    /// Held by a thread that finalizes the child.
    finalizing: Mutex<()>,
    inside: AtomicU64,
    /// How long the call that is inside may be there, in nanoseconds.
    limit: AtomicU64,
    /// The call that the guard has seen last, and since when.
    seen: Mutex<(u64, Instant)>,
    /// Whether the flag is up, or about to be: what ends on a stream from then on need not have been done.
    pulled: AtomicBool,
    /// Calls so far, and so the number of the last; written under the child's lock.
    calls: AtomicU64,
    abort_signal: AbortSignal,
    phase: Arc<Phase>,
    /// Those whose operations the same thread is issuing, in one group with this one's.
    companions: Mutex<Vec<Weak<Switch>>>,
}

/// NCCL's pointer to the parent.
#[derive(Debug)]
enum Parent {
    /// Not made, or not handed over by the thread that makes it.
    None,
    Idle(RawComm),
    Freed,
    /// NCCL did not let go of it.
    Leaked,
}

/// The parent, under its lock.
pub(crate) struct HeldParent<'s>(MutexGuard<'s, Parent>);

impl HeldParent<'_> {
    /// NCCL's pointer, unless the parent has ended.
    pub(crate) fn raw(&self) -> Option<RawComm> {
        match *self.0 {
            Parent::Idle(raw) => Some(raw),
            _ => None,
        }
    }
}

/// What a look from outside found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Nobody,
    /// Somebody is inside, and may be.
    Inside,
    /// Somebody is inside who is to come out now.
    ToEnd,
    /// Somebody was told to come out.
    Ended,
}

impl Switch {
    pub(crate) fn new(library: &Library, abort_signal: &AbortSignal, phase: &Arc<Phase>) -> Self {
        Self {
            library: library.clone(),
            parent: Mutex::new(Parent::None),
            slot: Mutex::new(None),
            finalizing: Mutex::new(()),
            inside: AtomicU64::new(NOBODY),
            limit: AtomicU64::new(0),
            seen: Mutex::new((NOBODY, Instant::now())),
            pulled: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            abort_signal: abort_signal.clone(),
            phase: Arc::clone(phase),
            companions: Mutex::default(),
        }
    }

    /// The place for the child, for as long as NCCL may write there.
    pub(crate) fn place(&self) -> *mut sys::ncclComm_t {
        let slot = Box::new(AtomicPtr::new(std::ptr::null_mut()));
        let place = slot.as_ptr();
        *self.slot.lock() = Some(slot);
        place
    }

    /// What was written there; to be asked when nobody writes any more.
    pub(crate) fn take_child(&self) -> Option<RawComm> {
        let slot = self.slot.lock().take()?;
        std::ptr::NonNull::new(slot.load(Ordering::Acquire)).map(RawComm)
    }

    /// Leaks the place: NCCL may still write there.
    pub(super) fn leak_place(&self) {
        if let Some(slot) = self.slot.lock().take() {
            Box::leak(slot);
        }
    }

    /// The parent is ready, and so is the child.
    pub(crate) fn install(&self, parent: RawComm) {
        *self.parent.lock() = Parent::Idle(parent);
    }

    /// Aborts the parent, which raises the flag at which a thread inside the child looks. Blocks for as long
    /// as NCCL likes. Whether NCCL let go of the parent.
    pub(crate) fn pull(&self) -> bool {
        let mut parent = self.parent.lock();
        // Before the flag, so that a thread which sees an end that the flag brought about sees this as well.
        self.pulled.store(true, Ordering::SeqCst);
        if let Parent::Idle(raw) = *parent {
            let freed = free(&self.library, Way::Abort, raw).is_ok();
            *parent = if freed { Parent::Freed } else { Parent::Leaked };
        }
        !matches!(*parent, Parent::Leaked)
    }

    /// Whether the flag is up, which may be before the communicator counts as aborted: the guard raises it for a call that
    /// takes too long, and the thread of that call begins the abort when it has come out.
    pub(crate) fn is_pulled(&self) -> bool {
        self.pulled.load(Ordering::SeqCst)
    }

    /// Lets `end` bring the parent to its end: its own locks are held meanwhile, so that nobody else calls NCCL
    /// with it. Whatever becomes of it, the parent is not used afterwards, if `end` says so.
    pub(super) fn with_parent<T>(&self, end: impl FnOnce(RawComm) -> T) -> Option<T> {
        match *self.parent.lock() {
            Parent::Idle(raw) => Some(end(raw)),
            _ => None,
        }
    }

    /// The idle parent, which nothing else calls while it is held; for a communicator that is made from it. `None` where
    /// another thread has it until `deadline`.
    pub(crate) fn hold_parent(&self, deadline: Instant) -> Option<HeldParent<'_>> {
        self.parent.try_lock_until(deadline).map(HeldParent)
    }

    /// The parent, to be destroyed by the caller, who says how that went.
    pub(super) fn destroy_parent<E>(
        &self,
        destroy: impl FnOnce(RawComm) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut parent = self.parent.lock();
        let Parent::Idle(raw) = *parent else {
            return Ok(());
        };
        let destroyed = destroy(raw);
        *parent = match destroyed {
            Ok(()) => Parent::Freed,
            Err(_) => Parent::Leaked,
        };
        destroyed
    }

    /// For the thread that finalizes the child.
    pub(super) fn finalizing(&self) -> MutexGuard<'_, ()> {
        self.finalizing.lock()
    }

    /// Waits until no finalize is inside the child any more.
    pub(super) fn drained(&self) {
        drop(self.finalizing.lock());
    }

    /// A call enters the child, under its lock, and may be there for `limit`.
    #[inline]
    pub(crate) fn enter(&self, limit: Duration) -> Inside<'_> {
        let call = self.calls.load(Ordering::Relaxed) + 1;
        self.calls.store(call, Ordering::Relaxed);
        self.limit.store(nanoseconds(limit), Ordering::Relaxed);
        // No fence, which would cost as much as a message: when the guard has said that it sleeps, it looks once more a tick later,
        // and what was written before that is seen by then; whoever writes later finds it asleep.
        self.inside.store(call, Ordering::Release);
        // Nor does the compiler move the look before the store.
        compiler_fence(Ordering::SeqCst);
        BELL.ring();
        Inside(self)
    }

    /// A call on each of these is made by one thread, in one group: what ends one has to end all.
    pub(crate) fn in_company(&self, companions: Vec<Weak<Switch>>) {
        *self.companions.lock() = companions;
    }

    pub(super) fn companions(&self) -> Vec<Weak<Switch>> {
        self.companions.lock().clone()
    }

    /// A number that changes with every call.
    pub(super) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// For the guard alone: who is inside, and whether that one is to come out.
    pub(super) fn look(&self) -> Found {
        match self.inside.load(Ordering::Acquire) {
            NOBODY => Found::Nobody,
            EXPIRED | INTERRUPTED => Found::Ended,
            call if self.is_late(call) => self.mark(call, EXPIRED),
            call if self.is_void() => self.mark(call, INTERRUPTED),
            _ => Found::Inside,
        }
    }

    /// Should another call have come meanwhile, its limit may be taken for that of this one, which is over then.
    fn is_late(&self, call: u64) -> bool {
        let mut seen = self.seen.lock();
        if seen.0 != call {
            *seen = (call, Instant::now());
        }
        seen.1.elapsed() >= Duration::from_nanos(self.limit.load(Ordering::Relaxed))
    }

    fn mark(&self, call: u64, word: u64) -> Found {
        let marked = self
            .inside
            .compare_exchange(call, word, Ordering::SeqCst, Ordering::SeqCst);
        match marked {
            Ok(_) => Found::ToEnd,
            // It came out just now.
            Err(_) => Found::Nobody,
        }
    }

    /// Whether what the call does has no use any more. Who aborts the communicator itself also pulls its
    /// switch, but knows nothing of a group that waits for another one.
    fn is_void(&self) -> bool {
        if self.abort_signal.is_aborted() {
            return true;
        }
        let companions = self.companions.lock();
        companions.iter().any(|other| {
            other
                .upgrade()
                .is_some_and(|other| other.phase.get().is_aborted() || other.is_ended())
        })
    }

    pub(super) fn is_ended(&self) -> bool {
        matches!(self.inside.load(Ordering::SeqCst), EXPIRED | INTERRUPTED)
    }
}

/// A call that is inside the child.
#[must_use = "a call comes out again"]
pub(crate) struct Inside<'s>(&'s Switch);

impl Inside<'_> {
    /// It came out; why it was made to, if it was.
    #[inline]
    pub(crate) fn leave(self) -> Option<Unsettled> {
        match self.0.inside.swap(NOBODY, Ordering::SeqCst) {
            EXPIRED => Some(Unsettled::TimedOut),
            INTERRUPTED => Some(Unsettled::Interrupted),
            _ => None,
        }
    }
}

#[inline]
fn nanoseconds(duration: Duration) -> u64 {
    duration
        .as_secs()
        .saturating_mul(1_000_000_000)
        .saturating_add(duration.subsec_nanos().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch(signal: &AbortSignal) -> Arc<Switch> {
        // SAFETY: nothing is called through an empty table.
        let library = unsafe { Library::from_api(sys::Api::empty(), sys::Version::HEADER) }
            .expect("a table of functions");
        Arc::new(Switch::new(&library, signal, &Arc::new(Phase::new())))
    }

    #[test]
    fn a_call_learns_that_it_was_ended_exactly_if_the_guard_was_first() {
        let signal = AbortSignal::new();
        let switch = switch(&signal);
        assert_eq!(switch.look(), Found::Nobody);

        let call = switch.enter(Duration::from_secs(3600));
        assert_eq!(switch.look(), Found::Inside);
        assert!(call.leave().is_none());
        assert_eq!(switch.look(), Found::Nobody);

        let call = switch.enter(Duration::ZERO);
        assert_eq!(switch.look(), Found::ToEnd);
        assert_eq!(switch.look(), Found::Ended);
        assert!(matches!(call.leave(), Some(Unsettled::TimedOut)));

        let call = switch.enter(Duration::MAX);
        assert_eq!(switch.look(), Found::Inside);
        signal.abort();
        assert_eq!(switch.look(), Found::ToEnd);
        assert!(matches!(call.leave(), Some(Unsettled::Interrupted)));
    }

    #[test]
    fn a_group_ends_with_any_of_its_communicators() {
        let (one, two) = (switch(&AbortSignal::new()), switch(&AbortSignal::new()));
        one.in_company(vec![Arc::downgrade(&two)]);
        two.in_company(vec![Arc::downgrade(&one)]);
        let first = one.enter(Duration::MAX);
        let second = two.enter(Duration::ZERO);
        assert_eq!(one.look(), Found::Inside);
        assert_eq!(two.look(), Found::ToEnd);
        assert_eq!(one.look(), Found::ToEnd);
        assert!(matches!(first.leave(), Some(Unsettled::Interrupted)));
        assert!(matches!(second.leave(), Some(Unsettled::TimedOut)));
    }
}

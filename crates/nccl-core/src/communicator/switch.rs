//! The switch that ends a call of a blocking communicator: an idle parent that shares its abort flag.
//!
//! ```text
//! parent   blocking = 0, splitShare = 1   never carries data; its abort raises the flag of both
//!    └ child   blocking = 1               carries all data; its pointer is the one in the handle
//! ```
//!
//! NCCL frees a blocking communicator even while a thread is inside it. So an abort goes in this order:
//!
//! 1. no further call enters the child: its state is not `Ready`, which every holder of the lock checks;
//! 2. the parent is aborted ([`Switch::pull`]), without the child's lock: a thread inside the child sees the
//!    flag and leaves;
//! 3. no thread is inside the child: its lock was free once, because calls hold it while they are inside, and a
//!    finalize has returned ([`Switch::drained`]);
//! 4. the child is aborted.
//!
//! All steps run on threads that may be given up. The parent has a lock of its own, which is held while
//! NCCL is called with it. The guard (`guard.rs`) takes no lock: it reads the word [`Switch::inside`] and the call's
//! timeout.
//!
//! The word is 0 while no call is inside; otherwise the number of the call, until the guard replaces it with the reason for which
//! it ended the call. A leaving call swaps the word back to 0, and so learns whether the guard was first. The guard measures the
//! duration of a call from the first look that finds it: the call reads no clock.

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
/// The guard ended the call because its timeout passed.
const EXPIRED: u64 = u64::MAX;
/// The guard ended the call for another reason.
const INTERRUPTED: u64 = u64::MAX - 1;

/// Rings when a call enters.
pub(super) static BELL: Bell = Bell::new();

/// The switch of a blocking communicator; see the module.
pub(crate) struct Switch {
    library: Library,
    parent: Mutex<Parent>,
    /// The memory into which the split writes the child; kept until NCCL cannot write there any more.
    slot: Mutex<Option<Box<AtomicPtr<sys::ncclComm>>>>,
    /// Held by the thread that finalizes the child.
    finalizing: Mutex<()>,
    inside: AtomicU64,
    /// The timeout of the current call, in nanoseconds.
    timeout: AtomicU64,
    /// The last call that the guard saw, and when it saw that call first.
    seen: Mutex<(u64, Instant)>,
    /// Whether the flag is raised, or about to be: work that ends on a stream from then on may be incomplete.
    pulled: AtomicBool,
    /// The number of calls so far, which is the number of the last one; written under the child's lock.
    calls: AtomicU64,
    abort_signal: AbortSignal,
    phase: Arc<Phase>,
    /// The switches of the other communicators in the group that this thread is issuing.
    companions: Mutex<Vec<Weak<Switch>>>,
}

/// NCCL's pointer to the parent.
#[derive(Debug)]
enum Parent {
    /// Not made, or not handed over yet by the thread that makes it.
    None,
    Idle(RawComm),
    Freed,
    /// NCCL did not free it.
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

/// What the guard's look found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Nobody,
    /// A call is inside, within its timeout.
    Inside,
    /// A call is inside that has just been marked to be ended.
    ToEnd,
    /// A call is inside that was marked before.
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
            timeout: AtomicU64::new(0),
            seen: Mutex::new((NOBODY, Instant::now())),
            pulled: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            abort_signal: abort_signal.clone(),
            phase: Arc::clone(phase),
            companions: Mutex::default(),
        }
    }

    /// Allocates the memory into which NCCL writes the child, for as long as NCCL may write there.
    pub(crate) fn place(&self) -> *mut sys::ncclComm_t {
        let slot = Box::new(AtomicPtr::new(std::ptr::null_mut()));
        let place = slot.as_ptr();
        *self.slot.lock() = Some(slot);
        place
    }

    /// Returns the child that NCCL wrote; to be called when NCCL does not write there any more.
    pub(crate) fn take_child(&self) -> Option<RawComm> {
        let slot = self.slot.lock().take()?;
        std::ptr::NonNull::new(slot.load(Ordering::Acquire)).map(RawComm)
    }

    /// Leaks the memory for the child: NCCL may still write there.
    pub(super) fn leak_place(&self) {
        if let Some(slot) = self.slot.lock().take() {
            Box::leak(slot);
        }
    }

    /// Stores the parent, once the parent and the child are ready.
    pub(crate) fn install(&self, parent: RawComm) {
        *self.parent.lock() = Parent::Idle(parent);
    }

    /// Aborts the parent, which raises the flag that a thread inside the child polls. Blocks for as long
    /// as NCCL does. Returns whether NCCL freed the parent.
    pub(crate) fn pull(&self) -> bool {
        let mut parent = self.parent.lock();
        // Before the flag, so that a thread that sees an end caused by the flag also sees this.
        self.pulled.store(true, Ordering::SeqCst);
        if let Parent::Idle(raw) = *parent {
            let freed = free(&self.library, Way::Abort, raw).is_ok();
            *parent = if freed { Parent::Freed } else { Parent::Leaked };
        }
        !matches!(*parent, Parent::Leaked)
    }

    /// Whether the flag is raised, which may precede the abort of the communicator: the guard raises it for a call that
    /// exceeds its timeout, and the thread of that call begins the abort after it has left the call.
    pub(crate) fn is_pulled(&self) -> bool {
        self.pulled.load(Ordering::SeqCst)
    }

    /// Calls `end` with the parent, under the parent's lock, so that no other thread calls NCCL with it meanwhile.
    /// Returns `None` if there is no parent any more. The parent stays installed.
    pub(super) fn with_parent<T>(&self, end: impl FnOnce(RawComm) -> T) -> Option<T> {
        match *self.parent.lock() {
            Parent::Idle(raw) => Some(end(raw)),
            _ => None,
        }
    }

    /// Locks the idle parent, so that no other call uses it; for making another communicator from it. `None` if
    /// another thread holds the lock until `deadline`.
    pub(crate) fn hold_parent(&self, deadline: Instant) -> Option<HeldParent<'_>> {
        self.parent.try_lock_until(deadline).map(HeldParent)
    }

    /// Calls `destroy` with the parent, and records whether the parent was freed or leaked.
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

    /// Locks out [`drained`](Self::drained), for the thread that finalizes the child.
    pub(super) fn finalizing(&self) -> MutexGuard<'_, ()> {
        self.finalizing.lock()
    }

    /// Waits until no finalize is inside the child any more.
    pub(super) fn drained(&self) {
        drop(self.finalizing.lock());
    }

    /// Marks the start of a call on the child, under the child's lock, with the timeout `timeout`.
    #[inline]
    pub(crate) fn enter(&self, timeout: Duration) -> Inside<'_> {
        let call = self.calls.load(Ordering::Relaxed) + 1;
        self.calls.store(call, Ordering::Relaxed);
        self.timeout.store(nanoseconds(timeout), Ordering::Relaxed);
        // No fence, which would cost as much as a message: the guard looks once more a tick after it announced its sleep,
        // and sees by then what was written before; a call that writes later finds the guard asleep and wakes it.
        self.inside.store(call, Ordering::Release);
        // The compiler does not move the bell's load before the store.
        compiler_fence(Ordering::SeqCst);
        BELL.ring();
        Inside(self)
    }

    /// Sets the switches whose calls the same thread makes in one group: the end of one call has to end all.
    pub(crate) fn in_company(&self, companions: Vec<Weak<Switch>>) {
        *self.companions.lock() = companions;
    }

    pub(super) fn companions(&self) -> Vec<Weak<Switch>> {
        self.companions.lock().clone()
    }

    /// Returns a number that changes with every call.
    pub(super) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// For the guard only: returns whether a call is inside, and marks it if it has to be ended.
    pub(super) fn look(&self) -> Found {
        match self.inside.load(Ordering::Acquire) {
            NOBODY => Found::Nobody,
            EXPIRED | INTERRUPTED => Found::Ended,
            call if self.is_late(call) => self.mark(call, EXPIRED),
            call if self.is_void() => self.mark(call, INTERRUPTED),
            _ => Found::Inside,
        }
    }

    /// If another call has entered meanwhile, `timeout` may be that call's; then this call is over, and [`mark`](Self::mark) fails.
    fn is_late(&self, call: u64) -> bool {
        let mut seen = self.seen.lock();
        if seen.0 != call {
            *seen = (call, Instant::now());
        }
        seen.1.elapsed() >= Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    fn mark(&self, call: u64, word: u64) -> Found {
        let marked = self
            .inside
            .compare_exchange(call, word, Ordering::SeqCst, Ordering::SeqCst);
        match marked {
            Ok(_) => Found::ToEnd,
            // The call has left meanwhile.
            Err(_) => Found::Nobody,
        }
    }

    /// Whether the result of the current call is of no use any more. An abort of this communicator pulls its
    /// switch by itself, but does not reach a call that waits in a group with another communicator's call.
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

/// A call inside the child.
#[must_use = "a call comes out again"]
pub(crate) struct Inside<'s>(&'s Switch);

impl Inside<'_> {
    /// Ends the call; returns the reason if the guard ended it.
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

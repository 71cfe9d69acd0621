//! The abort-flag parent of a blocking communicator: an idle parent whose abort ends a call inside the communicator.
//!
//! ```text
//! parent   blocking = 0, splitShare = 1   never carries data; its abort raises the flag of both
//!    └ child   blocking = 1               carries all data; its pointer is the one in the handle
//! ```
//!
//! NCCL frees a blocking communicator even while a thread is inside it. So an abort goes in this order:
//!
//! 1. no further call enters the child: its state is not `Ready`, which every holder of the lock checks;
//! 2. the parent is aborted ([`AbortFlagParent::raise`]), without the child's lock: a thread inside the child sees the
//!    flag and leaves;
//! 3. no thread is inside the child: its lock was free once, because calls hold it while they are inside, and a
//!    finalize has returned ([`AbortFlagParent::wait_for_finalize`]);
//! 4. the child is aborted.
//!
//! All steps run on threads that may be given up. The parent has a lock of its own, which is held during calls of NCCL
//! with the parent. The blocking-call monitor (`blocking_call_monitor.rs`) takes no lock: it reads the word
//! [`AbortFlagParent::inside`] and the call's timeout.
//!
//! The word is 0 while no call is inside. Otherwise it is the number of the call, until the blocking-call monitor replaces
//! it with the reason for which it ended the call. A leaving call swaps the word back to 0, and learns from the old value
//! whether the monitor has ended it. The monitor measures the duration of a call from the first check that finds the call,
//! so the call reads no clock.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, compiler_fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nccl_sys as sys;

use super::handle::{NotIdle, RawComm, free};
use crate::abort::AbortSignal;
use crate::library::Library;
use crate::monitor::WakeFlag;
use crate::state::{FreeMethod, Lifecycle};
use crate::sync::{Mutex, MutexGuard};

const NO_CALL: u64 = 0;
/// The blocking-call monitor ended the call because its timeout passed.
const EXPIRED: u64 = u64::MAX;
/// The blocking-call monitor ended the call for another reason.
const INTERRUPTED: u64 = u64::MAX - 1;

/// Raised when a call enters.
pub(super) static WAKE_FLAG: WakeFlag = WakeFlag::new();

/// The abort-flag parent of a blocking communicator; see the module.
pub(crate) struct AbortFlagParent {
    library: Library,
    parent: Mutex<ParentState>,
    /// The memory into which the split writes the child; kept until NCCL cannot write there any more.
    slot: Mutex<Option<Box<AtomicPtr<sys::ncclComm>>>>,
    /// Held by the thread that finalizes the child.
    finalizing: Mutex<()>,
    inside: AtomicU64,
    /// The timeout of the current call, in nanoseconds.
    timeout: AtomicU64,
    /// The last call that the blocking-call monitor saw, and when it first saw that call.
    first_seen: Mutex<(u64, Instant)>,
    /// Whether the flag is raised, or about to be: work that ends on a stream after that may be incomplete.
    raised: AtomicBool,
    /// The number of calls so far, which is the number of the last one; written under the child's lock.
    calls: AtomicU64,
    abort_signal: AbortSignal,
    lifecycle: Arc<Lifecycle>,
    /// The abort-flag parents of the other communicators in the group that this thread is issuing.
    group_members: Mutex<Vec<Weak<AbortFlagParent>>>,
}

/// NCCL's pointer to the parent.
#[derive(Debug)]
enum ParentState {
    /// Not made, or not yet handed over by the thread that makes it.
    None,
    Idle(RawComm),
    Freed,
    /// NCCL did not free the parent.
    Leaked,
}

/// The parent, under its lock.
pub(crate) struct LockedParent<'s>(MutexGuard<'s, ParentState>);

impl LockedParent<'_> {
    /// NCCL's pointer, unless the parent has ended.
    pub(crate) fn raw(&self) -> Option<RawComm> {
        match *self.0 {
            ParentState::Idle(raw) => Some(raw),
            _ => None,
        }
    }
}

/// The result of a check by the blocking-call monitor.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CallCheck {
    NoCall,
    /// A call is inside, within its timeout.
    InTime,
    /// A call is inside, and this check has marked it to be ended.
    ToEnd,
    /// A call is inside that an earlier check has marked.
    Ended,
}

impl AbortFlagParent {
    pub(crate) fn new(
        library: &Library,
        abort_signal: &AbortSignal,
        lifecycle: &Arc<Lifecycle>,
    ) -> Self {
        Self {
            library: library.clone(),
            parent: Mutex::new(ParentState::None),
            slot: Mutex::new(None),
            finalizing: Mutex::new(()),
            inside: AtomicU64::new(NO_CALL),
            timeout: AtomicU64::new(0),
            first_seen: Mutex::new((NO_CALL, Instant::now())),
            raised: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            abort_signal: abort_signal.clone(),
            lifecycle: Arc::clone(lifecycle),
            group_members: Mutex::default(),
        }
    }

    /// Allocates the memory into which NCCL writes the child, for as long as NCCL may write there.
    pub(crate) fn child_out_pointer(&self) -> *mut sys::ncclComm_t {
        let slot = Box::new(AtomicPtr::new(std::ptr::null_mut()));
        let child_out_pointer = slot.as_ptr();
        *self.slot.lock() = Some(slot);
        child_out_pointer
    }

    /// Returns the child that NCCL wrote; to be called when NCCL does not write there any more.
    pub(crate) fn take_child(&self) -> Option<RawComm> {
        let slot = self.slot.lock().take()?;
        std::ptr::NonNull::new(slot.load(Ordering::Acquire)).map(RawComm)
    }

    /// Leaks the memory for the child: NCCL may still write there.
    pub(super) fn leak_child_out_pointer(&self) {
        if let Some(slot) = self.slot.lock().take() {
            Box::leak(slot);
        }
    }

    /// Stores the parent, once the parent and the child are ready.
    pub(crate) fn set_parent(&self, parent: RawComm) {
        *self.parent.lock() = ParentState::Idle(parent);
    }

    /// Aborts the parent, which raises the flag that a thread inside the child polls. Blocks for as long
    /// as NCCL does. Returns whether NCCL freed the parent.
    pub(crate) fn raise(&self) -> bool {
        let mut parent = self.parent.lock();
        // Set before the flag, so that a thread that sees a consequence of the flag also sees this.
        self.raised.store(true, Ordering::SeqCst);
        if let ParentState::Idle(raw) = *parent {
            let freed = free(&self.library, FreeMethod::Abort, raw).is_ok();
            *parent = if freed {
                ParentState::Freed
            } else {
                ParentState::Leaked
            };
        }
        !matches!(*parent, ParentState::Leaked)
    }

    /// Whether the flag is raised, which may precede the abort of the communicator: the blocking-call monitor raises it for a
    /// call that exceeds its timeout, and the thread of that call begins the abort after it has left the call.
    pub(crate) fn is_abort_flag_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }

    /// Calls `end` with the parent, under the parent's lock, so that no other thread calls NCCL with it meanwhile.
    /// Returns `None` if there is no parent any more. The parent stays installed.
    pub(super) fn with_parent<T>(&self, end: impl FnOnce(RawComm) -> T) -> Option<T> {
        match *self.parent.lock() {
            ParentState::Idle(raw) => Some(end(raw)),
            _ => None,
        }
    }

    /// Locks the idle parent, so that no other call uses it; for making another communicator from it. `None` if
    /// another thread holds the lock until `deadline`.
    pub(crate) fn hold_parent(&self, deadline: Instant) -> Option<LockedParent<'_>> {
        self.parent.try_lock_until(deadline).map(LockedParent)
    }

    /// Calls `destroy` with the parent, and records whether the parent was freed or leaked.
    pub(super) fn destroy_parent<E>(
        &self,
        destroy: impl FnOnce(RawComm) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut parent = self.parent.lock();
        let ParentState::Idle(raw) = *parent else {
            return Ok(());
        };
        let destroyed = destroy(raw);
        *parent = match destroyed {
            Ok(()) => ParentState::Freed,
            Err(_) => ParentState::Leaked,
        };
        destroyed
    }

    /// Makes [`wait_for_finalize`](Self::wait_for_finalize) wait, for the thread that finalizes the child.
    pub(super) fn lock_finalize(&self) -> MutexGuard<'_, ()> {
        self.finalizing.lock()
    }

    /// Waits until no finalize is inside the child any more.
    pub(super) fn wait_for_finalize(&self) {
        drop(self.finalizing.lock());
    }

    /// Marks the start of a call on the child, under the child's lock, with the timeout `timeout`.
    #[inline]
    pub(crate) fn enter(&self, timeout: Duration) -> BlockingCall<'_> {
        let call = self.calls.load(Ordering::Relaxed) + 1;
        self.calls.store(call, Ordering::Relaxed);
        self.timeout.store(nanoseconds(timeout), Ordering::Relaxed);
        // No fence, which would cost as much as a message. The blocking-call monitor checks once more a tick after it announced
        // its sleep, and by then sees what was written before. A call that writes later finds the monitor asleep and wakes it.
        self.inside.store(call, Ordering::Release);
        // Keeps the compiler from moving the load of the wake flag before this store.
        compiler_fence(Ordering::SeqCst);
        WAKE_FLAG.raise();
        BlockingCall(self)
    }

    /// Sets the abort-flag parents whose calls the same thread makes in one group; the end of one call has to end all
    /// of them.
    pub(crate) fn set_group_members(&self, group_members: Vec<Weak<AbortFlagParent>>) {
        *self.group_members.lock() = group_members;
    }

    pub(super) fn group_members(&self) -> Vec<Weak<AbortFlagParent>> {
        self.group_members.lock().clone()
    }

    /// Returns a number that changes with every call.
    pub(super) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// For the blocking-call monitor only: returns whether a call is inside, and marks it if it has to be ended.
    pub(super) fn check(&self) -> CallCheck {
        match self.inside.load(Ordering::Acquire) {
            NO_CALL => CallCheck::NoCall,
            EXPIRED | INTERRUPTED => CallCheck::Ended,
            call if self.is_late(call) => self.mark(call, EXPIRED),
            call if self.is_void() => self.mark(call, INTERRUPTED),
            _ => CallCheck::InTime,
        }
    }

    /// If another call has entered meanwhile, `timeout` may belong to that call. Then this call is over, and
    /// [`mark`](Self::mark) fails.
    fn is_late(&self, call: u64) -> bool {
        let mut first_seen = self.first_seen.lock();
        if first_seen.0 != call {
            *first_seen = (call, Instant::now());
        }
        first_seen.1.elapsed() >= Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    fn mark(&self, call: u64, word: u64) -> CallCheck {
        let marked = self
            .inside
            .compare_exchange(call, word, Ordering::SeqCst, Ordering::SeqCst);
        match marked {
            Ok(_) => CallCheck::ToEnd,
            // The call has left meanwhile.
            Err(_) => CallCheck::NoCall,
        }
    }

    /// Whether the result of the current call has become useless. An abort of this communicator raises its abort-flag
    /// parent itself, but does not reach a call that waits in a group with another communicator's call.
    fn is_void(&self) -> bool {
        if self.abort_signal.is_aborted() {
            return true;
        }
        let group_members = self.group_members.lock();
        group_members.iter().any(|other| {
            other
                .upgrade()
                .is_some_and(|other| other.lifecycle.get().abort_has_begun() || other.is_ended())
        })
    }

    pub(super) fn is_ended(&self) -> bool {
        matches!(self.inside.load(Ordering::SeqCst), EXPIRED | INTERRUPTED)
    }
}

/// A call inside the child.
#[must_use = "a call comes out again"]
pub(crate) struct BlockingCall<'s>(&'s AbortFlagParent);

impl BlockingCall<'_> {
    /// Ends the call; returns the reason if the blocking-call monitor ended it.
    #[inline]
    pub(crate) fn leave(self) -> Option<NotIdle> {
        match self.0.inside.swap(NO_CALL, Ordering::SeqCst) {
            EXPIRED => Some(NotIdle::TimedOut),
            INTERRUPTED => Some(NotIdle::Interrupted),
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

    fn abort_flag_parent(signal: &AbortSignal) -> Arc<AbortFlagParent> {
        // SAFETY: nothing is called through an empty table.
        let library = unsafe { Library::from_api(sys::Api::empty(), sys::Version::HEADER) }
            .expect("a table of functions");
        Arc::new(AbortFlagParent::new(
            &library,
            signal,
            &Arc::new(Lifecycle::new()),
        ))
    }

    #[test]
    fn a_call_learns_that_it_was_ended_exactly_if_the_guard_was_first() {
        let signal = AbortSignal::new();
        let abort_flag_parent = abort_flag_parent(&signal);
        assert_eq!(abort_flag_parent.check(), CallCheck::NoCall);

        let call = abort_flag_parent.enter(Duration::from_secs(3600));
        assert_eq!(abort_flag_parent.check(), CallCheck::InTime);
        assert!(call.leave().is_none());
        assert_eq!(abort_flag_parent.check(), CallCheck::NoCall);

        let call = abort_flag_parent.enter(Duration::ZERO);
        assert_eq!(abort_flag_parent.check(), CallCheck::ToEnd);
        assert_eq!(abort_flag_parent.check(), CallCheck::Ended);
        assert!(matches!(call.leave(), Some(NotIdle::TimedOut)));

        let call = abort_flag_parent.enter(Duration::MAX);
        assert_eq!(abort_flag_parent.check(), CallCheck::InTime);
        signal.abort();
        assert_eq!(abort_flag_parent.check(), CallCheck::ToEnd);
        assert!(matches!(call.leave(), Some(NotIdle::Interrupted)));
    }

    #[test]
    fn a_group_ends_with_any_of_its_communicators() {
        let (one, two) = (
            abort_flag_parent(&AbortSignal::new()),
            abort_flag_parent(&AbortSignal::new()),
        );
        one.set_group_members(vec![Arc::downgrade(&two)]);
        two.set_group_members(vec![Arc::downgrade(&one)]);
        let first = one.enter(Duration::MAX);
        let second = two.enter(Duration::ZERO);
        assert_eq!(one.check(), CallCheck::InTime);
        assert_eq!(two.check(), CallCheck::ToEnd);
        assert_eq!(one.check(), CallCheck::ToEnd);
        assert!(matches!(first.leave(), Some(NotIdle::Interrupted)));
        assert!(matches!(second.leave(), Some(NotIdle::TimedOut)));
    }
}

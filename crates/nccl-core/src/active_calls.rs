//! Records which threads are inside a call of NCCL or CUDA, so that a call that does not return is detected.
//!
//! Every wait of this crate ends at a timeout, but a call that does not return never gets there: an NCCL function that should
//! not wait but does, or a stuck driver. A call that issues an operation cannot run on a thread of its own
//! (`detached_call.rs`), because the thread costs more than the operation. Instead, the calling thread records the call in
//! its slot, and the stuck-call monitor (`supervision/stuck_call_monitor.rs`) reads the slots:
//!
//! ```text
//! inside beyond its timeout ──▶ its communicator is aborted, and with it those of the other ranks
//!                             the call may return because of that; when the thread is still inside a while
//!                             after the abort ended or was given up ──▶ the process ends, with a message on stderr
//! ```
//!
//! The process has to end because the call does not return: the call may use borrowed memory, and no other thread can
//! end it. A stuck thread of this crate is replaced by a new one instead.
//!
//! A slot belongs to one thread, and only that thread writes to it. [`ThreadSlot::version`] is odd while the thread is inside,
//! and differs for each call. If two reads of `version` return the same odd number, the fields read in between belong
//! to one call.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{
    AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence,
};
use std::time::Duration;

use crate::forked;
use crate::monitor::WakeFlag;
use crate::sync::Mutex;

/// The kind of call a thread is inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[doc(hidden)]
pub enum CallKind {
    Issue = 0,
    Replay = 1,
    Capture = 2,
    /// A query of whether work is done, or of NCCL's state.
    Query = 3,
    /// A query made by a thread of this crate.
    Poller = 4,
}

impl CallKind {
    fn of(code: u8) -> Self {
        match code {
            0 => Self::Issue,
            1 => Self::Replay,
            2 => Self::Capture,
            3 => Self::Query,
            _ => Self::Poller,
        }
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Issue => "a call of NCCL's or CUDA's that issues an operation",
            Self::Replay => "a call of CUDA's that launches a graph",
            Self::Capture => "a call of NCCL's or CUDA's that captures",
            Self::Query | Self::Poller => "a query of NCCL's or CUDA's",
        }
    }
}

/// The record of one thread's current call.
#[derive(Default)]
pub(crate) struct ThreadSlot {
    version: AtomicU64,
    /// The address of the communicator.
    communicator_address: AtomicUsize,
    seconds: AtomicU64,
    nanoseconds: AtomicU32,
    kind: AtomicU8,
}

/// All slots ever allocated, and the slots that no thread owns.
struct ThreadSlots {
    all: Vec<&'static ThreadSlot>,
    free: Vec<&'static ThreadSlot>,
}

static SLOTS: Mutex<ThreadSlots> = Mutex::new(ThreadSlots {
    all: Vec::new(),
    free: Vec::new(),
});

thread_local! {
    static SLOT: Cell<Option<&'static ThreadSlot>> = const { Cell::new(None) };
    static SLOT_RELEASE: SlotRelease = const { SlotRelease };
}

/// Releases the thread's slot when the thread ends.
struct SlotRelease;

impl Drop for SlotRelease {
    fn drop(&mut self) {
        if let (Some(slot), false) = (SLOT.take(), forked::is_child()) {
            SLOTS.lock().free.push(slot);
        }
    }
}

/// Marks its thread as inside a call until dropped.
#[doc(hidden)]
pub struct CallGuard {
    slot: Option<&'static ThreadSlot>,
    /// Not `Send`: belongs to its thread.
    _thread: PhantomData<*const ()>,
}

/// Marks this thread as inside a call on the communicator at `communicator_address`, which should return within `timeout`.
/// Changes nothing inside another such call.
#[inline]
pub(crate) fn enter(communicator_address: usize, kind: CallKind, timeout: Duration) -> CallGuard {
    let slot = SLOT.get().or_else(own_slot);
    let slot = slot.filter(|slot| slot.version.load(Ordering::Relaxed).is_multiple_of(2));
    if let Some(slot) = slot {
        let version = slot.version.load(Ordering::Relaxed);
        // Orders the end of the previous call before the following stores, so that a reader that sees one of them sees
        // that end.
        fence(Ordering::Release);
        slot.communicator_address
            .store(communicator_address, Ordering::Relaxed);
        slot.seconds.store(timeout.as_secs(), Ordering::Relaxed);
        slot.nanoseconds
            .store(timeout.subsec_nanos(), Ordering::Relaxed);
        slot.kind.store(kind as u8, Ordering::Relaxed);
        slot.version
            .store(version.wrapping_add(1), Ordering::Release);
        // Keeps the compiler from moving the load of the wake flag before the store. The processor drains its store buffer long
        // before a tick ends.
        compiler_fence(Ordering::SeqCst);
        WAKE_FLAG.raise();
    }
    CallGuard {
        slot,
        _thread: PhantomData,
    }
}

#[cold]
fn own_slot() -> Option<&'static ThreadSlot> {
    // A thread whose thread-locals are being destroyed could not release a slot any more.
    SLOT_RELEASE.try_with(|_| ()).ok()?;
    let mut slots = SLOTS.lock();
    let slot = slots.free.pop().unwrap_or_else(|| {
        let slot: &'static ThreadSlot = Box::leak(Box::default());
        slots.all.push(slot);
        slot
    });
    drop(slots);
    SLOT.set(Some(slot));
    Some(slot)
}

impl Drop for CallGuard {
    #[inline]
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            let version = slot.version.load(Ordering::Relaxed);
            slot.version
                .store(version.wrapping_add(1), Ordering::Release);
        }
    }
}

/// The contents of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ActiveCall {
    pub(crate) version: u64,
    pub(crate) communicator_address: usize,
    pub(crate) timeout: Duration,
    pub(crate) kind: CallKind,
}

/// Returns all slots ever allocated.
pub(crate) fn slots() -> Vec<&'static ThreadSlot> {
    SLOTS.lock().all.clone()
}

impl ThreadSlot {
    /// Returns a number that changes whenever the thread enters or leaves a call.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    /// Returns the current call; `None` if the thread is not in a call, or the slot changed during the read.
    pub(crate) fn read(&self) -> Option<ActiveCall> {
        let version = self.version.load(Ordering::Acquire);
        if version.is_multiple_of(2) {
            return None;
        }
        let found = ActiveCall {
            version,
            communicator_address: self.communicator_address.load(Ordering::Relaxed),
            timeout: Duration::new(
                self.seconds.load(Ordering::Relaxed),
                self.nanoseconds.load(Ordering::Relaxed),
            ),
            kind: CallKind::of(self.kind.load(Ordering::Relaxed)),
        };
        fence(Ordering::Acquire);
        (self.version.load(Ordering::Relaxed) == version).then_some(found)
    }
}

/// Raised when a thread enters a call.
pub(crate) static WAKE_FLAG: WakeFlag = WakeFlag::new();

/// Wakes the monitor because a communicator was dropped; the monitor ends when the last one is gone.
pub(crate) fn wake_monitor() {
    WAKE_FLAG.raise();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_returns_the_current_call_and_none_afterwards() {
        let slot = ThreadSlot::default();
        assert_eq!(slot.read(), None);
        slot.communicator_address.store(7, Ordering::Relaxed);
        slot.seconds.store(3, Ordering::Relaxed);
        slot.nanoseconds.store(5, Ordering::Relaxed);
        slot.kind.store(CallKind::Capture as u8, Ordering::Relaxed);
        slot.version.store(1, Ordering::Release);
        let found = slot.read().expect("a call is recorded");
        assert_eq!((found.version, found.communicator_address), (1, 7));
        assert_eq!(found.timeout, Duration::new(3, 5));
        assert_eq!(found.kind, CallKind::Capture);
        slot.version.store(2, Ordering::Release);
        assert_eq!(slot.read(), None);
    }

    #[test]
    fn a_thread_that_ends_leaves_its_slot_to_the_next() {
        let slot = || {
            std::thread::spawn(|| own_slot().map(|slot| std::ptr::from_ref(slot).addr()))
                .join()
                .expect("no panic")
        };
        let slots: std::collections::HashSet<_> = (0..64).map(|_| slot()).collect();
        // Other tests own slots as well.
        assert!(slots.len() < 16, "{}", slots.len());
    }

    #[test]
    fn every_call_kind_survives_its_code() {
        for kind in [
            CallKind::Issue,
            CallKind::Replay,
            CallKind::Capture,
            CallKind::Query,
            CallKind::Poller,
        ] {
            assert_eq!(CallKind::of(kind as u8), kind);
            assert!(!kind.text().is_empty());
        }
    }
}

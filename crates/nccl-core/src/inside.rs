//! Which threads are inside calls of NCCL or CUDA, so that one that does not come out is noticed.
//!
//! Every wait of this crate's own ends at a limit, but a call that does not come back never gets there: a
//! function of NCCL's that waits although it should not, or a driver that is wedged. A call on the way of an
//! operation cannot have a thread of its own (`expendable.rs`), because that costs more than the operation.
//! So its thread writes down that it is inside, and the sentinel (`supervision/sentinel.rs`) looks:
//!
//! ```text
//! inside beyond its limit ──▶ its communicator is aborted, and with it those of the other ranks
//!                             the thread may come out by that; when it is still inside a while after
//!                             the abort ended or was given up ──▶ the process ends, with a sentence
//! ```
//!
//! The process has to end because the call cannot return: it may have been lent memory, and nobody else can
//! bring its thread back. Threads of this crate's own that are stuck get a successor instead.
//!
//! A slot belongs to one thread, which alone writes to it. [`Slot::turn`] is odd while the thread is inside,
//! and another number each time; whoever reads the rest between two reads of the same odd number reads what
//! belongs together.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{
    AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence,
};
use std::time::Duration;

use crate::forked;
use crate::monitor::Bell;
use crate::sync::Mutex;

/// What a thread is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[doc(hidden)]
pub enum Place {
    Issue = 0,
    Replay = 1,
    Capture = 2,
    /// Asks whether something is done, or NCCL for its state.
    Look = 3,
    /// A look of this crate's own thread.
    Poller = 4,
}

impl Place {
    fn of(code: u8) -> Self {
        match code {
            0 => Self::Issue,
            1 => Self::Replay,
            2 => Self::Capture,
            3 => Self::Look,
            _ => Self::Poller,
        }
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Issue => "a call of NCCL's or CUDA's that issues an operation",
            Self::Replay => "a call of CUDA's that launches a graph",
            Self::Capture => "a call of NCCL's or CUDA's that captures",
            Self::Look | Self::Poller => "a call of NCCL's or CUDA's that asks how far things are",
        }
    }
}

/// Where one thread writes down that it is inside.
#[derive(Default)]
pub(crate) struct Slot {
    turn: AtomicU64,
    /// The address of the communicator.
    of: AtomicUsize,
    seconds: AtomicU64,
    nanoseconds: AtomicU32,
    place: AtomicU8,
}

/// All slots there have ever been, and those without a thread.
struct Slots {
    all: Vec<&'static Slot>,
    free: Vec<&'static Slot>,
}

static SLOTS: Mutex<Slots> = Mutex::new(Slots {
    all: Vec::new(),
    free: Vec::new(),
});

thread_local! {
    static SLOT: Cell<Option<&'static Slot>> = const { Cell::new(None) };
    static GIVES_BACK: GivesBack = const { GivesBack };
}

/// Gives the thread's slot to others when the thread ends.
struct GivesBack;

impl Drop for GivesBack {
    fn drop(&mut self) {
        if let (Some(slot), false) = (SLOT.take(), forked::is_child()) {
            SLOTS.lock().free.push(slot);
        }
    }
}

/// A thread is inside while this lives.
#[doc(hidden)]
pub struct Inside {
    slot: Option<&'static Slot>,
    /// Of its thread alone.
    _thread: PhantomData<*const ()>,
}

/// This thread enters a call on the communicator at the address `of`, which should be over after `limit`. Inside of another such
/// call it changes nothing.
#[inline]
pub(crate) fn enter(of: usize, place: Place, limit: Duration) -> Inside {
    let slot = SLOT.get().or_else(own_slot);
    let slot = slot.filter(|slot| slot.turn.load(Ordering::Relaxed).is_multiple_of(2));
    if let Some(slot) = slot {
        let turn = slot.turn.load(Ordering::Relaxed);
        // Whoever sees one of the following sees as well that the call before is over.
        fence(Ordering::Release);
        slot.of.store(of, Ordering::Relaxed);
        slot.seconds.store(limit.as_secs(), Ordering::Relaxed);
        slot.nanoseconds
            .store(limit.subsec_nanos(), Ordering::Relaxed);
        slot.place.store(place as u8, Ordering::Relaxed);
        slot.turn.store(turn.wrapping_add(1), Ordering::Release);
        // The compiler does not move the look before the store; the processor's buffer is empty long before a tick is over.
        compiler_fence(Ordering::SeqCst);
        BELL.ring();
    }
    Inside {
        slot,
        _thread: PhantomData,
    }
}

#[cold]
fn own_slot() -> Option<&'static Slot> {
    // A thread that is ending has nobody to give a slot back.
    GIVES_BACK.try_with(|_| ()).ok()?;
    let mut slots = SLOTS.lock();
    let slot = slots.free.pop().unwrap_or_else(|| {
        let slot: &'static Slot = Box::leak(Box::default());
        slots.all.push(slot);
        slot
    });
    drop(slots);
    SLOT.set(Some(slot));
    Some(slot)
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            let turn = slot.turn.load(Ordering::Relaxed);
            slot.turn.store(turn.wrapping_add(1), Ordering::Release);
        }
    }
}

/// What a look at a slot found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) turn: u64,
    pub(crate) of: usize,
    pub(crate) limit: Duration,
    pub(crate) place: Place,
}

/// All slots there have ever been.
pub(crate) fn slots() -> Vec<&'static Slot> {
    SLOTS.lock().all.clone()
}

impl Slot {
    /// A number that changes whenever the thread enters or comes out.
    pub(crate) fn turn(&self) -> u64 {
        self.turn.load(Ordering::Relaxed)
    }

    /// `None` when nobody is inside.
    pub(crate) fn look(&self) -> Option<Found> {
        let turn = self.turn.load(Ordering::Acquire);
        if turn.is_multiple_of(2) {
            return None;
        }
        let found = Found {
            turn,
            of: self.of.load(Ordering::Relaxed),
            limit: Duration::new(
                self.seconds.load(Ordering::Relaxed),
                self.nanoseconds.load(Ordering::Relaxed),
            ),
            place: Place::of(self.place.load(Ordering::Relaxed)),
        };
        fence(Ordering::Acquire);
        (self.turn.load(Ordering::Relaxed) == turn).then_some(found)
    }
}

/// Somebody has entered.
pub(crate) static BELL: Bell = Bell::new();

/// A communicator is gone. The monitor ends with the last of them.
pub(crate) fn forget() {
    BELL.ring();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_finds_who_is_inside_and_nobody_afterwards() {
        let slot = Slot::default();
        assert_eq!(slot.look(), None);
        slot.of.store(7, Ordering::Relaxed);
        slot.seconds.store(3, Ordering::Relaxed);
        slot.nanoseconds.store(5, Ordering::Relaxed);
        slot.place.store(Place::Capture as u8, Ordering::Relaxed);
        slot.turn.store(1, Ordering::Release);
        let found = slot.look().expect("somebody is inside");
        assert_eq!((found.turn, found.of), (1, 7));
        assert_eq!(found.limit, Duration::new(3, 5));
        assert_eq!(found.place, Place::Capture);
        slot.turn.store(2, Ordering::Release);
        assert_eq!(slot.look(), None);
    }

    #[test]
    fn a_thread_that_ends_leaves_its_slot_to_the_next() {
        let slot = || {
            std::thread::spawn(|| own_slot().map(|slot| std::ptr::from_ref(slot).addr()))
                .join()
                .expect("no panic")
        };
        let slots: std::collections::HashSet<_> = (0..64).map(|_| slot()).collect();
        // Other tests have some as well.
        assert!(slots.len() < 16, "{}", slots.len());
    }

    #[test]
    fn every_place_survives_the_way_through_its_code() {
        for place in [
            Place::Issue,
            Place::Replay,
            Place::Capture,
            Place::Look,
            Place::Poller,
        ] {
            assert_eq!(Place::of(place as u8), place);
            assert!(!place.text().is_empty());
        }
    }
}

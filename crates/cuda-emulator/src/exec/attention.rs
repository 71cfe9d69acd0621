//! How a thread that waits for a stream wakes the stream's sleeping runner: see [`super::run`].

use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use super::bell::Bell;
use crate::sync::Mutex;

/// The means to wake a stream's runner.
#[derive(Default)]
pub(crate) struct Attention {
    /// The number of waiters that would run the stream themselves.
    pub(super) wanted: AtomicU32,
    /// The bell that the runner sleeps on.
    parked: Mutex<Option<Parked>>,
}

struct Parked(NonNull<Bell>);

// SAFETY: a bell is used through shared references from any thread; see [`Attention::park`] for its lifetime.
unsafe impl Send for Parked {}

impl Attention {
    /// Wakes the stream's runner if it sleeps.
    pub(crate) fn poke(&self) {
        if let Some(parked) = &*self.parked.lock() {
            // SAFETY: the sleeper keeps the bell alive until it has taken it out of `parked`, which
            // needs this lock.
            unsafe { parked.0.as_ref() }.ring();
        }
    }

    /// Records that the runner is about to sleep on `bell`, which stays in place until [`Attention::unpark`].
    pub(super) fn park(&self, bell: &Bell) {
        *self.parked.lock() = Some(Parked(NonNull::from(bell)));
    }

    /// Records that the runner is awake.
    pub(super) fn unpark(&self) {
        *self.parked.lock() = None;
    }
}

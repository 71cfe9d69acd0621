//! How a thread that comes to wait for a stream makes the stream's runner look up: see [`super::run`].

use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use super::bell::Bell;
use crate::sync::Mutex;

/// How a stream's runner is made to look up.
#[derive(Default)]
pub(crate) struct Attention {
    /// Waiters that would run the stream themselves.
    pub(super) wanted: AtomicU32,
    /// The bell that the runner sleeps on.
    parked: Mutex<Option<Parked>>,
}

struct Parked(NonNull<Bell>);

// SAFETY: a bell is used through shared references from any thread; see [`Attention::park`] for its lifetime.
unsafe impl Send for Parked {}

impl Attention {
    /// Makes the stream's runner look up if it sleeps.
    pub(crate) fn poke(&self) {
        if let Some(parked) = &*self.parked.lock() {
            // SAFETY: the sleeper keeps the bell alive until it has taken it out of `parked`, which
            // needs this lock.
            unsafe { parked.0.as_ref() }.ring();
        }
    }

    /// Its runner is about to sleep on `bell`, which stays where it is until [`Attention::unpark`].
    pub(super) fn park(&self, bell: &Bell) {
        *self.parked.lock() = Some(Parked(NonNull::from(bell)));
    }

    /// Its runner is awake.
    pub(super) fn unpark(&self) {
        *self.parked.lock() = None;
    }
}

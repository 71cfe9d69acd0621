//! Who runs and polls a stream, as the dispatcher counts it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Polls between two looks by which a stream moves as fast as by a worker.
pub(super) const POLLS: u64 = 4;

/// What the dispatcher knows of a stream's runners.
#[derive(Debug, Default)]
pub(crate) struct Visits {
    /// Those who run the stream now, or were sent to.
    pub(super) claims: AtomicU32,
    /// Polls that moved it, or could have; a run counts as [`POLLS`].
    pub(super) count: AtomicU64,
    /// `count` at the last look.
    pub(super) seen: AtomicU64,
}

impl Visits {
    /// Someone has the token, or is sent to take it.
    pub(super) fn claim(&self) {
        self.claims.fetch_add(1, Ordering::Relaxed);
    }

    /// The holder of the token ran the stream.
    pub(super) fn ran(&self) {
        self.add(POLLS);
    }

    /// The holder of the token polled, and may run what is next in the queue.
    pub(super) fn polled(&self) {
        self.add(1);
    }

    fn add(&self, polls: u64) {
        // Only the holder of the token writes.
        self.count.store(
            self.count.load(Ordering::Relaxed) + polls,
            Ordering::Relaxed,
        );
    }

    /// Ends a claim, after the token was freed or not got.
    pub(super) fn unclaim(&self) {
        // Sequentially consistent, as is the dispatcher's look at it before it sleeps.
        self.claims.fetch_sub(1, Ordering::SeqCst);
    }
}

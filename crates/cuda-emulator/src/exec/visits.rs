//! The dispatcher's count of a stream's runs and polls.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Polls between two looks at which polling moves a stream as fast as a worker would.
pub(super) const POLLS: u64 = 4;

/// The dispatcher's record of a stream's runners.
#[derive(Debug, Default)]
pub(crate) struct Visits {
    /// Threads that run the stream now, or were sent to run it.
    pub(super) claims: AtomicU32,
    /// Polls that moved the stream or could have; a run counts as [`POLLS`].
    pub(super) count: AtomicU64,
    /// `count` at the last look.
    pub(super) seen: AtomicU64,
}

impl Visits {
    /// Records that a thread holds the token, or is sent to take it.
    pub(super) fn claim(&self) {
        self.claims.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that the holder of the token ran the stream.
    pub(super) fn ran(&self) {
        self.add(POLLS);
    }

    /// Records that the holder of the token polled, and that a poll may run the front job.
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

    /// Ends a claim, after the token was freed or not obtained.
    pub(super) fn unclaim(&self) {
        // Sequentially consistent, like the dispatcher's read of `claims` before it sleeps.
        self.claims.fetch_sub(1, Ordering::SeqCst);
    }
}

//! Those who wait for jobs of a stream that another thread runs.
//!
//! Two things end such a wait: the job is done, or the token is free. A waiter (1) reads `done`,
//! (2) lowers `wake_at` to its target, (3) tries the token, (4) looks at `completed`, and then
//! sleeps unless `done` differs from (1). A runner, after it advanced `completed` or freed the
//! token, reads `wake_at`; if its number is reached, or the token was freed, it resets `wake_at`
//! and rings `done`.
//!
//! All of these are sequentially consistent (the token by the fences around it). If the runner's
//! read of `wake_at` comes before (2), then (3) and (4) see what it did. If it comes after, it
//! rings; and the ring comes after (1), so the waiter does not sleep over it. A reset that wipes
//! out the target of a waiter that is not yet due comes with a ring after that waiter's (1): it
//! wakes and puts its target back. `tests/loom.rs` walks the interleavings.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::Bell;

/// The sleepers of one stream.
#[derive(Debug)]
pub(crate) struct Waiters {
    done: Bell,
    /// The smallest number that someone waits for.
    wake_at: AtomicU64,
}

impl Waiters {
    /// Nobody waits.
    pub(crate) fn new() -> Self {
        Self {
            done: Bell::default(),
            wake_at: AtomicU64::new(u64::MAX),
        }
    }

    /// Says that the caller waits for `target`. It must try the token and look at `completed` after
    /// this, and may then sleep on [`Waiters::bell`] with what this returns.
    pub(crate) fn announce(&self, target: u64) -> u32 {
        let seen = self.done.value();
        self.wake_at.fetch_min(target, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        seen
    }

    /// Rings when a job that someone waits for is done, or the token is free.
    pub(crate) fn bell(&self) -> &Bell {
        &self.done
    }

    /// Job `sequence` is done, and `completed` says so.
    pub(crate) fn finished(&self, sequence: u64) {
        super::bell::in_loom();
        if sequence >= self.wake_at.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// The token was freed.
    pub(crate) fn released(&self) {
        fence(Ordering::SeqCst);
        if self.wake_at.load(Ordering::SeqCst) != u64::MAX {
            self.wake();
        }
    }

    fn wake(&self) {
        self.wake_at.store(u64::MAX, Ordering::SeqCst);
        self.done.ring();
    }
}

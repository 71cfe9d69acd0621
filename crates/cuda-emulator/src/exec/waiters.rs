//! The threads that wait for jobs of a stream that another thread runs.
//!
//! Such a wait ends when the job is done or the token is free. A waiter (1) reads `done`,
//! (2) lowers `wake_at` to its target, (3) tries the token, (4) looks at `completed`, and then
//! sleeps unless `done` differs from (1). A runner, after it advanced `completed` or freed the
//! token, reads `wake_at`; if its number is reached, or the token was freed, it resets `wake_at`
//! and rings `done`.
//!
//! All of these are sequentially consistent (the token by the fences around it). If the runner's
//! read of `wake_at` comes before (2), then (3) and (4) see what it did. If it comes after, it
//! rings; and the ring comes after (1), so the waiter does not sleep over it. A reset that wipes
//! out the target of a waiter that is not yet due is followed by a ring after that waiter's (1), so
//! that waiter wakes and puts its target back. `tests/loom.rs` walks the interleavings.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::Bell;

/// The sleepers of one stream.
#[derive(Debug)]
pub(crate) struct Waiters {
    done: Bell,
    /// The smallest job number that a thread waits for; `u64::MAX` if none does.
    wake_at: AtomicU64,
}

impl Waiters {
    /// Creates an empty set of waiters.
    pub(crate) fn new() -> Self {
        Self {
            done: Bell::default(),
            wake_at: AtomicU64::new(u64::MAX),
        }
    }

    /// Announces that the caller waits for `target`. The caller must then try the token and look at
    /// `completed`, and may then sleep on [`Waiters::bell`] with the returned value.
    pub(crate) fn announce(&self, target: u64) -> u32 {
        let seen = self.done.value();
        self.wake_at.fetch_min(target, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        seen
    }

    /// Returns the bell that rings when a job that a thread waits for is done, or the token is
    /// free.
    pub(crate) fn bell(&self) -> &Bell {
        &self.done
    }

    /// Wakes the waiters if one waits for a job up to `sequence`. Call after `completed` was set to
    /// `sequence`.
    pub(crate) fn finished(&self, sequence: u64) {
        super::bell::in_loom();
        if sequence >= self.wake_at.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Wakes all waiters. Call after the token was freed.
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

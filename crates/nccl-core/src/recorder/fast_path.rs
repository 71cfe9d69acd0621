//! The calls that need not be reported to the watchdog, and how a stream is added to that list and removed.
//!
//! ```text
//! a call                                        the watchdog
//!   is recorded (release)                         checks: nothing is pending on the stream
//!   is the stream listed?                         takes it off the list
//!     yes: nothing else                           waits `LINGER`
//!     no: is reported, under the watchdog's lock  checks again: still nothing is pending, and no call was
//!                                                   reported meanwhile: releases the stream
//! ```
//!
//! If a call found the stream still listed after its removal, the call was recorded before that, and the second check
//! finds it: `LINGER` is so long that every processor has made its stores visible by then. `tests/loom/listing.rs`
//! explores the interleavings.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A stream whose calls need not be reported to the watchdog. Read by every call, written rarely.
#[derive(Default)]
pub(crate) struct FastPathFilter {
    /// The address of the listed stream, which the watchdog keeps alive; 0 for none.
    stream: AtomicUsize,
    /// Covers calls before this time, in nanoseconds since [`origin`](crate::recorder::origin).
    until: AtomicU64,
    /// Covers calls with at least this timeout, as [`timeout_code`](super::track::timeout_code()) encodes it.
    timeout: AtomicU64,
}

impl FastPathFilter {
    /// Whether a call on this stream, at this time, with this timeout, need not be reported to the watchdog. To be
    /// called after the call was recorded.
    #[inline]
    pub(crate) fn covers(&self, stream: usize, time: u64, timeout: u64) -> bool {
        self.stream.load(Ordering::Relaxed) == stream
            && time < self.until.load(Ordering::Relaxed)
            && timeout >= self.timeout.load(Ordering::Relaxed)
    }

    /// Whether any stream is listed.
    pub(crate) fn is_listed(&self) -> bool {
        self.stream.load(Ordering::Relaxed) != 0
    }

    /// The shortest timeout of a covered call.
    pub(crate) fn timeout(&self) -> u64 {
        self.timeout.load(Ordering::Relaxed)
    }

    /// Sets the shortest timeout of a covered call anew. The caller holds the watchdog's lock, here and in the methods below.
    pub(crate) fn reset_timeout(&self, timeout: u64) {
        self.timeout.store(timeout, Ordering::Relaxed);
    }

    /// Lists a stream that the watchdog keeps alive.
    pub(crate) fn list(&self, stream: usize, until: u64, timeout: u64) {
        self.until.store(until, Ordering::Relaxed);
        self.timeout.fetch_min(timeout, Ordering::Relaxed);
        self.stream.store(stream, Ordering::Relaxed);
    }

    /// Makes the next call report to the watchdog, whatever its stream.
    pub(crate) fn expire(&self) {
        self.until.store(0, Ordering::Relaxed);
    }

    /// Takes `stream` off the list, if it is the one listed.
    pub(crate) fn unlist(&self, stream: usize) {
        let _ = self
            .stream
            .compare_exchange(stream, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Empties the list.
    pub(crate) fn clear(&self) {
        self.stream.store(0, Ordering::Relaxed);
    }
}

//! Which calls the watchdog does not have to be told of, and how a stream comes onto that list and off it.
//!
//! ```text
//! a call                                        the watchdog
//!   is written down (release)                     looks: nothing is pending on the stream
//!   is the stream listed?                         takes it off the list
//!     yes: nothing else                           ... lingers ...
//!     no: tells the watchdog, under its lock      looks again: still nothing, and it came to nobody's lock
//!                                                   lets go of the stream
//! ```
//!
//! A call that found the stream listed, although it is not any more, was written down before that, and the second
//! look finds it: the watchdog lingers so long that every processor has made its stores visible by then.
//! `tests/loom/listing.rs` walks through the interleavings.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A stream and calls on it of which the watchdog does not have to be told. Read by every call, written seldom.
#[derive(Default)]
pub(crate) struct Usual {
    /// The address of the stream, which the watchdog keeps; 0 for none.
    stream: AtomicUsize,
    /// Calls before this, in nanoseconds since [`Origin`](super::track).
    until: AtomicU64,
    /// Those with at least this limit, as [`limit_word`](super::track) writes it.
    limit: AtomicU64,
}

impl Usual {
    /// Whether the watchdog does not have to be told of a call on this stream, at this time, with this limit. To be
    /// asked after the call was written down.
    #[inline]
    pub(crate) fn covers(&self, stream: usize, time: u64, limit: u64) -> bool {
        self.stream.load(Ordering::Relaxed) == stream
            && time < self.until.load(Ordering::Relaxed)
            && limit >= self.limit.load(Ordering::Relaxed)
    }

    /// Whether any stream is listed.
    pub(crate) fn is_listed(&self) -> bool {
        self.stream.load(Ordering::Relaxed) != 0
    }

    /// The shortest limit that is reckoned with.
    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// From now on, it is this limit. Of whoever has the watchdog's lock, as all that follows.
    pub(crate) fn start(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Lists a stream that the watchdog keeps.
    pub(crate) fn list(&self, stream: usize, until: u64, limit: u64) {
        self.until.store(until, Ordering::Relaxed);
        self.limit.fetch_min(limit, Ordering::Relaxed);
        self.stream.store(stream, Ordering::Relaxed);
    }

    /// The next call is unusual, whatever its stream.
    pub(crate) fn expire(&self) {
        self.until.store(0, Ordering::Relaxed);
    }

    /// Takes it off the list, if it is the one.
    pub(crate) fn unlist(&self, stream: usize) {
        let _ = self
            .stream
            .compare_exchange(stream, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Nothing is listed.
    pub(crate) fn clear(&self) {
        self.stream.store(0, Ordering::Relaxed);
    }
}

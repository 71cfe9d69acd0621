//! The entries of a stream's queue, and the batch that its runner takes from the queue.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::host_call::HostCall;
use super::stream::Stream;
use super::work::Work;

/// An entry of a stream's queue. Entries that wait or block are variants of their own: only the
/// runner knows whether it may wait.
pub(super) enum Job {
    Work(Box<dyn Work>),
    /// The end of an earlier job of another stream.
    Wait {
        stream: Arc<Stream>,
        sequence: u64,
    },
    Host(HostCall),
    /// Stores the time, in nanoseconds of the monotonic clock.
    Stamp(Arc<AtomicU64>),
}

impl Job {
    /// Stores the present time, for [`Job::Stamp`].
    pub(super) fn stamp(time: &AtomicU64) {
        time.store(monotonic_nanos(), Ordering::Release);
    }
}

/// Returns the monotonic clock in nanoseconds; never 0, which stands for "not yet".
pub(super) fn monotonic_nanos() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a timespec to write to, and the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    (now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64).max(1)
}

/// The batch of the holder of the token. The first job is in progress.
#[derive(Default)]
pub(crate) struct Front {
    pub(super) batch: VecDeque<Job>,
}

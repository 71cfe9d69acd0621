//! A job on a stream, as a state machine that never blocks.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::{Bell, Stream, local_spinners};

/// What one call of [`Work::step`] came to.
pub enum Step {
    /// Finished; the next job of the stream may start.
    Done,
    /// Did something; call again.
    Progress,
    /// Nothing to do until [`Work::bell`] rings. `seen` is the bell's value read BEFORE the
    /// conditions were checked.
    Blocked {
        /// The bell's value then.
        seen: u32,
    },
}

/// How long a runner leaves a blocked job alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// Until its bell rings.
    UntilRung,
    /// As long as this, because nothing rings when what it waits for happens: memory that another process writes, a time.
    /// Zero only gives the core away.
    For(Duration),
}

/// A job on a stream. It is dropped unfinished when its context fails or is destroyed.
pub trait Work: Send {
    /// One bounded step (`budget` in bytes to copy, roughly); never blocks.
    fn step(&mut self, budget: usize) -> Step;

    /// Where to sleep when blocked. Valid while the job is alive. Only asked after
    /// [`Step::Blocked`].
    fn bell(&self) -> &Bell {
        static NEVER: Bell = Bell::new();
        &NEVER
    }

    /// How its runner waits when it is blocked.
    fn pause(&self) -> Pause {
        Pause::UntilRung
    }

    /// For messages: "AllReduce on comm …".
    fn describe(&self) -> String;

    /// How many executors spin just now among those who wait for one another: in the segment of a
    /// communicator, or of this process.
    fn spinners(&self) -> &AtomicU32 {
        local_spinners()
    }
}

/// A function of the caller's, with its argument.
#[derive(Clone, Copy)]
pub struct HostCall {
    /// The function.
    pub function: unsafe extern "C" fn(*mut c_void),
    /// What it is given.
    pub argument: *mut c_void,
}

// SAFETY: whoever gave the function to a stream promised that the driver may call it on any thread.
unsafe impl Send for HostCall {}
// SAFETY: as above; two numbers that are only read.
unsafe impl Sync for HostCall {}

/// An entry of a stream's queue. The entries that have to wait or block are kinds of their own:
/// only the runner knows how far it may go for them.
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
    pub(super) fn stamp(time: &AtomicU64) {
        time.store(monotonic_nanos(), Ordering::Release);
    }
}

/// The monotonic clock; never 0, which stands for "not yet".
pub(super) fn monotonic_nanos() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a timespec to write to, and the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    (now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64).max(1)
}

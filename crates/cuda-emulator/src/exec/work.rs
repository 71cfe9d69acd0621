//! A job on a stream, as a state machine that never blocks.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use super::bell::Bell;
use super::spin::local_spinners;

/// The result of one call of [`Work::step`].
pub enum Step {
    /// Finished; the next job of the stream may start.
    Done,
    /// The job moved; call again.
    Progress,
    /// Nothing to do until [`Work::bell`] rings. `seen` is the bell's value read BEFORE the
    /// conditions were checked.
    Blocked {
        /// The bell's value at that time.
        seen: u32,
    },
}

/// How long a runner leaves a blocked job alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// Until its bell rings.
    UntilRung,
    /// For this long, because the job's condition rings no bell: memory that another process writes, a time.
    /// Zero only yields the core.
    For(Duration),
}

/// A job on a stream. It is dropped unfinished when its context fails or is destroyed.
pub trait Work: Send {
    /// Runs one bounded step (`budget` in bytes to copy, roughly); never blocks.
    fn step(&mut self, budget: usize) -> Step;

    /// Returns the bell to sleep on when blocked, valid while the job is alive. Called only after
    /// [`Step::Blocked`].
    fn bell(&self) -> &Bell {
        static NEVER: Bell = Bell::new();
        &NEVER
    }

    /// Returns how the runner waits while the job is blocked.
    fn pause(&self) -> Pause {
        Pause::UntilRung
    }

    /// Describes the job for messages: "AllReduce on comm …".
    fn describe(&self) -> String;

    /// Returns the count of executors that spin now, among the executors that wait for one another: those
    /// of a communicator's segment, or of this process.
    fn spinners(&self) -> &AtomicU32 {
        local_spinners()
    }
}

//! A job on a stream, as a state machine that never blocks.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use super::bell::Bell;
use super::spin::local_spinners;

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

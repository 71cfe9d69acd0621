//! How much this process has done with NCCL, and how it stands: plain numbers, for whoever asks.
//!
//! [`stats()`](crate::stats()) reads all of them, from any thread, and holds nobody up. What is on the way of an
//! operation is counted without an atomic addition, a lock, a clock, or an allocation; `docs/results/overhead.md`
//! has what it costs.
//!
//! - `tally`: what a communicator counts while it works;
//! - `registry`: whose numbers there are, also of those that ended;
//! - `process`: what is counted for the process; `durations`: how long things took;
//! - `read`: what is read.

mod durations;
mod process;
mod read;
mod registry;
mod tally;

pub use durations::Durations;
pub(crate) use process::{
    ABORT, DETECT, FREED, INIT, LEAKED, LEAKED_COMMUNICATORS, RECOVER, STRAGGLERS, enqueue, faults,
};
pub use read::{
    ArrivalSkew, Calls, CommunicatorStats, Faults, LibraryInfo, OperationStats, RanksByState,
    Stats, WorldStats, stats,
};
#[cfg(feature = "metrics")]
pub(crate) use registry::NAMES;
pub(crate) use registry::{Counting, arrival_skew, took};
pub(crate) use tally::{Tally, Volume};

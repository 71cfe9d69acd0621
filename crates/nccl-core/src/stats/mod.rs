//! What a process has done with NCCL, counted where it happens.
//!
//! What is on the way of an operation is counted without an atomic addition, a lock, a clock, or an allocation;
//! `docs/results/overhead.md` has what it costs.
//!
//! - `tally`: what a communicator counts while it works;
//! - `registry`: whose numbers there are, also of those that ended;
//! - `process`: what is counted for the process; `durations`: how long things took.

pub mod durations;
pub mod process;
pub mod registry;
pub mod tally;

pub use durations::Durations;
#[doc(hidden)]
pub use process::ABORT;
#[doc(hidden)]
pub use process::DETECT;
#[doc(hidden)]
pub use process::FREED;
#[doc(hidden)]
pub use process::INIT;
#[doc(hidden)]
pub use process::LEAKED;
#[doc(hidden)]
pub use process::LEAKED_COMMUNICATORS;
#[doc(hidden)]
pub use process::RECOVER;
#[doc(hidden)]
pub use process::STRAGGLERS;
#[doc(hidden)]
pub use process::enqueue;
#[doc(hidden)]
pub use process::faults;
#[doc(hidden)]
pub use registry::arrival_skew;
pub(crate) use registry::{Counting, took};
pub(crate) use tally::{Tally, Volume};

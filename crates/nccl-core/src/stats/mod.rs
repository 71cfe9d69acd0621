//! Statistics of how a process uses NCCL, counted where the events occur.
//!
//! Counters on the path of an operation use no atomic addition, lock, clock, or allocation;
//! `docs/results/overhead.md` has their cost.
//!
//! - `tally`: the counters of a communicator;
//! - `registry`: the counters of all communicators, also of those that ended;
//! - `process`: the counters of the process; `durations`: how long things took.

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
pub(crate) use registry::{CounterHandle, took};
pub(crate) use tally::{Tally, Volume};

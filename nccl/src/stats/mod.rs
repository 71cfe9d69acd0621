//! How much this process has done with NCCL, and how it stands: plain numbers, for whoever asks.
//!
//! [`stats()`](crate::stats()) reads all of them, from any thread, and holds nobody up. What is on the way of an
//! operation is counted without an atomic addition, a lock, a clock, or an allocation; `docs/results/overhead.md`
//! has what it costs.
//!
//! It is counted in the crate `nccl-core`, where it happens; `read` is what is read.

mod read;
mod worlds;

pub use nccl_core::stats::Durations;
#[cfg(feature = "metrics")]
pub(crate) use nccl_core::stats::registry::NAMES;
#[cfg(feature = "world")]
pub(crate) use nccl_core::stats::{DETECT, STRAGGLERS, arrival_skew};
pub use read::{
    ArrivalSkew, Calls, CommunicatorStats, Faults, LibraryInfo, OperationStats, Stats, stats,
};
pub use worlds::{RanksByState, WorldStats};

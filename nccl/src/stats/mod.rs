//! Statistics of this process: how much it has done with NCCL, and its current state, as plain numbers.
//!
//! [`stats()`](crate::stats()) reads all of them, from any thread, and blocks no other thread. Events on the path of an
//! operation are counted without an atomic addition, a lock, a clock, or an allocation; `docs/results/overhead.md`
//! has what that costs.
//!
//! The crate `nccl-core` counts, where the events happen; `read` is what programs read.

pub(crate) mod read;
mod worlds;

pub use nccl_core::stats::Durations;
#[cfg(feature = "metrics")]
pub(crate) use nccl_core::stats::registry::NAMES;
#[cfg(feature = "world")]
pub(crate) use nccl_core::stats::{DETECT, STRAGGLERS, arrival_skew};
pub use read::{ArrivalSkew, CommunicatorStats, Faults, LibraryInfo, OperationStats, Stats};
pub use worlds::{RanksByState, WorldStats};

//! Messages between ranks and the coordinator about ranks that have not entered an operation in which others wait.
//!
//! ```text
//! a rank that waits          coordinator                        every other member
//!   asks for a query ─────▶    opens a query ─────asks───────▶
//!                              (once for an operation)            answers at once, and once more when it enters,
//!                              ◀───────────────────────────────   if it has not
//!                 all have answered, or its timeout is over
//!          ◀────────────── reports to all members, and observers ──▶ which ranks are late, by how much, in which phase
//! ```
//!
//! The messages carry ages, never clock times: each rank states how long ago it entered, and the coordinator subtracts
//! that from the time at which it receives the answer, less half of the round trip. The clocks may therefore differ
//! arbitrarily; the results are accurate to about the latency of a message.
//!
//! `service/straggler_queries.rs` is the coordinator's part, `supervision/stragglers.rs` the part of a rank.

use std::time::Duration;

use nccl_base::wire::clean;
use serde::{Deserialize, Serialize};

use crate::operation::OperationKind;

/// The operation in question, as described by the rank whose request opened the query.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct QueriedOperation {
    /// The key of the communicator, the same on all ranks.
    pub key: String,
    /// Its name.
    pub name: String,
    /// The index of the operation among the collectives of the communicator, from 1. It is the same on all ranks,
    /// regardless of the point-to-point messages that they have exchanged.
    pub collective_index: u64,
    #[serde(with = "kind")]
    pub kind: OperationKind,
    pub sequence: u64,
}

/// A request for a straggler query, from a rank that waits in an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct StragglerQueryRequest {
    pub subject: QueriedOperation,
    /// The ranks of the communicator in the world; empty for all ranks in order.
    pub members: Vec<usize>,
    /// How long ago the rank entered.
    #[serde(deserialize_with = "clean")]
    pub since: Duration,
    /// Whether the query only measures how far apart the ranks entered.
    pub is_sample: bool,
}

/// Whether a rank has entered an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct EntryReport {
    pub key: String,
    pub collective_index: u64,
    /// How long ago it entered.
    #[serde(deserialize_with = "clean")]
    pub entered: Option<Duration>,
    /// Its last operation, if it has not entered.
    #[serde(deserialize_with = "clean")]
    pub last: String,
}

/// The ranks that have not entered an operation, or have entered it late.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct StragglerReport {
    pub subject: QueriedOperation,
    /// The number of ranks of the communicator.
    pub ranks: usize,
    pub late: Vec<LateRank>,
    /// The number of further late ranks, which are not listed.
    pub more: usize,
    /// The rank of the world that logs the warning for all ranks: a waiting rank, which is therefore known to answer.
    pub reporter: usize,
}

/// A late rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct LateRank {
    /// Its rank in the world.
    pub rank: usize,
    /// Its rank in the communicator.
    pub communicator_rank: usize,
    #[serde(deserialize_with = "clean")]
    pub host: String,
    pub pid: u32,
    /// How far it is behind the first rank that entered.
    #[serde(deserialize_with = "clean")]
    pub behind: Duration,
    /// Whether it has entered by now.
    pub has_entered: bool,
    /// Whether its process answers.
    pub answers: bool,
    /// Its phase; empty if it has none.
    #[serde(deserialize_with = "clean")]
    pub phase: String,
    /// Its last operation on the communicator, or that there is none; empty if unknown.
    #[serde(deserialize_with = "clean")]
    pub last: String,
}

/// Encodes a kind as its index in [`OperationKind::ALL`].
mod kind {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::OperationKind;

    pub(super) fn serialize<S: Serializer>(kind: &OperationKind, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u8(*kind as u8)
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<OperationKind, D::Error> {
        let known = OperationKind::ALL.get(usize::from(u8::deserialize(from)?));
        known
            .copied()
            .ok_or_else(|| D::Error::custom("no kind of operation"))
    }
}

//! Who has not entered an operation in which others wait: what ranks and coordinator say about that.
//!
//! ```text
//! a rank that waits          coordinator                        every other member
//!   suspects somebody ────▶    opens an inquiry ───inquires──▶
//!                              (once for an operation)            answers at once, and once more when it enters,
//!                              ◀───────────────────────────────   if it has not
//!                 all have answered, or its patience is over
//!          ◀────────────────── tells all members, and observers ──▶ who is late, by how much, in which phase
//! ```
//!
//! What travels are ages, never times of a clock: each rank says how long ago it entered, and the coordinator
//! takes that from the moment at which it hears it, less half of the time that the answer took. So clocks may
//! differ as they like, and what is said is right to about the time of a message.
//!
//! `service/inquiries.rs` is the coordinator's part, `supervision/stragglers.rs` that of a rank.

use std::time::Duration;

use nccl_base::wire::clean;
use serde::{Deserialize, Serialize};

use crate::operation::OperationKind;

/// Which operation is meant, as who asked first calls it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct Subject {
    /// What all ranks call the communicator.
    pub key: String,
    /// Its name.
    pub name: String,
    /// Its number among the collectives of the communicator, from 1: the same on all ranks, whatever messages
    /// they have exchanged besides.
    pub turn: u64,
    #[serde(with = "kind")]
    pub kind: OperationKind,
    pub sequence: u64,
}

/// Somebody waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct Suspicion {
    pub subject: Subject,
    /// The ranks of the communicator in the world; all in order, if there are none.
    pub members: Vec<usize>,
    /// How long ago it entered.
    #[serde(deserialize_with = "clean")]
    pub since: Duration,
    /// Nobody is suspected: only how far apart the ranks came is asked for.
    pub is_sample: bool,
}

/// How it stands with a rank and an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct Attendance {
    pub key: String,
    pub turn: u64,
    /// How long ago it entered.
    #[serde(deserialize_with = "clean")]
    pub entered: Option<Duration>,
    /// What it did last, if it has not.
    #[serde(deserialize_with = "clean")]
    pub last: String,
}

/// Those who have not entered an operation, or have at last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct Lateness {
    pub subject: Subject,
    /// Of the communicator.
    pub ranks: usize,
    pub late: Vec<Latecomer>,
    /// How many more there are, that are not listed.
    pub more: usize,
    /// The rank of the world that warns of it, for all: one that waits, and so is known to go on.
    pub teller: usize,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct Latecomer {
    /// In the world.
    pub rank: usize,
    /// In the communicator.
    pub place: usize,
    #[serde(deserialize_with = "clean")]
    pub host: String,
    pub pid: u32,
    /// Behind the first that entered.
    #[serde(deserialize_with = "clean")]
    pub behind: Duration,
    /// Whether it has entered by now.
    pub has_entered: bool,
    /// Whether its process answers.
    pub answers: bool,
    /// What it said that it does; empty for nothing.
    #[serde(deserialize_with = "clean")]
    pub phase: String,
    /// What it did last on the communicator, or that there is none; empty where it has not said.
    #[serde(deserialize_with = "clean")]
    pub last: String,
}

/// A kind by its place among all.
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

//! The parts of requests and answers: rounds, and why a request failed.

use std::sync::Arc;
use std::time::Duration;

use nccl_base::wire::clean;
use serde::{Deserialize, Deserializer, Serialize};

use super::phase::Phase;
use crate::departure::{Departure, Reason, UnfinishedExchange};

/// The parts of all ranks of a round, in order.
pub(super) type Parts = Arc<Vec<Vec<u8>>>;

/// A round: its topic, its number and its ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Round {
    pub(super) topic: String,
    /// The number of earlier rounds of this topic with these ranks.
    pub(super) number: u64,
    /// The ranks, in the order of their parts; `None` for all.
    #[serde(deserialize_with = "some")]
    pub(super) members: Option<Arc<[usize]>>,
}

/// Reads an empty list as all ranks.
fn some<'d, D: Deserializer<'d>>(from: D) -> Result<Option<Arc<[usize]>>, D::Error> {
    let members = Option::<Arc<[usize]>>::deserialize(from)?;
    Ok(members.filter(|members| !members.is_empty()))
}

/// The beginning of the topics of rounds in which ranks report that they are done with something. Such a round
/// succeeds without ranks that are gone: an ended process is done with everything.
pub(super) const ENDS: &str = "end/";

impl Round {
    /// Whether the round succeeds without ranks that are gone.
    pub(super) fn is_of_ends(&self) -> bool {
        self.topic.starts_with(ENDS)
    }

    /// Whether some of the ranks agree on something without the others, which could form another world.
    pub(super) fn needs_majority(&self) -> bool {
        self.members.is_some() && !self.is_of_ends()
    }
}

/// A rank for which a request waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Missing {
    pub(super) rank: usize,
    /// Its phase, and for how long; `None` when it never joined.
    #[serde(deserialize_with = "clean")]
    pub(super) phase: Option<(Phase, Duration)>,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Incomplete {
    TimedOut {
        missing: Vec<Missing>,
        #[serde(deserialize_with = "clean")]
        waited: Duration,
        /// What else the coordinator has seen: which connections were refused.
        #[serde(deserialize_with = "clean")]
        remarks: Vec<String>,
    },
    Gone {
        rank: usize,
        departure: Departure,
    },
    /// This rank gave a part of the round already.
    Twice,
    /// The parts or values exceed the limit together.
    TooLarge {
        bytes: usize,
    },
    /// Another rank gave the round up.
    GivenUp {
        rank: usize,
        reason: Reason,
    },
    /// Another rank uses the topic with other ranks.
    OtherMembers,
    /// No rank set the key in time.
    NoKey {
        #[serde(deserialize_with = "clean")]
        waited: Duration,
    },
    /// This rank itself cancelled the request.
    Interrupted,
    /// All ranks of the round have given their parts, but are not known to be on the side that goes on.
    NoMajority {
        #[serde(deserialize_with = "clean")]
        waited: Duration,
    },
}

impl Incomplete {
    /// The part of an error that other code acts on.
    pub(super) fn unfinished(&self) -> Option<UnfinishedExchange> {
        match self {
            Self::Gone { rank, departure } => Some(UnfinishedExchange::Gone {
                rank: *rank,
                departure: departure.clone(),
            }),
            Self::GivenUp { rank, reason } => Some(UnfinishedExchange::GivenUp {
                rank: *rank,
                reason: reason.clone(),
            }),
            Self::TimedOut {
                missing, waited, ..
            } => Some(UnfinishedExchange::Late {
                missing: missing.iter().map(|missing| missing.rank).collect(),
                phase: missing.first().and_then(|missing| {
                    let (phase, age) = missing.phase.as_ref()?;
                    Some((phase.name().to_owned(), *age))
                }),
                waited: *waited,
            }),
            Self::Twice
            | Self::TooLarge { .. }
            | Self::OtherMembers
            | Self::NoKey { .. }
            | Self::Interrupted
            | Self::NoMajority { .. } => None,
        }
    }
}

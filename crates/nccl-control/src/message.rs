//! What requests and answers are made of: rounds, and why something did not end well.

use std::sync::Arc;
use std::time::Duration;

use nccl_base::wire::clean;
use serde::{Deserialize, Deserializer, Serialize};

use super::phase::Phase;
use crate::departure::{Departure, Reason, Unfinished};

/// The parts of all ranks of a round, in order.
pub(super) type Parts = Arc<Vec<Vec<u8>>>;

/// Which ranks a round is for, under which name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Round {
    pub(super) topic: String,
    /// The how-manieth use of the topic.
    pub(super) number: u64,
    /// All ranks, or some of them, in the order of their parts.
    #[serde(deserialize_with = "some")]
    pub(super) members: Option<Arc<[usize]>>,
}

/// None are all.
fn some<'d, D: Deserializer<'d>>(from: D) -> Result<Option<Arc<[usize]>>, D::Error> {
    let members = Option::<Arc<[usize]>>::deserialize(from)?;
    Ok(members.filter(|members| !members.is_empty()))
}

/// How the topics begin of rounds in which ranks tell that they are done with something. Such a round
/// ends well without those that are gone: a process that ended is done with everything.
pub(super) const ENDS: &str = "end/";

impl Round {
    /// Whether it does without ranks that are gone.
    pub(super) fn is_of_ends(&self) -> bool {
        self.topic.starts_with(ENDS)
    }

    /// Whether some of the ranks agree on something without the others, which could be another world.
    pub(super) fn needs_majority(&self) -> bool {
        self.members.is_some() && !self.is_of_ends()
    }
}

/// A rank that is waited for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Missing {
    pub(super) rank: usize,
    /// What it does, and for how long; `None` when it never came at all.
    #[serde(deserialize_with = "clean")]
    pub(super) phase: Option<(Phase, Duration)>,
}

/// Why a request did not end well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Incomplete {
    TimedOut {
        missing: Vec<Missing>,
        #[serde(deserialize_with = "clean")]
        waited: Duration,
        /// What else the coordinator has seen: who was turned away.
        #[serde(deserialize_with = "clean")]
        remarks: Vec<String>,
    },
    Gone {
        rank: usize,
        departure: Departure,
    },
    /// This rank gave a part of the round already.
    Twice,
    /// The parts or values have more than the limit together.
    TooLarge {
        bytes: usize,
    },
    /// Another rank gave the round up.
    GivenUp {
        rank: usize,
        reason: Reason,
    },
    /// The topic's round is of other ranks on another rank.
    OtherMembers,
    /// Nobody set the key in time.
    NoKey {
        #[serde(deserialize_with = "clean")]
        waited: Duration,
    },
    /// This rank itself gave the request up.
    Interrupted,
    /// All of these ranks have come, and are not known to be on the side that goes on.
    NoMajority {
        #[serde(deserialize_with = "clean")]
        waited: Duration,
    },
}

impl Incomplete {
    /// What an error says of it that others act on.
    pub(super) fn unfinished(&self) -> Option<Unfinished> {
        match self {
            Self::Gone { rank, departure } => Some(Unfinished::Gone {
                rank: *rank,
                departure: departure.clone(),
            }),
            Self::GivenUp { rank, reason } => Some(Unfinished::GivenUp {
                rank: *rank,
                reason: reason.clone(),
            }),
            Self::TimedOut {
                missing, waited, ..
            } => Some(Unfinished::Late {
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

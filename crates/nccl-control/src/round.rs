//! The parts of requests and answers: the rounds of exchanges, and why a request failed.

use std::sync::Arc;
use std::time::Duration;

use nccl_base::wire::clean;
use serde::{Deserialize, Deserializer, Serialize};

use super::phase::Phase;
use crate::departure::{Departure, Reason, UnfinishedExchange};

/// The parts of all ranks of a round, in order.
pub(super) type Parts = Arc<Vec<Vec<u8>>>;

/// One exchange of parts between ranks: its topic, its number and its ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Round {
    pub(super) topic: String,
    /// The number of earlier exchanges of this topic between these ranks.
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

/// The prefix of the topics of rounds in which ranks report that they are done with something. Such a round succeeds
/// without departed ranks, because an ended process is done with everything.
pub(super) const END_TOPIC: &str = "end/";

impl Round {
    /// Whether the round succeeds without departed ranks.
    pub(super) fn is_of_ends(&self) -> bool {
        self.topic.starts_with(END_TOPIC)
    }

    /// Whether only some of the ranks take part, so that the others could form another world without them.
    pub(super) fn needs_majority(&self) -> bool {
        self.members.is_some() && !self.is_of_ends()
    }
}

/// A rank that a request waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Missing {
    pub(super) rank: usize,
    /// Its phase, and for how long; `None` if it has never joined.
    #[serde(deserialize_with = "clean")]
    pub(super) phase: Option<(Phase, Duration)>,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum RequestError {
    TimedOut {
        missing: Vec<Missing>,
        #[serde(deserialize_with = "clean")]
        waited: Duration,
        /// The connections that the coordinator has refused.
        #[serde(deserialize_with = "clean")]
        notes: Vec<String>,
    },
    Departed {
        rank: usize,
        departure: Departure,
    },
    /// This rank has already contributed a part to the round.
    Twice,
    /// The parts or values together exceed the limit.
    TooLarge {
        bytes: usize,
    },
    /// Another rank cancelled the round.
    GivenUp {
        rank: usize,
        reason: Reason,
    },
    /// Another rank uses the topic with a different set of ranks.
    OtherMembers,
    /// No rank set the key in time.
    NoKey {
        #[serde(deserialize_with = "clean")]
        waited: Duration,
    },
    /// No rank set these keys in time.
    NoKeys {
        #[serde(deserialize_with = "clean")]
        missing: Vec<String>,
        #[serde(deserialize_with = "clean")]
        waited: Duration,
    },
    /// The value of the key, to which an amount was to be added, is not a number.
    NotANumber {
        #[serde(deserialize_with = "clean")]
        found: String,
    },
    /// The sum has more than 64 bits.
    SumOverflows {
        counter: i64,
        amount: i64,
    },
    /// The store was on an earlier coordinator of this generation, and is lost.
    StoreLost,
    /// This rank coordinated before, and messages of channels that passed through it may be lost.
    ChannelsLost {
        rank: usize,
    },
    /// The coordinator does not serve the request's generation: it coordinates a later one, and the coordinator of that
    /// generation is gone, or many generations have followed.
    OldGeneration,
    /// The request was carried out, by an earlier coordinator or before the connection to this one was lost, and its
    /// outcome is not available any more.
    OutcomeLost,
    /// This rank itself cancelled the request.
    Interrupted,
    /// All ranks of the round have contributed their parts, but the ranks are not known to be on the side that
    /// continues.
    NoMajority {
        #[serde(deserialize_with = "clean")]
        waited: Duration,
    },
}

impl RequestError {
    /// Whether this is a refusal of the request, which does not affect its round.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Self::Twice | Self::OtherMembers | Self::OldGeneration)
    }

    /// Returns the part of the error that other code acts on.
    pub(super) fn unfinished(&self) -> Option<UnfinishedExchange> {
        match self {
            Self::Departed { rank, departure } => Some(UnfinishedExchange::Departed {
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
            | Self::NoKeys { .. }
            | Self::NotANumber { .. }
            | Self::SumOverflows { .. }
            | Self::StoreLost
            | Self::OldGeneration
            | Self::OutcomeLost
            | Self::Interrupted
            | Self::ChannelsLost { .. }
            | Self::NoMajority { .. } => None,
        }
    }
}

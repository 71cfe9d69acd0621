//! How an unfinished exchange ended.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Departure;
use crate::wire::clean;

/// Why a rank gave up an exchange that it had requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub enum Reason {
    /// The rank's program gave the abort signal.
    Aborted,
    /// The rank's part is longer than the limit.
    TooLarge,
    /// The coordinator did not answer.
    Unanswered,
    /// Another reason, in the rank's own words.
    Text(#[serde(deserialize_with = "clean")] String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Aborted => "its abort signal was given",
            Self::TooLarge => "its part is too large",
            Self::Unanswered => "it got no answer",
            Self::Text(text) => text,
        })
    }
}

/// How an exchange between ranks ended before this rank had its result, the same on all ranks. The text is in the
/// [`Error`](crate::error::Error) that carries this value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum UnfinishedExchange {
    /// A rank has departed, or has failed.
    Departed { rank: usize, departure: Departure },
    /// A rank gave the exchange up.
    GivenUp { rank: usize, reason: Reason },
    /// Some ranks did not arrive in time: `missing` has all of them; `phase` is the phase that the first of them
    /// reported.
    Late {
        missing: Vec<usize>,
        phase: Option<(String, Duration)>,
        waited: Duration,
    },
    /// The coordinator does not answer.
    Unanswered { by: usize },
    /// This rank and the ranks `from` cannot reach each other.
    CutOff { from: Vec<usize>, why: String },
}

/// The outcome of a gather among the members of a communicator.
#[derive(Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum GatherOutcome {
    /// The parts of all members; the part of a rank that has departed is empty.
    All(Vec<Vec<u8>>),
    /// The ranks that have not reported.
    Missing(Vec<usize>),
    /// The connection to the others is lost.
    ConnectionLost,
}

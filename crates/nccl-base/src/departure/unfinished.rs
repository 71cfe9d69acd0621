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
    /// Its program gave the abort signal.
    Aborted,
    /// Its part has more bytes than the limit allows.
    TooLarge,
    /// The coordinator did not answer.
    Unanswered,
    /// What the rank lacks, in its words.
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

/// How an exchange between ranks ended before this rank had its result, the same on all ranks: the text is in an
/// [`Error`](crate::error::Error), which carries this value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum UnfinishedExchange {
    /// A rank has departed, or has failed.
    Departed { rank: usize, departure: Departure },
    /// A rank gave the exchange up.
    GivenUp { rank: usize, reason: Reason },
    /// Some ranks did not arrive in time: `missing` has all of them, `phase` what the first does, as it reported.
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

/// Result for the members of a communicator that wait for each other's parts.
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

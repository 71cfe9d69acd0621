//! How an exchange ended that was not finished.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Departure;
use crate::wire::clean;

/// Why a rank gave up what it had asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub enum Reason {
    /// Its program gave the signal for it.
    Aborted,
    /// Its part has more bytes than the limit.
    TooLarge,
    /// The coordinator stood still.
    Unanswered,
    /// What it lacks, in its words.
    Said(#[serde(deserialize_with = "clean")] String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Aborted => "its abort signal was given",
            Self::TooLarge => "its part is too large",
            Self::Unanswered => "it got no answer",
            Self::Said(text) => text,
        })
    }
}

/// How an exchange between ranks ended before this one had what it came for, as all ranks hear it: the words are in an
/// [`Error`](crate::error::Error), which carries this.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Unfinished {
    /// A rank that is gone, or has failed.
    Gone { rank: usize, departure: Departure },
    /// A rank gave it up.
    GivenUp { rank: usize, reason: Reason },
    /// Some did not come in time: the first of them, all, and what the first does, as it says.
    Late {
        missing: Vec<usize>,
        phase: Option<(String, Duration)>,
        waited: Duration,
    },
    /// The coordinator does not answer.
    Unanswered { by: usize },
    /// This rank and those cannot reach each other.
    CutOff { from: Vec<usize>, why: String },
}

/// What members of a communicator came to that wait for each other's parts.
#[derive(Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Ended {
    /// The parts of all members; that of one that is gone is empty.
    All(Vec<Vec<u8>>),
    /// Who has not said that it is done.
    Missing(Vec<usize>),
    /// There is no connection to the others any more.
    Unheard,
}

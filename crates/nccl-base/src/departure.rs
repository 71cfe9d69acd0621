//! How a rank left, and how an exchange ended that was not finished.

use std::fmt;
use std::time::Duration;

/// How the words begin for a connection that was not closed.
#[doc(hidden)]
pub const SILENT: &str = "its connection broke without goodbye";

/// Said of a connection on which one side hears the other, and not the reverse.
#[doc(hidden)]
pub const ONE_WAY: &str = "packets come through one way only";

/// What stands before the words on a rank's last heartbeat.
#[doc(hidden)]
pub const HEARTBEAT: &str = "; its last heartbeat, ";

/// How a rank left.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Departure {
    /// With a goodbye.
    Left,
    /// It said why, with the whole chain of its error.
    Failed(String),
    /// Its connection ended without a goodbye.
    Lost(String),
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Left => f.write_str("it left the world"),
            Self::Failed(chain) => write!(f, "it failed: {chain}"),
            Self::Lost(how) => f.write_str(how),
        }
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
    GivenUp { rank: usize, reason: String },
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

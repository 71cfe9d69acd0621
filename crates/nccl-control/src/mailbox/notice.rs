//! What this rank hears of the others without having asked.

use std::sync::Arc;
use std::time::Duration;

use crate::departure::Departure;
use crate::inquiry::Lateness;

/// Something that another rank announced, or that happened to it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Notice {
    Announced {
        from: usize,
        topic: String,
        bytes: Arc<[u8]>,
    },
    /// A rank left, failed or died. Comes once for each.
    Gone { rank: usize, departure: Departure },
    /// By another rank, to this one alone; in no order with the rest.
    Told {
        from: usize,
        topic: String,
        bytes: Arc<[u8]>,
    },
    /// Whether this rank has entered an operation of a communicator.
    Inquired {
        key: String,
        turn: u64,
        is_sample: bool,
    },
    /// Who has not entered an operation, or has at last.
    Late(Arc<Lateness>),
    /// How far apart the ranks entered one, and who was last.
    Skewed {
        key: String,
        skew: Duration,
        last: usize,
    },
    /// This rank and those can reach each other no more, and nobody can tell which side is at fault.
    CutOff { from: Vec<usize>, why: String },
}

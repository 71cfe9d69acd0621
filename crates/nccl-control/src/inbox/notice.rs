//! Unsolicited messages to this rank about the others.

use std::sync::Arc;
use std::time::Duration;

use crate::departure::Departure;
use crate::straggler::StragglerReport;

/// An announcement from another rank, or an event that concerns another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Notice {
    Announced {
        from: usize,
        topic: String,
        bytes: Arc<[u8]>,
    },
    /// A rank left, failed or died. Arrives once for each rank.
    Departed { rank: usize, departure: Departure },
    /// A message from another rank to this one alone; not ordered with other notices.
    Direct {
        from: usize,
        topic: String,
        bytes: Arc<[u8]>,
    },
    /// Asks whether this rank has entered an operation of a communicator.
    StragglerQuery {
        key: String,
        collective_index: u64,
        is_sample: bool,
    },
    /// The ranks that have not entered an operation, or have entered it late.
    Stragglers(Arc<StragglerReport>),
    /// How far apart the ranks entered an operation, and which rank was last.
    Skewed {
        key: String,
        skew: Duration,
        last: usize,
    },
    /// This rank and the ranks `from` cannot reach each other any more, and which side is at fault is unknown.
    CutOff { from: Vec<usize>, why: String },
}

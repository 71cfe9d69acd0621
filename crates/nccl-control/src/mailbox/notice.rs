//! What this rank hears of the others without having asked.

use std::sync::Arc;
use std::time::Duration;

use nccl_base::wire::bytes;
use serde::{Deserialize, Serialize};

use crate::departure::{Departure, Lost};
use crate::inquiry::Lateness;
use crate::succession::Entry;

/// Something that another rank announced, or that happened to it. What ranks tell a successor of it stands first: a format that
/// counts variants counts none that is skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub enum Notice {
    Announced {
        from: usize,
        topic: String,
        #[serde(with = "bytes")]
        bytes: Arc<[u8]>,
    },
    /// A rank left, failed or died. Comes once for each.
    Gone { rank: usize, departure: Departure },
    /// By another rank, to this one alone; in no order with the rest.
    #[serde(skip)]
    Told {
        from: usize,
        topic: String,
        bytes: Arc<[u8]>,
    },
    /// Whether this rank has entered an operation of a communicator.
    #[serde(skip)]
    Inquired {
        key: String,
        turn: u64,
        is_sample: bool,
    },
    /// Who has not entered an operation, or has at last.
    #[serde(skip)]
    Late(Arc<Lateness>),
    /// How far apart the ranks entered one, and who was last.
    #[serde(skip)]
    Skewed {
        key: String,
        skew: Duration,
        last: usize,
    },
    /// This rank and those can reach each other no more, and nobody can tell which side is at fault.
    #[serde(skip)]
    CutOff { from: Vec<usize>, why: String },
}

impl Entry for Notice {
    fn gone(rank: usize, lost: &Lost) -> Self {
        let departure = Departure::Lost(lost.clone());
        Self::Gone { rank, departure }
    }

    fn departed(&self) -> Option<(usize, bool)> {
        match self {
            Self::Gone { rank, departure } => {
                let lives = matches!(departure, Departure::Lost(lost) if lost.may_live());
                Some((*rank, lives))
            }
            _ => None,
        }
    }
}

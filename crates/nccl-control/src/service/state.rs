//! The state of a service: its ranks and their requests.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::channel::Channels;
use super::outcomes::Outcomes;
use super::round_state::RoundState;
use super::straggler_query::StragglerQuery;
use crate::coordinator_message::{Answer, Push};
use crate::departure::Departure;
use crate::phase::Phase;
use crate::request::NO_ANSWER;
use crate::round::{Missing, RequestError, Round};

/// The longest name of a topic, a key or a phase, in bytes.
pub(crate) const LONGEST_NAME: usize = 1024;

/// The maximum number of open rounds and waiting gets; a program that exceeds it leaks topics.
pub(super) const MAX_OPEN: usize = 1 << 16;

/// The service of a coordinator for the ranks of one generation, beside their membership.
pub(crate) struct Service {
    pub(super) ranks: Vec<RankStatus>,
    pub(super) rounds: BTreeMap<Round, RoundState>,
    /// The outcomes of earlier coordinators' rounds that ranks have reported.
    pub(super) outcomes: Outcomes,
    pub(super) keys: HashMap<String, Arc<[u8]>>,
    /// Bytes of all keys and values.
    pub(super) kept: usize,
    pub(super) gets: Vec<PendingGet>,
    pub(super) channels: Channels,
    /// By the key of their communicator.
    pub(super) straggler_queries: BTreeMap<String, StragglerQuery>,
    pub(super) notes: VecDeque<String>,
    pub(super) note_count: usize,
    /// Whether a majority of all ranks answers: without one, a round in which only some of the ranks take part does not
    /// end.
    pub(super) has_majority: bool,
    /// A lower bound of all deadlines.
    pub(super) earliest: Option<Instant>,
    pub(super) outputs: VecDeque<Output>,
}

/// A request of a rank that waits for a key, or for several.
pub(super) struct PendingGet {
    pub(super) wanted: Wanted,
    pub(super) rank: usize,
    pub(super) id: u64,
    pub(super) begun: Instant,
    /// When the next log line about waiting for it is due.
    pub(super) next_report: Instant,
    pub(super) deadline: Instant,
}

/// What a request waits for.
pub(super) enum Wanted {
    /// The value of a key.
    Value(String),
    /// All keys at the same time: which of them are set, and how many are not.
    Keys {
        is_set: BTreeMap<String, bool>,
        missing: usize,
    },
}

/// The state of a rank in the service.
#[derive(Default)]
pub(crate) struct RankStatus {
    pub(crate) host: String,
    pub(crate) pid: u64,
    /// Its phase, and the time since when; `None` until the rank arrives.
    pub(crate) phase: Option<(Phase, Instant)>,
    /// Why the rank does not take part in rounds any more. While it is connected, it still takes part in rounds of
    /// ends.
    pub(crate) departure: Option<Departure>,
    pub(super) is_connected: bool,
}

/// The receivers of a push: ranks or observers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Recipients {
    All,
    Rank(usize),
    Ranks(Vec<usize>),
    Observers,
}

/// A message for the driver to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    Answer {
        /// Ranks, and the numbers of their requests.
        to: Vec<(usize, u64)>,
        answer: Answer,
    },
    Push {
        to: Recipients,
        push: Push,
    },
}

impl RankStatus {
    /// Whether nothing more can arrive from the rank.
    pub(crate) fn is_closed(&self) -> bool {
        self.departure.is_some() && !self.is_connected
    }
}

impl Service {
    pub(crate) fn new(size: usize) -> Self {
        Self {
            ranks: (0..size).map(|_| RankStatus::default()).collect(),
            rounds: BTreeMap::new(),
            outcomes: Outcomes::default(),
            keys: HashMap::new(),
            kept: 0,
            gets: Vec::new(),
            channels: Channels::default(),
            straggler_queries: BTreeMap::new(),
            notes: VecDeque::new(),
            note_count: 0,
            has_majority: true,
            earliest: None,
            outputs: VecDeque::new(),
        }
    }

    /// Whether this request of `rank` waits for its answer, or the answer is among the outputs.
    pub(crate) fn is_waiting(&self, rank: usize, id: u64) -> bool {
        let own = (rank, id);
        let mut rounds = self.rounds.values();
        rounds.any(|open| open.waiting.contains(&own))
            || self.gets.iter().any(|get| (get.rank, get.id) == own)
            || self.channels.holds(rank, id)
            || self
                .outputs
                .iter()
                .any(|output| matches!(output, Output::Answer { to, .. } if to.contains(&own)))
    }

    pub(crate) fn rank(&self, rank: usize) -> &RankStatus {
        &self.ranks[rank]
    }

    pub(crate) fn departure(&self, rank: usize) -> Option<&Departure> {
        self.ranks[rank].departure.as_ref()
    }

    /// Returns what is reported about `rank` to a rank that waits for it.
    pub(crate) fn missing(&self, rank: usize, now: Instant) -> Missing {
        let phase = self.ranks[rank].phase.as_ref();
        Missing {
            rank,
            phase: phase.map(|(name, at)| (name.clone(), now.saturating_duration_since(*at))),
        }
    }
}

/// Helpers of all parts.
impl Service {
    pub(super) fn answer(&mut self, mut to: Vec<(usize, u64)>, answer: Answer) {
        to.retain(|(_, id)| *id != NO_ANSWER);
        if !to.is_empty() {
            self.outputs.push_back(Output::Answer { to, answer });
        }
    }

    pub(super) fn refuse(&mut self, rank: usize, id: u64, why: RequestError) {
        self.answer(vec![(rank, id)], Answer::Failed(Arc::new(why)));
    }

    pub(super) fn push(&mut self, to: Recipients, push: Push) {
        self.outputs.push_back(Output::Push { to, push });
    }

    pub(super) fn note_deadline(&mut self, deadline: Instant) {
        self.earliest = Some(self.earliest.map_or(deadline, |at| at.min(deadline)));
    }
}

/// Returns the reason of a request that ends because a rank has departed.
pub(super) fn departure_error(rank: usize, departure: &Departure) -> RequestError {
    RequestError::Departed {
        rank,
        departure: departure.clone(),
    }
}

//! The state of one round.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::coordinator_message::Answer;
use crate::round::{Parts, RequestError, Round};
use crate::time::later;

/// How long a holder of an outcome may take to send it before another holder is asked.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) struct RoundState {
    pub(super) members: Option<Arc<[usize]>>,
    pub(super) begun: Instant,
    /// The time of the next log line about waiting in this round.
    pub(super) next_report: Instant,
    /// The time at which the first timeout of a waiting rank passes.
    pub(super) deadline: Instant,
    pub(super) parts: Vec<Option<Vec<u8>>>,
    pub(super) bytes: usize,
    /// Whether each rank has contributed its part, by its index in the round.
    pub(super) arrived: Vec<bool>,
    pub(super) waiting: Vec<(usize, u64)>,
    /// The rank that was asked for the outcome that it has from an earlier coordinator, and until when it should
    /// answer.
    pub(super) asked: Option<(usize, Instant)>,
    /// Why the round fails, unless a rank has a different outcome from an earlier coordinator.
    pub(super) failure: Option<RequestError>,
    pub(super) outcome: Option<Answer>,
}

impl RoundState {
    /// Returns when the round `key` ends without the absent ranks; until `takeover`, more may become known.
    pub(super) fn ends_at(&self, key: &Round, takeover: Option<Instant>) -> Instant {
        if key.is_of_ends() {
            return self.deadline;
        }
        // A rank that does not answer delays the others for a while.
        let longest = later(self.deadline, 2 * ANSWER_TIMEOUT);
        let asked = self.asked.map(|(_, until)| until.min(longest));
        let later = asked.into_iter().chain(takeover).max();
        later.map_or(self.deadline, |later| later.max(self.deadline))
    }

    pub(super) fn rank_at(&self, index: usize) -> usize {
        self.members
            .as_ref()
            .map_or(index, |members| members[index])
    }

    pub(super) fn index_of(&self, rank: usize) -> Option<usize> {
        match &self.members {
            None => (rank < self.arrived.len()).then_some(rank),
            Some(members) => members.iter().position(|&member| member == rank),
        }
    }

    /// Whether all ranks have contributed their parts.
    pub(super) fn is_complete(&self) -> bool {
        self.arrived.iter().all(|&arrived| arrived)
    }

    /// Completes the round: each rank gets the parts of all ranks.
    pub(super) fn complete(&mut self) {
        let parts = self.parts.iter_mut().filter_map(Option::take).collect();
        self.outcome = Some(Answer::Parts(Parts::new(parts)));
    }

    pub(super) fn absent(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.arrived.len())
            .filter(|&index| !self.arrived[index])
            .map(|index| self.rank_at(index))
    }

    /// Completes a round of ends with an empty part for each rank from which nothing more can arrive, if only such
    /// ranks are absent.
    pub(super) fn end_without_the_closed(&mut self, is_closed: impl Fn(usize) -> bool) {
        if self.absent().all(is_closed) {
            let parts = self
                .parts
                .iter_mut()
                .map(|part| part.take().unwrap_or_default());
            self.outcome = Some(Answer::Parts(Parts::new(parts.collect())));
        }
    }
}

//! The state of one round.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::coordinator_message::Answer;
use crate::round::{Parts, RequestError, Round};
use crate::time::later;

/// After how long without the outcome that a rank has another rank is asked for it.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) struct RoundState {
    pub(super) members: Option<Arc<[usize]>>,
    pub(super) begun: Instant,
    /// When the next log line about waiting for it is due.
    pub(super) next_report: Instant,
    /// When the first timeout of a waiting rank is over.
    pub(super) deadline: Instant,
    pub(super) parts: Vec<Option<Vec<u8>>>,
    pub(super) bytes: usize,
    /// Which ranks have given their parts, by their index in the round.
    pub(super) arrived: Vec<bool>,
    pub(super) waiting: Vec<(usize, u64)>,
    /// The rank that was asked for the outcome, which it has from an earlier coordinator, and until when it is to answer.
    pub(super) asked: Option<(usize, Instant)>,
    /// Why it fails unless a rank has another outcome of an earlier coordinator.
    pub(super) failure: Option<RequestError>,
    pub(super) outcome: Option<Answer>,
}

impl RoundState {
    /// Returns when the round `key` ends without those that are absent; `takeover`: until when more may become known.
    pub(super) fn ends_at(&self, key: &Round, takeover: Option<Instant>) -> Instant {
        if key.is_of_ends() {
            return self.deadline;
        }
        // A rank that does not answer holds the others up for a while.
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

    /// Whether all have given their parts.
    pub(super) fn is_complete(&self) -> bool {
        self.arrived.iter().all(|&arrived| arrived)
    }

    /// Completes the round: all ranks get the parts of all.
    pub(super) fn complete(&mut self) {
        let parts = self.parts.iter_mut().filter_map(Option::take).collect();
        self.outcome = Some(Answer::Parts(Parts::new(parts)));
    }

    pub(super) fn absent(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.arrived.len())
            .filter(|&index| !self.arrived[index])
            .map(|index| self.rank_at(index))
    }

    /// Completes a round of ends with an empty part for each rank from which nothing can arrive any more, if only those are absent.
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

//! Rounds: one part of each rank, and all parts for each.
//!
//! ```text
//! open ──every part is there───────────────────▶ ended ──every other rank has come or cannot──▶ forgotten
//!        the parts are too large
//!        the first timeout of a rank runs out
//!        a rank that is needed leaves
//!        a rank gives the round up
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reporting::REPORT;
use super::round_state::RoundState;
use super::state::{LONGEST_NAME, MAX_OPEN, Service, rank_gone};
use crate::coordinator_message::Answer;
use crate::departure::{Departure, Reason};
use crate::frame::LARGEST;
use crate::round::{Incomplete, Round};
use crate::time::later;

impl Service {
    pub(super) fn collect(
        &mut self,
        now: Instant,
        (rank, id): (usize, u64),
        round: Round,
        timeout: Duration,
        part: Vec<u8>,
    ) {
        let size = self.ranks.len();
        let mut ranks = round.members.iter().flat_map(|members| members.iter());
        if ranks.any(|&member| member >= size) {
            return self.refuse(rank, id, Incomplete::OtherMembers);
        }
        if !self.rounds.contains_key(&round) {
            if self.rounds.len() >= MAX_OPEN || round.topic.len() > LONGEST_NAME {
                let bytes = round.topic.len();
                return self.refuse(rank, id, Incomplete::TooLarge { bytes });
            }
            // Groups of one name may be open at once, as long as they have no rank in common.
            let disputed = round.members.is_some()
                && self.rounds.iter().any(|(other, open)| {
                    (&other.topic, other.number) == (&round.topic, round.number)
                        && open.place_of(rank).is_some()
                });
            if disputed {
                return self.refuse(rank, id, Incomplete::OtherMembers);
            }
        }
        let deadline = later(now, timeout);
        let open = self.rounds.entry(round.clone()).or_insert_with(|| {
            let count = round.members.as_ref().map_or(size, |members| members.len());
            RoundState {
                members: round.members.clone(),
                begun: now,
                report: now + REPORT,
                deadline,
                parts: vec![None; count],
                bytes: 0,
                arrived: vec![false; count],
                waiting: Vec::new(),
                outcome: None,
            }
        });
        let Some(place) = open.place_of(rank) else {
            return self.refuse(rank, id, Incomplete::OtherMembers);
        };
        if open.arrived[place] {
            return self.refuse(rank, id, Incomplete::Twice);
        }
        open.arrived[place] = true;
        open.waiting.push((rank, id));
        open.deadline = open.deadline.min(deadline);
        let deadline = open.deadline;
        if open.outcome.is_none() {
            open.bytes += part.len();
            open.parts[place] = Some(part);
            if open.bytes > LARGEST {
                let bytes = open.bytes;
                open.outcome = Some(Answer::Incomplete(Arc::new(Incomplete::TooLarge { bytes })));
            } else if open.is_complete() {
                if self.has_majority || !round.needs_majority() {
                    open.complete();
                }
            } else if round.is_of_ends() {
                open.end_without_the_closed(|rank| self.ranks[rank].is_closed());
            } else {
                let why = open
                    .absent()
                    .find_map(|rank| Some(rank_gone(rank, self.ranks[rank].departure.as_ref()?)));
                open.outcome = why.map(|why| Answer::Incomplete(Arc::new(why)));
            }
        }
        self.note_deadline(deadline);
        self.settle(&round);
    }

    /// Sets whether a majority of all ranks answers by now.
    pub(crate) fn set_majority(&mut self, answers: bool) {
        if std::mem::replace(&mut self.has_majority, answers) || !answers {
            return;
        }
        let complete = |(key, open): (&Round, &mut RoundState)| {
            let waits = open.outcome.is_none() && open.is_complete();
            waits.then(|| {
                open.complete();
                key.clone()
            })
        };
        let keys: Vec<_> = self.rounds.iter_mut().filter_map(complete).collect();
        keys.iter().for_each(|key| self.settle(key));
    }

    /// Sends a round's verdict to the ranks that wait for it, and forgets the round when no other rank can come.
    fn settle(&mut self, key: &Round) {
        let Some(open) = self.rounds.get_mut(key) else {
            return;
        };
        let Some(outcome) = open.outcome.clone() else {
            return;
        };
        open.parts.clear();
        let waiting = std::mem::take(&mut open.waiting);
        let ranks = &self.ranks;
        let stays_away = |rank: usize| match key.is_of_ends() {
            true => ranks[rank].is_closed(),
            false => ranks[rank].departure.is_some(),
        };
        if open.absent().all(stays_away) {
            self.rounds.remove(key);
        }
        self.answer(waiting, outcome);
    }

    /// Ends a round before all parts are there.
    fn end(&mut self, key: &Round, why: Incomplete) {
        if let Some(open) = self.rounds.get_mut(key) {
            open.outcome
                .get_or_insert_with(|| Answer::Incomplete(Arc::new(why)));
            self.settle(key);
        }
    }

    /// Gives up the round for which the request `id` of `rank` waits.
    pub(super) fn cancel_round(&mut self, rank: usize, id: u64, reason: Reason) {
        let key = self
            .rounds
            .iter()
            .find_map(|(key, open)| open.waiting.contains(&(rank, id)).then(|| key.clone()));
        if let Some(key) = key {
            self.end(&key, Incomplete::GivenUp { rank, reason });
        }
    }

    /// Ends the rounds that need `rank`.
    pub(super) fn leave_rounds(&mut self, rank: usize, departure: &Departure, stays: bool) {
        let keys: Vec<_> = self
            .rounds
            .iter_mut()
            .filter_map(|(key, open)| {
                if stays && key.is_of_ends() {
                    return None;
                }
                open.waiting.retain(|&(waiting, _)| waiting != rank);
                Some((key.clone(), open.place_of(rank)?))
            })
            .collect();
        for (key, place) in keys {
            let Some(open) = self.rounds.get_mut(&key) else {
                continue;
            };
            if key.is_of_ends() {
                if open.outcome.is_none() {
                    open.end_without_the_closed(|rank| self.ranks[rank].is_closed());
                }
                self.settle(&key);
            } else if open.arrived[place] {
                self.settle(&key);
            } else {
                self.end(&key, rank_gone(rank, departure));
            }
        }
    }

    pub(super) fn end_late_rounds(&mut self, now: Instant) {
        let late: Vec<_> = self
            .rounds
            .iter()
            .filter(|(_, open)| open.outcome.is_none() && open.deadline <= now)
            .map(|(key, open)| (key.clone(), self.late(key, open, now)))
            .collect();
        for (key, why) in late {
            self.end(&key, why);
        }
    }

    fn late(&self, key: &Round, open: &RoundState, now: Instant) -> Incomplete {
        let waited = open.deadline.saturating_duration_since(open.begun);
        if open.is_complete() {
            return Incomplete::NoMajority { waited };
        }
        let waited_for = |rank: &usize| !(key.is_of_ends() && self.ranks[*rank].is_closed());
        let missing = open.absent().filter(waited_for);
        let missing: Vec<_> = missing.map(|rank| self.missing(rank, now)).collect();
        // Refused connections matter where a rank never came.
        let mut remarks = Vec::new();
        if missing.iter().any(|missing| missing.phase.is_none()) {
            remarks.extend(self.remarks.iter().cloned());
            if self.remarked > self.remarks.len() {
                let more = self.remarked - self.remarks.len();
                remarks.push(format!("and {more} more before these"));
            }
        }
        Incomplete::TimedOut {
            missing,
            waited,
            remarks,
        }
    }

    pub(super) fn next_round_deadline(&self) -> Option<Instant> {
        let rounds = self.rounds.values().filter(|open| open.outcome.is_none());
        rounds.map(|open| open.deadline).min()
    }

    #[cfg(test)]
    pub(crate) fn rounds(&self) -> impl Iterator<Item = &Round> {
        self.rounds.keys()
    }
}

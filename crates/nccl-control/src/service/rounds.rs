//! Rounds of exchanges: each rank contributes one part, and gets the parts of all ranks.
//!
//! ```text
//! open ──every part has arrived────────────────▶ ended ──every other rank has been answered or departed──▶ forgotten
//!        the parts are too large
//!        the first timeout of a rank is over
//!        a rank that is needed leaves
//!        a rank gives the round up
//! ```

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reporting::WAIT_LOG_INTERVAL;
use super::round_state::RoundState;
use super::state::{LONGEST_NAME, MAX_OPEN, Service, departure_error};
use crate::coordinator_message::Answer;
use crate::departure::{Departure, Reason};
use crate::frame::LARGEST;
use crate::round::{RequestError, Round};
use crate::time::later;

/// Whether these are different ranks out of `size`, and `rank` is one of them.
fn are_members(members: &[usize], rank: usize, size: usize) -> bool {
    let mut seen = HashSet::new();
    let mut all = members.iter();
    all.all(|&member| member < size && seen.insert(member)) && seen.contains(&rank)
}

impl Service {
    pub(super) fn exchange(
        &mut self,
        now: Instant,
        (rank, id): (usize, u64),
        round: Round,
        (waited, timeout): (Duration, Duration),
        part: Vec<u8>,
    ) {
        let size = self.ranks.len();
        if !self.rounds.contains_key(&round) {
            let members = round.members.as_deref();
            if members.is_some_and(|members| !are_members(members, rank, size)) {
                return self.refuse(rank, id, RequestError::OtherMembers);
            }
            if self.rounds.len() >= MAX_OPEN || round.topic.len() > LONGEST_NAME {
                let bytes = round.topic.len();
                return self.refuse(rank, id, RequestError::TooLarge { bytes });
            }
            // Several groups with the same name may be open at once, as long as they have no rank in common.
            let is_disputed = round.members.is_some()
                && self.rounds.iter().any(|(other, open)| {
                    (&other.topic, other.number) == (&round.topic, round.number)
                        && open.index_of(rank).is_some_and(|index| {
                            // A round that has ended for this rank does not keep the rank from another one.
                            let has_ended = open.arrived[index] && open.outcome.is_some();
                            !has_ended && !self.outcomes.is_held_by(other, rank)
                        })
                });
            if is_disputed {
                return self.refuse(rank, id, RequestError::OtherMembers);
            }
        }
        let deadline = later(now, timeout);
        let begun = now.checked_sub(waited).unwrap_or(now);
        let open = self.rounds.entry(round.clone()).or_insert_with(|| {
            let count = round.members.as_ref().map_or(size, |members| members.len());
            RoundState {
                members: round.members.clone(),
                begun,
                next_report: now + WAIT_LOG_INTERVAL,
                deadline,
                parts: vec![None; count],
                bytes: 0,
                arrived: vec![false; count],
                waiting: Vec::new(),
                asked: None,
                failure: None,
                outcome: None,
            }
        });
        let Some(index) = open.index_of(rank) else {
            return self.refuse(rank, id, RequestError::OtherMembers);
        };
        if open.arrived[index] {
            // A repeated request; its answer is not kept any more.
            if let Some(outcome) = open.outcome.clone() {
                return self.answer(vec![(rank, id)], outcome);
            }
            // A rank that departs repeats its requests when it coordinates in a later term.
            let departure = self.ranks[rank].departure.as_ref();
            let why = departure.map(|departure| departure_error(rank, departure));
            return self.refuse(rank, id, why.unwrap_or(RequestError::Twice));
        }
        open.arrived[index] = true;
        open.begun = open.begun.min(begun);
        open.waiting.push((rank, id));
        open.deadline = open.deadline.min(deadline);
        let deadline = open.deadline;
        if open.outcome.is_none() {
            open.bytes += part.len();
            open.parts[index] = Some(part);
            if open.bytes > LARGEST {
                let bytes = open.bytes;
                open.outcome = Some(Answer::Failed(Arc::new(RequestError::TooLarge { bytes })));
            }
        }
        self.note_deadline(deadline);
        self.settle(now, &round);
    }

    /// Ends a round if enough is known, and answers the ranks that wait in it.
    pub(super) fn settle(&mut self, now: Instant, key: &Round) {
        let Some(open) = self.rounds.get_mut(key) else {
            return;
        };
        if open.outcome.is_none() {
            let is_complete = open.is_complete();
            if is_complete && open.failure.is_none() {
                if self.has_majority || !key.needs_majority() {
                    open.complete();
                }
            } else if key.is_of_ends() {
                open.end_without_the_closed(|rank| self.ranks[rank].is_closed());
            } else if is_complete || !self.want_outcome(now, key) {
                self.fail(key);
            }
        }
        self.answer_waiting_ranks(key);
    }

    /// Ends a round if a reason is known why it cannot be completed.
    fn fail(&mut self, key: &Round) {
        let Some(open) = self.rounds.get_mut(key) else {
            return;
        };
        let first = self.channels.closed_by.as_ref().map(|(rank, _)| *rank);
        let first = first.filter(|first| open.absent().any(|rank| rank == *first));
        let ranks = &self.ranks;
        let departed = first.into_iter().chain(open.absent()).find_map(|rank| {
            let departure = ranks[rank].departure.as_ref()?;
            Some(departure_error(rank, departure))
        });
        let why = open.failure.take().or(departed);
        open.outcome = why.map(|why| Answer::Failed(Arc::new(why)));
    }

    /// Sets whether a majority of all ranks answers.
    pub(crate) fn set_majority(&mut self, now: Instant, answers: bool) {
        if std::mem::replace(&mut self.has_majority, answers) || !answers {
            return;
        }
        self.settle_all(now);
    }

    /// Sends a round's outcome to the ranks that wait for it, and forgets the round when no other rank can enter it.
    fn answer_waiting_ranks(&mut self, key: &Round) {
        let Some(open) = self.rounds.get_mut(key) else {
            return;
        };
        let Some(outcome) = open.outcome.clone() else {
            return;
        };
        open.parts.clear();
        let waiting = std::mem::take(&mut open.waiting);
        let ranks = &self.ranks;
        let outcomes = &self.outcomes;
        let cannot_enter = |rank: usize| match key.is_of_ends() {
            true => ranks[rank].is_closed(),
            false => ranks[rank].departure.is_some() || outcomes.is_held_by(key, rank),
        };
        if open.absent().all(cannot_enter) {
            self.rounds.remove(key);
        }
        self.answer(waiting, outcome);
    }

    /// Ends a round before all parts have arrived.
    fn end(&mut self, key: &Round, why: RequestError) {
        if let Some(open) = self.rounds.get_mut(key) {
            open.outcome
                .get_or_insert_with(|| Answer::Failed(Arc::new(why)));
            self.answer_waiting_ranks(key);
        }
    }

    /// Cancels the round for which the request `id` of `rank` waits.
    pub(super) fn cancel_round(&mut self, now: Instant, rank: usize, id: u64, reason: Reason) {
        let key = self
            .rounds
            .iter()
            .find_map(|(key, open)| open.waiting.contains(&(rank, id)).then(|| key.clone()));
        if let Some(key) = key
            && let Some(open) = self.rounds.get_mut(&key)
        {
            let why = RequestError::GivenUp { rank, reason };
            if key.is_of_ends() {
                return self.end(&key, why);
            }
            open.failure.get_or_insert(why);
            self.settle(now, &key);
        }
    }

    /// Ends the rounds that need `rank`.
    pub(super) fn leave_rounds(
        &mut self,
        now: Instant,
        rank: usize,
        departure: &Departure,
        keeps_communicators: bool,
    ) {
        let keys: Vec<_> = self
            .rounds
            .iter_mut()
            .filter_map(|(key, open)| {
                if keeps_communicators && key.is_of_ends() {
                    return None;
                }
                open.waiting.retain(|&(waiting, _)| waiting != rank);
                Some((key.clone(), open.index_of(rank)?))
            })
            .collect();
        for (key, index) in keys {
            let Some(open) = self.rounds.get_mut(&key) else {
                continue;
            };
            if !key.is_of_ends() && !open.arrived[index] {
                let why = departure_error(rank, departure);
                open.failure.get_or_insert(why);
            }
            self.settle(now, &key);
        }
        if self.outcomes.takeover.is_some() {
            self.check_takeover();
            self.settle_all(now);
        }
    }

    pub(super) fn end_late_rounds(&mut self, now: Instant) {
        let takeover = self.outcomes.takeover;
        let is_late = |key: &Round, open: &RoundState| {
            open.outcome.is_none() && open.ends_at(key, takeover) <= now
        };
        let late = self.rounds.iter().filter(|(key, open)| is_late(key, open));
        let late: Vec<_> = late.map(|(key, _)| key.clone()).collect();
        for key in late {
            // If a reason is known why the round cannot be completed, that reason is used.
            if !key.is_of_ends() {
                self.fail(&key);
            }
            let why = self.rounds.get(&key).map(|open| self.late(&key, open, now));
            if let Some(why) = why {
                self.end(&key, why);
            }
        }
    }

    fn late(&self, key: &Round, open: &RoundState, now: Instant) -> RequestError {
        let waited = open.deadline.saturating_duration_since(open.begun);
        if open.is_complete() {
            return RequestError::NoMajority { waited };
        }
        let waited_for = |rank: &usize| !(key.is_of_ends() && self.ranks[*rank].is_closed());
        let missing = open.absent().filter(waited_for);
        let missing: Vec<_> = missing.map(|rank| self.missing(rank, now)).collect();
        // Refused connections are relevant only if a rank has never joined.
        let mut notes = Vec::new();
        if missing.iter().any(|missing| missing.phase.is_none()) {
            notes.extend(self.notes.iter().cloned());
            if self.note_count > self.notes.len() {
                let more = self.note_count - self.notes.len();
                notes.push(format!("and {more} more before these"));
            }
        }
        RequestError::TimedOut {
            missing,
            waited,
            notes,
        }
    }

    pub(super) fn next_round_deadline(&self) -> Option<Instant> {
        let rounds = self
            .rounds
            .iter()
            .filter(|(_, open)| open.outcome.is_none());
        let takeover = self.outcomes.takeover;
        rounds.map(|(key, open)| open.ends_at(key, takeover)).min()
    }

    #[cfg(test)]
    pub(crate) fn rounds(&self) -> impl Iterator<Item = &Round> {
        self.rounds.keys()
    }
}

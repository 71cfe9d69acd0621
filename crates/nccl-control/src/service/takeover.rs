//! What a coordinator that takes over from another does with the [outcomes](super::outcomes) of earlier rounds: it learns
//! from the ranks which of them they have, and asks them for those that other ranks still wait for.

use std::time::{Duration, Instant};

use super::outcomes::Holder;
use super::round_state::{ANSWER_TIMEOUT, RoundState};
use super::state::{LONGEST_NAME, Recipients, Service};
use crate::coordinator_message::{Answer, Push};
use crate::round::{RequestError, Round};
use crate::time::later;

/// How long a coordinator that takes over waits for the reports of all living ranks before it ends a round without an
/// absent rank. This is shorter than the time for which a rank waits after it has cancelled an exchange.
const TAKEOVER_TIMEOUT: Duration = Duration::from_millis(800);

// A rank is asked once before the takeover is over.
const _: () = assert!(TAKEOVER_TIMEOUT.as_nanos() < ANSWER_TIMEOUT.as_nanos());

/// How long this coordinator remembers which ranks have outcomes: as long as the ranks keep them.
const REMEMBERED_FOR: Duration = Duration::from_secs(30);

/// The maximum number of rounds remembered of one rank.
const MAX_HELD: usize = 256;

impl Service {
    /// Records that this coordinator takes over from another, which may have answered some ranks.
    pub(crate) fn takes_over(&mut self, now: Instant, from: usize) {
        self.follows(now, from);
        let until = later(now, TAKEOVER_TIMEOUT);
        self.outcomes.takeover = Some(until);
        self.note_deadline(until);
    }

    /// Handles a rank's report of the rounds whose outcomes it has.
    pub(super) fn hear_outcomes(
        &mut self,
        now: Instant,
        rank: usize,
        outcomes: Vec<(Round, bool)>,
    ) {
        // An earlier message about this may have been lost with this rank's connection.
        if let Some(closed) = self.closed_channels() {
            self.push(Recipients::Rank(rank), closed);
        }
        if !self.outcomes.told.insert(rank) {
            self.outcomes.holders.retain(|_, holders| {
                holders.retain(|holder| holder.rank != rank);
                !holders.is_empty()
            });
        }
        let size = self.ranks.len();
        for (round, has_failed) in outcomes.into_iter().take(MAX_HELD) {
            let is_member = match &round.members {
                None => true,
                Some(members) => members.len() <= size && members.contains(&rank),
            };
            let is_known = round.topic.len() <= LONGEST_NAME && !round.is_of_ends();
            if !is_member || !is_known || self.outcomes.is_held_by(&round, rank) {
                continue;
            }
            let holders = self.outcomes.holders.entry(round).or_default();
            holders.push(Holder { rank, has_failed });
        }
        let until = later(now, REMEMBERED_FOR);
        self.outcomes.remembered_until = Some(until);
        self.note_deadline(until);
        // Earlier queries to this rank may not have arrived.
        let was_asked = |open: &RoundState| open.asked.is_some_and(|(asked, _)| asked == rank);
        for open in self.rounds.values_mut().filter(|open| was_asked(open)) {
            open.asked = None;
        }
        if self.outcomes.takeover.is_some() {
            self.check_takeover();
        }
        self.settle_all(now);
    }

    /// Ends the takeover when all ranks that have not departed have reported their outcomes.
    pub(super) fn check_takeover(&mut self) {
        let told = &self.outcomes.told;
        let mut ranks = self.ranks.iter().enumerate();
        if ranks.all(|(rank, own)| own.departure.is_some() || told.contains(&rank)) {
            self.outcomes.takeover = None;
        }
    }

    /// Ends the takeover after its timeout, asks other ranks for outcomes that were not answered, and forgets the
    /// holders after theirs.
    pub(super) fn handle_outcome_timeout(&mut self, now: Instant) {
        let is_over = |until: Option<Instant>| until.is_some_and(|until| until <= now);
        if is_over(self.outcomes.remembered_until) {
            self.outcomes.remembered_until = None;
            self.outcomes.holders.clear();
        }
        if is_over(self.outcomes.takeover) {
            self.outcomes.takeover = None;
            self.settle_all(now);
        }
        let is_late = |open: &RoundState| {
            open.outcome.is_none() && is_over(open.asked.map(|(_, until)| until))
        };
        let late = self.rounds.iter().filter(|(_, open)| is_late(open));
        let late: Vec<_> = late.map(|(key, _)| key.clone()).collect();
        late.iter().for_each(|key| self.settle(now, key));
    }

    pub(super) fn next_answer_timeout(&self) -> Option<Instant> {
        let open = self.rounds.values().filter(|open| open.outcome.is_none());
        open.filter_map(|open| Some(open.asked?.1)).min()
    }

    pub(super) fn settle_all(&mut self, now: Instant) {
        let keys: Vec<_> = self.rounds.keys().cloned().collect();
        keys.iter().for_each(|key| self.settle(now, key));
    }

    /// Asks a rank that has the outcome of a round for it. Returns whether the outcome may still arrive.
    pub(super) fn want_outcome(&mut self, now: Instant, key: &Round) -> bool {
        let Some(open) = self.rounds.get_mut(key) else {
            return false;
        };
        let ranks = &self.ranks;
        let answers = |rank: usize| !ranks[rank].is_closed();
        let asked = open.asked.filter(|(rank, _)| answers(*rank));
        if asked.is_some_and(|(_, until)| until > now) {
            return true;
        }
        // Prefer another holder, if there is one.
        let asked = asked.map(|(rank, _)| rank);
        let outcomes = &self.outcomes;
        let other = outcomes.holder(key, |rank| answers(rank) && asked != Some(rank));
        let holder = other.or_else(|| outcomes.holder(key, answers));
        let may_change = outcomes.takeover.is_some();
        let Some((rank, has_failed)) = holder else {
            open.asked = None;
            return may_change;
        };
        if has_failed && may_change {
            return true;
        }
        let until = later(now, ANSWER_TIMEOUT);
        open.asked = Some((rank, until));
        self.note_deadline(until);
        self.push(Recipients::Rank(rank), Push::WantOutcome(key.clone()));
        true
    }

    /// Handles the outcome of a round that `rank` got from an earlier coordinator.
    pub(super) fn hear_outcome(
        &mut self,
        now: Instant,
        rank: usize,
        round: &Round,
        answer: Answer,
    ) {
        if !self.outcomes.is_held_by(round, rank) {
            return;
        }
        let Some(open) = self.rounds.get_mut(round) else {
            return;
        };
        match &answer {
            Answer::Failed(why) if **why == RequestError::OutcomeLost => {
                self.outcomes.forget(round, rank);
                open.asked = None;
                if self.outcomes.holder(round, |_| true).is_none() {
                    open.failure.get_or_insert(RequestError::OutcomeLost);
                }
            }
            Answer::Parts(parts) if parts.len() != open.arrived.len() => return,
            Answer::Parts(_) | Answer::Failed(_) => _ = open.outcome.get_or_insert(answer),
            _ => return,
        }
        self.settle(now, round);
    }
}

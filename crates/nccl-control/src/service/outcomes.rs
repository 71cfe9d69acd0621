//! The outcomes of rounds that ranks have from an earlier coordinator. It may have answered some ranks and not others: who waits in
//! such a round gets the same from this one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::state::{LONGEST_NAME, Recipients, Service};
use crate::coordinator_message::{Answer, Push};
use crate::round::Round;
use crate::time::later;

/// How long a coordinator that takes over waits for what all living ranks have, before it ends a round without an absent one.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(2);

/// How many rounds of one rank are remembered.
const MAX_HELD: usize = 256;

/// See the module.
#[derive(Default)]
pub(super) struct Outcomes {
    /// The ranks that have the outcome of a round, and whether it failed.
    holders: BTreeMap<Round, Vec<Holder>>,
    /// Until all ranks have told, or for [`TAKEOVER_TIMEOUT`]: the ranks that have.
    takeover: Option<Takeover>,
    /// The ranks that have told, ever.
    told: BTreeSet<usize>,
}

#[derive(Clone, Copy)]
struct Holder {
    rank: usize,
    has_failed: bool,
}

struct Takeover {
    told: BTreeSet<usize>,
    until: Instant,
}

impl Outcomes {
    pub(super) fn takeover_until(&self) -> Option<Instant> {
        self.takeover.as_ref().map(|takeover| takeover.until)
    }

    /// Whether more may become known about the rounds of an earlier coordinator.
    pub(super) fn is_taking_over(&self) -> bool {
        self.takeover.is_some()
    }

    pub(super) fn is_held_by(&self, round: &Round, rank: usize) -> bool {
        let holders = self.holders.get(round).into_iter().flatten();
        holders.into_iter().any(|holder| holder.rank == rank)
    }

    /// Returns a rank that has the outcome of a round and `answers`; whether it failed for that rank.
    pub(super) fn holder(
        &self,
        round: &Round,
        answers: impl Fn(usize) -> bool,
    ) -> Option<(usize, bool)> {
        let holders = self.holders.get(round)?.iter();
        let best = holders
            .filter(|holder| answers(holder.rank))
            .min_by_key(|holder| holder.has_failed)?;
        Some((best.rank, best.has_failed))
    }
}

impl Service {
    /// Records that this coordinator takes over from another, which may have answered some ranks.
    pub(crate) fn takes_over(&mut self, now: Instant) {
        let until = later(now, TAKEOVER_TIMEOUT);
        self.outcomes.takeover = Some(Takeover {
            told: BTreeSet::new(),
            until,
        });
        self.note_deadline(until);
    }

    /// Handles that `rank` has told of which rounds it has the outcome.
    pub(super) fn hear_outcomes(&mut self, rank: usize, outcomes: Vec<(Round, bool)>) {
        if !self.outcomes.told.insert(rank) {
            self.outcomes.holders.retain(|_, holders| {
                holders.retain(|holder| holder.rank != rank);
                !holders.is_empty()
            });
        }
        for (round, has_failed) in outcomes.into_iter().take(MAX_HELD) {
            if round.topic.len() > LONGEST_NAME || round.is_of_ends() {
                continue;
            }
            let holders = self.outcomes.holders.entry(round.clone()).or_default();
            holders.push(Holder { rank, has_failed });
            self.settle(&round);
        }
        if let Some(takeover) = &mut self.outcomes.takeover {
            takeover.told.insert(rank);
            self.check_takeover();
        }
    }

    /// Ends the takeover when all ranks that have not departed have told what they have.
    pub(super) fn check_takeover(&mut self) {
        let Some(takeover) = &self.outcomes.takeover else {
            return;
        };
        let mut ranks = self.ranks.iter().enumerate();
        if ranks.all(|(rank, own)| own.departure.is_some() || takeover.told.contains(&rank)) {
            self.outcomes.takeover = None;
            self.settle_all();
        }
    }

    /// Ends the takeover when it has taken too long.
    pub(super) fn end_takeover(&mut self, now: Instant) {
        if self
            .outcomes
            .takeover_until()
            .is_some_and(|until| until <= now)
        {
            self.outcomes.takeover = None;
            self.settle_all();
        }
    }

    pub(super) fn settle_all(&mut self) {
        let keys: Vec<_> = self.rounds.keys().cloned().collect();
        keys.iter().for_each(|key| self.settle(key));
    }

    /// Asks a rank for the outcome of a round.
    pub(super) fn want_outcome(&mut self, rank: usize, round: &Round) {
        self.push(Recipients::Rank(rank), Push::WantOutcome(round.clone()));
    }

    /// Handles the outcome of a round that `rank` has had from an earlier coordinator.
    pub(super) fn hear_outcome(&mut self, rank: usize, round: &Round, answer: Answer) {
        if !self.outcomes.is_held_by(round, rank) {
            return;
        }
        let Some(open) = self.rounds.get_mut(round) else {
            return;
        };
        let is_outcome = match &answer {
            Answer::Parts(parts) => parts.len() == open.arrived.len(),
            answer => matches!(answer, Answer::Failed(_)),
        };
        if is_outcome {
            open.outcome.get_or_insert(answer);
            self.settle(round);
        }
    }
}

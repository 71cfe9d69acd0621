//! The outcomes of rounds that ranks have from an earlier coordinator. That coordinator may have answered some ranks
//! and not others: the ranks that still wait in such a round get the same outcome from this one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::round::Round;

/// The known outcomes; see the module.
#[derive(Default)]
pub(super) struct Outcomes {
    /// The ranks that have the outcome of a round.
    pub(super) holders: BTreeMap<Round, Vec<Holder>>,
    /// The time until which `holders` is remembered.
    pub(super) remembered_until: Option<Instant>,
    /// The ranks that have reported which outcomes they have.
    pub(super) told: BTreeSet<usize>,
    /// The time until which this coordinator, after taking over, waits for the other ranks' reports: until then, more may
    /// become known about the rounds of an earlier coordinator.
    pub(super) takeover: Option<Instant>,
}

/// A rank that has an outcome, and whether the round failed for it.
#[derive(Clone, Copy)]
pub(super) struct Holder {
    pub(super) rank: usize,
    pub(super) has_failed: bool,
}

impl Outcomes {
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.takeover.into_iter().chain(self.remembered_until).min()
    }

    pub(super) fn forget(&mut self, round: &Round, rank: usize) {
        if let Some(holders) = self.holders.get_mut(round) {
            holders.retain(|holder| holder.rank != rank);
        }
    }

    pub(super) fn is_held_by(&self, round: &Round, rank: usize) -> bool {
        let holders = self.holders.get(round).into_iter().flatten();
        holders.into_iter().any(|holder| holder.rank == rank)
    }

    /// Returns a rank that has the outcome of a round and satisfies `answers`, and whether the round failed for that
    /// rank.
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

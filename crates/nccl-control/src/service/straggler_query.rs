//! The state of one query.

use std::time::Instant;

use crate::straggler::QueriedOperation;

/// The state of a straggler query about an operation.
pub(super) struct StragglerQuery {
    pub(super) subject: QueriedOperation,
    /// The world ranks, by rank in the communicator.
    pub(super) members: Vec<usize>,
    /// The entry of each rank, by rank in the communicator.
    pub(super) entries: Vec<EntryState>,
    pub(super) opened: Instant,
    /// The rank for which the query only measures how far apart the ranks entered.
    pub(super) sample_for: Option<usize>,
    pub(super) stage: QueryStage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum QueryStage {
    /// The ranks have been queried.
    Queried,
    /// All ranks have been told which ranks are late; the query waits for the late ranks.
    Late,
    /// The result is complete.
    Over,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EntryState {
    Nothing,
    /// The rank has not entered; with its last operation.
    NotYet(String),
    Entered(Instant),
}

impl StragglerQuery {
    pub(super) fn communicator_rank_of(&self, rank: usize) -> Option<usize> {
        self.members.iter().position(|&member| member == rank)
    }

    /// Returns the lowest rank that waits in the operation.
    pub(super) fn reporter(&self) -> usize {
        let waits = |entry: &EntryState| matches!(entry, EntryState::Entered(_));
        let communicator_rank = self.entries.iter().position(waits).unwrap_or_default();
        let rank = self.members.get(communicator_rank);
        rank.copied().unwrap_or_default()
    }

    pub(super) fn first(&self) -> Option<Instant> {
        let entered = self.entries.iter().filter_map(|entry| match entry {
            EntryState::Entered(at) => Some(*at),
            _ => None,
        });
        entered.min()
    }

    pub(super) fn last(&self) -> Option<(Instant, usize)> {
        let entered = self
            .entries
            .iter()
            .enumerate()
            .filter_map(|(communicator_rank, entry)| match entry {
                EntryState::Entered(at) => Some((*at, communicator_rank)),
                _ => None,
            });
        entered.max()
    }

    pub(super) fn have_all_entered(&self) -> bool {
        let mut entry = self.entries.iter();
        entry.all(|entry| matches!(entry, EntryState::Entered(_)))
    }

    pub(super) fn is_answered(&self) -> bool {
        !self.entries.contains(&EntryState::Nothing)
    }
}

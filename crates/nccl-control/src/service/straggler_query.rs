//! The state of one query.

use std::time::Instant;

use crate::straggler::QueriedOperation;

/// The state of a straggler query about an operation.
pub(super) struct StragglerQuery {
    pub(super) subject: QueriedOperation,
    /// The ranks in the world, by their rank in the communicator.
    pub(super) members: Vec<usize>,
    pub(super) heard: Vec<EntryState>,
    pub(super) opened: Instant,
    /// The rank that asks only how far apart the ranks entered.
    pub(super) sample_for: Option<usize>,
    pub(super) stage: QueryStage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum QueryStage {
    /// The ranks have been asked.
    NumberedRequest,
    /// All ranks know which are late, and wait for them.
    Late,
    /// The result is complete.
    Over,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EntryState {
    Nothing,
    /// The rank has not entered; its last operation.
    NotYet(String),
    Entered(Instant),
}

impl StragglerQuery {
    pub(super) fn place_of(&self, rank: usize) -> Option<usize> {
        self.members.iter().position(|&member| member == rank)
    }

    /// Returns the lowest rank that waits.
    pub(super) fn reporter(&self) -> usize {
        let waits = |heard: &EntryState| matches!(heard, EntryState::Entered(_));
        let place = self.heard.iter().position(waits).unwrap_or_default();
        self.members.get(place).copied().unwrap_or_default()
    }

    pub(super) fn first(&self) -> Option<Instant> {
        let entered = self.heard.iter().filter_map(|heard| match heard {
            EntryState::Entered(at) => Some(*at),
            _ => None,
        });
        entered.min()
    }

    pub(super) fn last(&self) -> Option<(Instant, usize)> {
        let entered = self
            .heard
            .iter()
            .enumerate()
            .filter_map(|(place, heard)| match heard {
                EntryState::Entered(at) => Some((*at, place)),
                _ => None,
            });
        entered.max()
    }

    pub(super) fn have_all_entered(&self) -> bool {
        let mut heard = self.heard.iter();
        heard.all(|heard| matches!(heard, EntryState::Entered(_)))
    }

    pub(super) fn is_answered(&self) -> bool {
        !self.heard.contains(&EntryState::Nothing)
    }
}

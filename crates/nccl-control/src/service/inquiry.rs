//! One inquiry.

use std::time::Instant;

use crate::inquiry::Subject;

/// What has been found out about an operation.
pub(super) struct Inquiry {
    pub(super) subject: Subject,
    /// In the world, by their place in the communicator.
    pub(super) members: Vec<usize>,
    pub(super) heard: Vec<Heard>,
    pub(super) opened: Instant,
    /// The rank that asks how far apart the ranks came, and nothing else.
    pub(super) sample_for: Option<usize>,
    pub(super) stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Ranks have been asked.
    Asking,
    /// All know which ranks are late, and wait for them.
    Late,
    /// Everything is known.
    Over,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Nothing,
    /// It has not entered; what it did last.
    NotYet(String),
    Entered(Instant),
}

impl Inquiry {
    pub(super) fn place_of(&self, rank: usize) -> Option<usize> {
        self.members.iter().position(|&member| member == rank)
    }

    /// The lowest rank that waits.
    pub(super) fn teller(&self) -> usize {
        let waits = |heard: &Heard| matches!(heard, Heard::Entered(_));
        let place = self.heard.iter().position(waits).unwrap_or_default();
        self.members.get(place).copied().unwrap_or_default()
    }

    pub(super) fn first(&self) -> Option<Instant> {
        let entered = self.heard.iter().filter_map(|heard| match heard {
            Heard::Entered(at) => Some(*at),
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
                Heard::Entered(at) => Some((*at, place)),
                _ => None,
            });
        entered.max()
    }

    pub(super) fn have_all_entered(&self) -> bool {
        let mut heard = self.heard.iter();
        heard.all(|heard| matches!(heard, Heard::Entered(_)))
    }

    pub(super) fn is_answered(&self) -> bool {
        !self.heard.contains(&Heard::Nothing)
    }
}

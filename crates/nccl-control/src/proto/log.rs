//! What the coordinator of a generation has told all members, in one order.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::sync::Arc;

use nccl_base::wire::bytes;
use serde::{Deserialize, Serialize};

use super::id::MemberId;
use crate::departure::Departure;

/// What one member says to all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Said {
    /// Who.
    pub from: MemberId,
    /// Counts what it has said, so that nothing is told twice.
    pub number: u64,
    /// What it is about.
    pub topic: String,
    /// The words.
    #[serde(with = "bytes")]
    pub bytes: Vec<u8>,
}

/// An operator's decision between two sides of a network that is cut. The operator makes sure that no other side goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorWord {
    /// For which generation's successor it holds, once.
    pub generation: u64,
    /// The members that may go on.
    pub members: Vec<MemberId>,
}

/// What all members hear.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// A member takes part no more.
    Gone {
        /// Who.
        member: MemberId,
        /// Why.
        departure: Departure,
        /// Whether its end is proven: then it needs no vote.
        proven: bool,
    },
    /// What a member has said.
    Said(Arc<Said>),
    /// The operator's word, by which this side may go on.
    Operator(Arc<OperatorWord>),
}

/// The part of a log that a member keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPart {
    /// How many entries came before it.
    pub first: u64,
    /// The rest.
    pub entries: Vec<Arc<Entry>>,
}

impl LogPart {
    /// The place behind the last.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.entries.len() as u64)
    }

    /// Whether this goes on where `log` ends, as far as both are known, without a gap.
    #[must_use]
    pub(super) fn continues_from(&self, log: &Log) -> bool {
        let from = self.first.max(log.first);
        let own = |place: u64| self.entries.get(usize::try_from(place - self.first).ok()?);
        let other = |place: u64| log.entries.get(usize::try_from(place - log.first).ok()?);
        self.first <= log.end()
            && log.end() <= self.end()
            && (from..log.end()).all(|place| own(place) == other(place))
    }
}

/// How many entries are kept at least. In a larger generation as many as it has members, which may all go at once.
const KEPT: usize = 128;

/// The log of one generation, as one member has it.
#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    first: u64,
    entries: VecDeque<Arc<Entry>>,
    kept: usize,
    /// Of all entries, also those that are not kept: who is gone, and whether that is proven.
    gone: BTreeMap<MemberId, bool>,
    /// Of all entries: the last number that each member has said.
    said: BTreeMap<MemberId, u64>,
}

impl Log {
    /// An empty one, for so many members.
    #[must_use]
    pub(super) fn new(members: usize) -> Self {
        Self {
            kept: KEPT.max(members),
            ..Self::default()
        }
    }

    /// The place behind the last entry.
    #[must_use]
    pub(super) fn end(&self) -> u64 {
        self.first.saturating_add(self.entries.len() as u64)
    }

    /// Adds one.
    pub(super) fn push(&mut self, entry: Arc<Entry>) {
        match &*entry {
            Entry::Gone { member, proven, .. } => {
                *self.gone.entry(*member).or_default() |= *proven;
            }
            Entry::Said(said) => {
                let last = self.said.entry(said.from).or_default();
                *last = said.number.max(*last);
            }
            Entry::Operator(_) => {}
        }
        if self.entries.len() >= self.kept {
            self.entries.pop_front();
            self.first += 1;
        }
        self.entries.push_back(entry);
    }

    /// Whether a member is gone by an entry; then whether that is proven.
    #[must_use]
    pub(super) fn gone(&self, member: MemberId) -> Option<bool> {
        self.gone.get(&member).copied()
    }

    /// The place of the first entry that is kept.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// Forgets the entries from a place on. Who is gone by them is not forgotten.
    pub(super) fn cut(&mut self, place: u64) {
        let kept = usize::try_from(place.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.entries.truncate(kept);
    }

    /// Goes on at a place behind the end: what is between is not known.
    pub(super) fn skip_to(&mut self, place: u64) {
        if place > self.end() {
            self.entries.clear();
            self.first = place;
        }
    }

    /// Whether all have heard this.
    #[must_use]
    pub(super) fn has(&self, said: &Said) -> bool {
        self.said
            .get(&said.from)
            .is_some_and(|last| said.number <= *last)
    }

    /// All that is kept.
    #[must_use]
    pub(super) fn part(&self) -> LogPart {
        LogPart {
            first: self.first,
            entries: self.entries.iter().cloned().collect(),
        }
    }

    /// Whether this goes on where `part` ends, as far as both are known.
    #[must_use]
    pub(super) fn continues(&self, part: &LogPart) -> bool {
        let from = self.first.max(part.first);
        let own = |place: u64| self.entries.get(usize::try_from(place - self.first).ok()?);
        let other = |place: u64| part.entries.get(usize::try_from(place - part.first).ok()?);
        part.end() <= self.end() && (from..part.end()).all(|place| own(place) == other(place))
    }

    /// About how many bytes it has beside itself.
    pub(super) fn size(&self) -> usize {
        self.entries.len() * size_of::<Entry>() + self.gone.len() * size_of::<(MemberId, bool)>()
    }

    /// The entry at a place, if that is kept.
    #[must_use]
    pub(super) fn at(&self, place: u64) -> Option<&Arc<Entry>> {
        let place = usize::try_from(place.checked_sub(self.first)?).ok()?;
        self.entries.get(place)
    }

    /// The entries from a place on, unless some of them are not kept any more.
    #[must_use]
    pub(super) fn since(&self, start: u64) -> Option<Vec<Arc<Entry>>> {
        let skip = usize::try_from(start.checked_sub(self.first)?).ok()?;
        Some(self.entries.iter().skip(skip).cloned().collect())
    }
}

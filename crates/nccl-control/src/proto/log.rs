//! The entries that the coordinator of a generation has sent to all members, in one order.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::sync::Arc;

use nccl_base::wire::bytes;
use serde::{Deserialize, Serialize};

use super::id::MemberId;
use crate::departure::Departure;

/// A message of one member to all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Broadcast {
    /// The sender.
    pub from: MemberId,
    /// Counts the sender's messages, so that none is delivered twice.
    pub number: u64,
    /// The topic.
    pub topic: String,
    /// The content.
    #[serde(with = "bytes")]
    pub bytes: Vec<u8>,
}

/// An operator's decision between two sides of a cut network. The operator ensures that no other side goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorDecision {
    /// The generation for whose successor it holds, once.
    pub generation: u64,
    /// The members that may go on.
    pub members: Vec<MemberId>,
}

/// An entry for all members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// A member takes part no more.
    Gone {
        /// The member.
        member: MemberId,
        /// The reason.
        departure: Departure,
        /// Whether its end is proven: then its vote is not needed.
        proven: bool,
    },
    /// A message of a member.
    Broadcast(Arc<Broadcast>),
    /// The operator's decision by which this side may go on.
    OperatorDecision(Arc<OperatorDecision>),
}

/// The part of a log that a member keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPart {
    /// How many entries came before it.
    pub first: u64,
    /// The kept entries.
    pub entries: Vec<Arc<Entry>>,
}

impl LogPart {
    /// Returns the place behind the last entry.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.entries.len() as u64)
    }

    /// Whether this part continues `log` without a gap and agrees with it, as far as both are known.
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

/// How many entries are kept at least. In a larger generation it is the number of members, which may all depart at once.
const KEPT: usize = 128;

/// The log of one generation, as one member has it.
#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    first: u64,
    entries: VecDeque<Arc<Entry>>,
    kept: usize,
    /// Over all entries, also those not kept: the departed members, and whether each departure is proven.
    gone: BTreeMap<MemberId, bool>,
    /// Over all entries: the last number of each member's messages.
    said: BTreeMap<MemberId, u64>,
}

impl Log {
    /// Makes an empty log, for so many members.
    #[must_use]
    pub(super) fn new(members: usize) -> Self {
        Self {
            kept: KEPT.max(members),
            ..Self::default()
        }
    }

    /// Returns the place behind the last entry.
    #[must_use]
    pub(super) fn end(&self) -> u64 {
        self.first.saturating_add(self.entries.len() as u64)
    }

    /// Appends an entry.
    pub(super) fn push(&mut self, entry: Arc<Entry>) {
        match &*entry {
            Entry::Gone { member, proven, .. } => {
                *self.gone.entry(*member).or_default() |= *proven;
            }
            Entry::Broadcast(said) => {
                let last = self.said.entry(said.from).or_default();
                *last = said.number.max(*last);
            }
            Entry::OperatorDecision(_) => {}
        }
        if self.entries.len() >= self.kept {
            self.entries.pop_front();
            self.first += 1;
        }
        self.entries.push_back(entry);
    }

    /// Returns whether the departure of a member is proven, if the member has departed.
    #[must_use]
    pub(super) fn gone(&self, member: MemberId) -> Option<bool> {
        self.gone.get(&member).copied()
    }

    /// Returns the place of the first entry that is kept.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// Drops the entries from a place on. The departures in them are not forgotten.
    pub(super) fn cut(&mut self, place: u64) {
        let kept = usize::try_from(place.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.entries.truncate(kept);
    }

    /// Continues at a place behind the end: the entries between are not known.
    pub(super) fn skip_to(&mut self, place: u64) {
        if place > self.end() {
            self.entries.clear();
            self.first = place;
        }
    }

    /// Whether the log contains this message.
    #[must_use]
    pub(super) fn has(&self, said: &Broadcast) -> bool {
        self.said
            .get(&said.from)
            .is_some_and(|last| said.number <= *last)
    }

    /// Returns all kept entries.
    #[must_use]
    pub(super) fn part(&self) -> LogPart {
        LogPart {
            first: self.first,
            entries: self.entries.iter().cloned().collect(),
        }
    }

    /// Whether this log continues `part`, as far as both are known.
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

    /// Returns the entry at a place, if it is kept.
    #[must_use]
    pub(super) fn at(&self, place: u64) -> Option<&Arc<Entry>> {
        let place = usize::try_from(place.checked_sub(self.first)?).ok()?;
        self.entries.get(place)
    }

    /// Returns the entries from a place on, unless some of them are not kept any more.
    #[must_use]
    pub(super) fn since(&self, start: u64) -> Option<Vec<Arc<Entry>>> {
        let skip = usize::try_from(start.checked_sub(self.first)?).ok()?;
        Some(self.entries.iter().skip(skip).cloned().collect())
    }
}

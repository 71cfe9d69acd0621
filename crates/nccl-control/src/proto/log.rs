//! The entries that the coordinator of a generation has sent to all members, in one order.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::sync::Arc;

use nccl_base::wire::bytes;
use serde::{Deserialize, Serialize};

use super::id::MemberId;
use crate::departure::Departure;

/// A message from one member to all members.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Broadcast {
    /// The sender.
    pub from: MemberId,
    /// Numbers the sender's messages, so that none is delivered twice.
    pub number: u64,
    /// The topic.
    pub topic: String,
    /// The content.
    #[serde(with = "bytes")]
    pub bytes: Vec<u8>,
}

/// An operator's decision between two sides of a network partition. The operator ensures that no other side continues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorDecision {
    /// The generation whose successor the decision permits, once.
    pub generation: u64,
    /// The members that may continue.
    pub members: Vec<MemberId>,
}

/// An entry for all members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// A member no longer takes part.
    Departed {
        /// The member.
        member: MemberId,
        /// The reason.
        departure: Departure,
        /// Whether the end of the member is proven, so that its vote is not needed.
        proven: bool,
    },
    /// A message of a member.
    Broadcast(Arc<Broadcast>),
    /// The operator's decision that permits this side to continue.
    OperatorDecision(Arc<OperatorDecision>),
}

/// The part of a log that a member keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPart {
    /// The number of entries that precede this part.
    pub first: u64,
    /// The kept entries.
    pub entries: Vec<Arc<Entry>>,
}

impl LogPart {
    /// Returns the index after the last entry.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.entries.len() as u64)
    }

    /// Whether this part continues `log` without a gap and agrees with it, as far as both are known.
    #[must_use]
    pub(super) fn continues_from(&self, log: &Log) -> bool {
        let from = self.first.max(log.first);
        let own = |index: u64| self.entries.get(usize::try_from(index - self.first).ok()?);
        let other = |index: u64| log.entries.get(usize::try_from(index - log.first).ok()?);
        self.first <= log.end()
            && log.end() <= self.end()
            && (from..log.end()).all(|index| own(index) == other(index))
    }
}

/// How many entries are kept at least. In a larger generation it is the number of members, which may all depart at once.
const MIN_KEPT_ENTRIES: usize = 128;

/// The log of one generation, as one member has it.
#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    first: u64,
    entries: VecDeque<Arc<Entry>>,
    kept: usize,
    /// The departed members, and whether each departure is proven; covers all entries, including those no longer kept.
    departures: BTreeMap<MemberId, bool>,
    /// The number of each member's last message; covers all entries.
    last_broadcast: BTreeMap<MemberId, u64>,
}

impl Log {
    /// Creates an empty log for `members` members.
    #[must_use]
    pub(super) fn new(members: usize) -> Self {
        Self {
            kept: MIN_KEPT_ENTRIES.max(members),
            ..Self::default()
        }
    }

    /// Returns the index after the last entry.
    #[must_use]
    pub(super) fn end(&self) -> u64 {
        self.first.saturating_add(self.entries.len() as u64)
    }

    /// Appends an entry.
    pub(super) fn push(&mut self, entry: Arc<Entry>) {
        match &*entry {
            Entry::Departed { member, proven, .. } => {
                *self.departures.entry(*member).or_default() |= *proven;
            }
            Entry::Broadcast(broadcast) => {
                let last = self.last_broadcast.entry(broadcast.from).or_default();
                *last = broadcast.number.max(*last);
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
    pub(super) fn departure_proven(&self, member: MemberId) -> Option<bool> {
        self.departures.get(&member).copied()
    }

    /// Returns the index of the first entry that is kept.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// Drops the entries from `index` on. The departures in them are not forgotten.
    pub(super) fn cut(&mut self, index: u64) {
        let kept = usize::try_from(index.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.entries.truncate(kept);
    }

    /// Continues at an index after the end: the entries in between are not known.
    pub(super) fn skip_to(&mut self, index: u64) {
        if index > self.end() {
            self.entries.clear();
            self.first = index;
        }
    }

    /// Whether the log contains this message.
    #[must_use]
    pub(super) fn has(&self, broadcast: &Broadcast) -> bool {
        self.last_broadcast
            .get(&broadcast.from)
            .is_some_and(|last| broadcast.number <= *last)
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
        let own = |index: u64| self.entries.get(usize::try_from(index - self.first).ok()?);
        let other = |index: u64| part.entries.get(usize::try_from(index - part.first).ok()?);
        part.end() <= self.end() && (from..part.end()).all(|index| own(index) == other(index))
    }

    /// Returns approximately how many bytes this value occupies on the heap.
    pub(super) fn size(&self) -> usize {
        let departures = self.departures.len() * size_of::<(MemberId, bool)>();
        self.entries.len() * size_of::<Entry>() + departures
    }

    /// Returns the entry at an index, if it is kept.
    #[must_use]
    pub(super) fn at(&self, index: u64) -> Option<&Arc<Entry>> {
        let index = usize::try_from(index.checked_sub(self.first)?).ok()?;
        self.entries.get(index)
    }

    /// Returns the entries from `start` on, unless some of them are no longer kept.
    #[must_use]
    pub(super) fn since(&self, start: u64) -> Option<Vec<Arc<Entry>>> {
        let skip = usize::try_from(start.checked_sub(self.first)?).ok()?;
        Some(self.entries.iter().skip(skip).cloned().collect())
    }
}

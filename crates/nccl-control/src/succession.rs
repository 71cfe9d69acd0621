//! Who coordinates when the coordinator is gone: what one rank knows, and what follows from what it hears.
//!
//! Nothing here waits, sends or looks at a clock: [`Succession::step`] takes what has happened and says what
//! to do. `heir` does it; `succession/check.rs` puts many of these beside each other and tries every order
//! in which messages, deaths and a cut can come.
//!
//! ```text
//! Following ──link lost──▶ Seeking the next ──its welcome and its log──▶ Following
//!                             │   └─ its door is closed, or silent ─▶ Seeking the one after
//!                             └ that is this rank ─▶ Collecting ──all heard of, a majority──▶ Leading
//!                                                        └──────────no majority─────────────▶ Apart
//! ```
//!
//! The coordinator of a view is the lowest rank that nobody in it knows to be gone, so a view is called by
//! its coordinator, and a rank only ever goes on to a higher one. What the coordinator tells comes to every
//! rank in one order; each keeps what has come (its log), so the log of one is always the beginning of
//! another's. The successor hears the logs of all ranks, or learns that they are gone or silent; takes the
//! longest of the latest view as its own; adds who is gone; adds what ranks had said and nobody had
//! ordered; and sends each what it lacks. What one of them has heard before is thereby told by all, and the
//! first that is told of a communicator is its verdict.
//!
//! A rank decides only as one of a majority of those that may still live: a connection that was *closed* says
//! that a process is gone, one that is *silent* does not. Two sides of a cut cannot both be a majority; with
//! equal halves neither is, and both say so.

#[cfg(test)]
mod check;
#[cfg(test)]
mod kept;
#[cfg(test)]
mod rules;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::departure::Lost;

/// How a rank came to be out of reach.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) enum Loss {
    /// With an account of it that can be told to all: its process is gone, or its host does not acknowledge.
    Lost(Lost),
    /// Its host does, and it says nothing: frozen, or starved. It is passed over, and nobody calls it dead.
    Mute,
    /// It is there, and follows another coordinator.
    Elsewhere,
    /// It has left in order, as others did at the time.
    Left,
}

impl Loss {
    /// Whether its process is known to be gone.
    pub(super) fn is_certain(&self) -> bool {
        match self {
            Self::Lost(lost) => !lost.may_live(),
            Self::Left => true,
            Self::Mute | Self::Elsewhere => false,
        }
    }

    /// What can be told to all.
    fn account(&self) -> Option<&Lost> {
        match self {
            Self::Lost(lost) => Some(lost),
            Self::Mute | Self::Elsewhere | Self::Left => None,
        }
    }

    /// The same for this process alone, which has to be told something.
    pub(super) fn into_lost(self) -> Lost {
        match self {
            Self::Lost(lost) => lost,
            other => Lost::said(other.to_string()),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(lost) => lost.fmt(f),
            Self::Mute => f.write_str("it says nothing"),
            Self::Elsewhere => f.write_str("it follows another rank"),
            Self::Left => f.write_str("it left"),
        }
    }
}

/// What a coordinator tells all ranks.
pub(super) trait Entry: Clone + PartialEq {
    /// A rank is gone.
    fn gone(rank: usize, lost: &Lost) -> Self;

    /// Which rank is gone by it, and whether it may live all the same, out of reach.
    fn departed(&self) -> Option<(usize, bool)>;
}

/// What a rank tells a successor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct Report<E> {
    /// The view in which its log was the coordinator's.
    pub(super) synced: usize,
    /// How many entries it has forgotten, and the rest.
    pub(super) first: usize,
    pub(super) log: Vec<E>,
    /// What it has said, and not heard back.
    pub(super) unheard: Vec<E>,
    /// Whom it found gone itself.
    pub(super) lost: Vec<(usize, Loss)>,
}

impl<E: PartialEq> Report<E> {
    fn end(&self) -> usize {
        self.first + self.log.len()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Event<E> {
    /// The link to the coordinator is lost, or the way to it.
    Lost(Loss),
    /// A rank whose report is waited for will not give it.
    Found { rank: usize, loss: Loss },
    /// Somebody follows a later coordinator than this rank.
    Overtaken { by: usize },
    /// The next coordinator lets this rank not take part.
    Refused,
    /// This rank coordinates, and cannot reach enough of the others.
    Parted,
    /// At a successor: a report has come.
    Reported { from: usize, report: Report<E> },
    /// From the coordinator: all entries behind the first `start`.
    Succeeded {
        by: usize,
        start: usize,
        entries: Vec<E>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Action<E> {
    /// For this rank itself, in order.
    Deliver(E),
    /// Connect to that rank and send the report.
    Seek(usize),
    /// Wait for the reports of these ranks, and find out about those that do not come.
    Collect(Vec<usize>),
    /// This rank coordinates.
    Lead,
    /// The rest of the log, for a rank that follows from now on.
    Admit {
        to: usize,
        start: usize,
        entries: Vec<E>,
    },
    /// The others went on without it.
    TurnAway(usize),
    /// This rank, and those who have reported to it, cannot decide: these are out of reach.
    CutOff { from: Vec<usize>, with: Vec<usize> },
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Stage<E> {
    Following,
    Seeking,
    Collecting(BTreeMap<usize, Report<E>>),
    Leading,
    /// It takes part no more.
    Apart,
}

/// How many entries are kept at least; the others are behind all ranks long since. In a larger world as many as
/// there are ranks, who may all go at once.
const KEPT: usize = 128;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Succession<E> {
    me: usize,
    size: usize,
    coordinator: usize,
    stage: Stage<E>,
    synced: usize,
    first: usize,
    log: Vec<E>,
    /// Who is gone by an entry that is not kept any more, and whether it may live.
    departed: BTreeMap<usize, bool>,
    unheard: Vec<E>,
    lost: BTreeMap<usize, Loss>,
}

/// Whether `reachable` of the ranks that may live are enough to decide for all.
pub(super) fn is_majority(reachable: usize, alive: usize) -> bool {
    2 * reachable > alive
}

impl<E: Entry> Succession<E> {
    /// At first, rank 0 coordinates.
    pub(super) fn new(me: usize, size: usize) -> Self {
        Self {
            me,
            size,
            coordinator: 0,
            stage: match me {
                0 => Stage::Leading,
                _ => Stage::Following,
            },
            synced: 0,
            first: 0,
            log: Vec::new(),
            departed: BTreeMap::new(),
            unheard: Vec::new(),
            lost: BTreeMap::new(),
        }
    }

    pub(super) fn coordinator(&self) -> usize {
        self.coordinator
    }

    pub(super) fn stage(&self) -> &Stage<E> {
        &self.stage
    }

    pub(super) fn log(&self) -> &[E] {
        &self.log
    }

    /// Whom this rank found gone itself.
    pub(super) fn lost(&self) -> &BTreeMap<usize, Loss> {
        &self.lost
    }

    /// The coordinator has told this.
    pub(super) fn record(&mut self, entry: E) {
        self.unheard.retain(|own| *own != entry);
        let old = (self.log.len() + 1).saturating_sub(self.kept());
        let gone = self.log.drain(..old).filter_map(|entry| entry.departed());
        self.departed.extend(gone);
        self.first += old;
        self.log.push(entry);
    }

    fn kept(&self) -> usize {
        KEPT.max(self.size)
    }

    /// This rank says something that all are to hear.
    pub(super) fn say(&mut self, entry: E) {
        if self.unheard.len() < self.kept() {
            self.unheard.push(entry);
        }
    }

    pub(super) fn report(&self) -> Report<E> {
        Report {
            synced: self.synced,
            first: self.first,
            log: self.log.clone(),
            unheard: self.unheard.clone(),
            lost: self.lost.clone().into_iter().collect(),
        }
    }

    /// Whose reports are still waited for.
    pub(super) fn awaited(&self) -> Vec<usize> {
        let Stage::Collecting(reports) = &self.stage else {
            return Vec::new();
        };
        (0..self.size)
            .filter(|rank| *rank != self.me && !reports.contains_key(rank))
            .filter(|rank| !self.is_out(*rank))
            .collect()
    }

    /// What follows from something that has happened.
    pub(super) fn step(&mut self, event: Event<E>) -> Vec<Action<E>> {
        let mut actions = Vec::new();
        match (event, &mut self.stage) {
            (Event::Lost(loss), Stage::Following | Stage::Seeking) => {
                self.lost.insert(self.coordinator, loss);
                self.advance(&mut actions);
            }
            (Event::Overtaken { by }, Stage::Seeking | Stage::Collecting(_))
                if by > self.coordinator && by != self.me =>
            {
                self.coordinator = by;
                self.stage = Stage::Seeking;
                actions.push(Action::Seek(by));
            }
            (Event::Refused, Stage::Seeking | Stage::Following) => {
                self.lost.insert(self.coordinator, Loss::Elsewhere);
                self.part(Vec::new(), &mut actions);
            }
            (Event::Found { rank, loss }, Stage::Collecting(reports)) => {
                reports.remove(&rank);
                self.lost.insert(rank, loss);
                self.conclude(&mut actions);
            }
            (Event::Reported { from, report }, Stage::Collecting(reports)) => {
                reports.insert(from, report);
                // It was mute, or came late.
                self.lost.remove(&from);
                self.conclude(&mut actions);
            }
            (Event::Reported { from, report }, Stage::Leading) => {
                self.admit(from, &report, &mut actions)
            }
            (Event::Reported { from, .. }, Stage::Apart) => actions.push(Action::TurnAway(from)),
            (Event::Parted, _) => self.stage = Stage::Apart,
            (Event::Succeeded { by, start, entries }, Stage::Seeking | Stage::Following)
                if by == self.coordinator =>
            {
                self.stage = Stage::Following;
                self.synced = by;
                let known = (self.first + self.log.len()).saturating_sub(start);
                for entry in entries.into_iter().skip(known) {
                    self.record(entry.clone());
                    actions.push(Action::Deliver(entry));
                }
            }
            _ => {}
        }
        actions
    }

    /// Whether nothing is expected from a rank.
    fn is_out(&self, rank: usize) -> bool {
        self.lost.contains_key(&rank) || self.has_departed(rank)
    }

    fn has_departed(&self, rank: usize) -> bool {
        self.departed.contains_key(&rank) || departure(&self.log, rank).is_some()
    }

    /// The coordinator is gone: on to the next.
    fn advance(&mut self, actions: &mut Vec<Action<E>>) {
        let mut later = self.coordinator + 1..self.size;
        match later.find(|&rank| !self.is_out(rank)) {
            Some(rank) if rank == self.me => {
                self.coordinator = rank;
                self.stage = Stage::Collecting(BTreeMap::new());
                actions.push(Action::Collect(self.awaited()));
                self.conclude(actions);
            }
            Some(rank) => {
                self.coordinator = rank;
                self.stage = Stage::Seeking;
                actions.push(Action::Seek(rank));
            }
            None => self.part(Vec::new(), actions),
        }
    }

    /// All that can be heard of is heard: decides, or finds that it may not.
    fn conclude(&mut self, actions: &mut Vec<Action<E>>) {
        if !self.awaited().is_empty() {
            return;
        }
        let Stage::Collecting(reports) = &self.stage else {
            return;
        };
        let reports = reports.clone();
        let mut lost = self.lost.clone();
        for (rank, loss) in reports.values().flat_map(|report| &report.lost) {
            // Who has come is not gone, whatever somebody else saw; and the best account counts.
            if *rank != self.me && !reports.contains_key(rank) {
                let known = lost.entry(*rank).or_insert_with(|| loss.clone());
                if loss < known {
                    *known = loss.clone();
                }
            }
        }
        let best = reports
            .values()
            .max_by_key(|report| (report.synced, report.end()))
            .filter(|best| (best.synced, best.end()) > (self.synced, self.first + self.log.len()))
            .cloned()
            .unwrap_or_else(|| self.report());
        // Between them, the two logs have everything that is not in `self.departed`.
        let departed = |rank: usize| {
            departure(&best.log, rank)
                .or_else(|| departure(&self.log, rank))
                .or_else(|| self.departed.get(&rank).copied())
        };
        let alive = (0..self.size).filter(|rank| match (lost.get(rank), departed(*rank)) {
            (Some(loss), _) if loss.is_certain() => false,
            (_, Some(lives)) => lives && !reports.contains_key(rank),
            _ => true,
        });
        let alive = alive.count();
        let mute = lost.values().filter(|loss| **loss == Loss::Mute).count();
        let heard = reports
            .keys()
            .filter(|rank| departed(**rank).is_none())
            .count();
        let has_gap = self.first + self.log.len() < best.first;
        if !is_majority(1 + heard + mute, alive) || has_gap || !self.report().begins(&best) {
            return self.part(reports.into_keys().collect(), actions);
        }
        self.stage = Stage::Leading;
        self.synced = self.me;
        actions.push(Action::Lead);
        let known = (self.first + self.log.len()).saturating_sub(best.first);
        let mut entries: Vec<_> = best.log.into_iter().skip(known).collect();
        let tell = |entries: &mut Vec<E>, log: &[E], entry: E| {
            if !log.contains(&entry) && !entries.contains(&entry) {
                entries.push(entry);
            }
        };
        for (rank, loss) in &lost {
            if let Some(account) = loss.account()
                && !self.has_departed(*rank)
                && departure(&entries, *rank).is_none()
            {
                tell(&mut entries, &self.log, E::gone(*rank, account));
            }
        }
        let said =
            std::iter::once(&self.unheard).chain(reports.values().map(|report| &report.unheard));
        for entry in said.flatten() {
            tell(&mut entries, &self.log, entry.clone());
        }
        for entry in entries {
            self.record(entry.clone());
            actions.push(Action::Deliver(entry));
        }
        for (from, report) in &reports {
            self.admit(*from, report, actions);
        }
    }

    /// A rank follows this one from now on, unless it has heard something else.
    fn admit(&self, from: usize, report: &Report<E>, actions: &mut Vec<Action<E>>) {
        let out = self
            .lost
            .get(&from)
            .is_some_and(|loss| loss.account().is_some());
        // One that has not heard what is not kept any more cannot be told all.
        if out || report.end() < self.first || !report.begins(&self.report()) {
            return actions.push(Action::TurnAway(from));
        }
        let start = report.end();
        let entries = self.log[start - self.first..].to_vec();
        actions.push(Action::Admit {
            to: from,
            start,
            entries,
        });
    }

    fn part(&mut self, with: Vec<usize>, actions: &mut Vec<Action<E>>) {
        self.stage = Stage::Apart;
        let from = (0..self.size)
            .filter(|rank| *rank != self.me && !with.contains(rank) && !self.has_departed(*rank))
            .filter(|rank| !self.lost.get(rank).is_some_and(Loss::is_certain))
            .collect();
        actions.push(Action::CutOff { from, with });
    }
}

/// Whether a rank is gone by one of these, and may live all the same.
fn departure<E: Entry>(entries: &[E], rank: usize) -> Option<bool> {
    let mut departed = entries.iter().rev().filter_map(Entry::departed);
    departed.find_map(|(gone, lives)| (gone == rank).then_some(lives))
}

impl<E: PartialEq> Report<E> {
    /// Whether `other` goes on where this ends.
    fn begins(&self, other: &Self) -> bool {
        let from = self.first.max(other.first);
        self.end() <= other.end()
            && (from..self.end()).all(|at| self.log[at - self.first] == other.log[at - other.first])
    }
}

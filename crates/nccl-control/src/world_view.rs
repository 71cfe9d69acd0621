//! What an observer has seen: the state of every rank, and the ordered events.

use std::time::{Duration, Instant};

use super::coordinator_message::RankRecord;
use super::events::{EventLog, WorldEvent};
use super::phase::Phase;
use super::recordings::RecordingTarget;
use super::slot::Slot;
use super::straggler::StragglerReport;
use crate::departure::Departure;

/// How a rank ended.
///
/// ```
/// use nccl::control::RankEnd;
///
/// fn is_bad(end: &RankEnd) -> bool {
///     *end != RankEnd::Left
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RankEnd {
    /// It sent a leave message.
    Left,
    /// It reported an error.
    Failed(String),
    /// It reported nothing; how it ended, as far as known.
    Gone(String),
}

/// The state of one rank.
///
/// ```
/// fn runs(state: &nccl::control::RankState) -> bool {
///     state.phase.is_some() && state.end.is_none()
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankState {
    /// The rank.
    pub rank: usize,
    /// Its slot, once it has joined.
    pub slot: Option<Slot>,
    /// The name of its host, once it has joined.
    pub host: Option<String>,
    /// Its process id, as stated by the process, once it has joined.
    pub pid: Option<u32>,
    /// Its current or last phase, and for how long; the phase is `joined` until the rank sets one. `None` until the
    /// rank has joined.
    pub phase: Option<(String, Duration)>,
    /// How it ended, if it has.
    pub end: Option<RankEnd>,
}

/// The state of a world, as an `Observer` has seen it.
///
/// ```
/// fn is_ready(world: &nccl::control::WorldState) -> bool {
///     world.ended.is_none() && world.ranks.iter().all(|rank| rank.phase.is_some())
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorldState {
    /// Every rank; empty until the observer has found the world, unless it knew the number of ranks before.
    pub ranks: Vec<RankState>,
    /// Whether the observer is connected and the state is therefore current.
    pub connected: bool,
    /// Why the state will not change any more.
    pub ended: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct WorldView {
    ranks: Vec<ObservedRank>,
    log: EventLog,
    pub(super) connected: bool,
    ended: Option<String>,
}

#[derive(Clone, Debug)]
struct ObservedRank {
    known: RankRecord,
    at: Instant,
}

impl WorldView {
    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Forgets all ranks, because the world is in another generation.
    pub(super) fn clear(&mut self) {
        self.ranks.clear();
    }

    /// Forgets all ranks and records the new generation as an event.
    pub(super) fn reconfigure(&mut self, generation: u64) {
        self.clear();
        self.note(WorldEvent::NextGeneration { generation });
    }

    /// Returns the rank whose process has the id `pid` under `kernel`.
    pub(super) fn rank_of(&self, pid: u64, kernel: &str) -> Option<usize> {
        let known = self.ranks.iter().map(|observed| &observed.known);
        let mut its = known
            .filter(|known| known.phase.is_some() && known.pid == pid && known.kernel == kernel);
        its.next().map(|known| known.rank)
    }

    /// Sets the number of ranks.
    pub(super) fn set_size(&mut self, size: usize) {
        for rank in self.ranks.len()..size {
            let known = RankRecord {
                rank,
                slot: None,
                host: String::new(),
                pid: 0,
                kernel: String::new(),
                at: String::new(),
                phase: None,
                departure: None,
            };
            self.ranks.push(ObservedRank {
                known,
                at: Instant::now(),
            });
        }
    }

    /// Records the state of a rank, of which parts may be new. A coordinator that has taken over knows less about
    /// earlier events.
    pub(super) fn learn(&mut self, mut known: RankRecord) {
        let Some(observed) = self.ranks.get_mut(known.rank) else {
            return;
        };
        let before = &observed.known;
        if known.departure.is_none() {
            known.departure.clone_from(&before.departure);
        }
        let says_nothing = |(phase, _): &(Phase, Duration)| *phase == Phase::Joined;
        if before.phase.is_some() && known.phase.as_ref().is_none_or(says_nothing) {
            let since = observed.at.elapsed();
            let phase = before.phase.clone();
            known.phase = phase.map(|(phase, age)| (phase, age.saturating_add(since)));
        }
        if known.at.is_empty() {
            known.at.clone_from(&before.at);
        }
        let before = std::mem::replace(
            observed,
            ObservedRank {
                known: known.clone(),
                at: Instant::now(),
            },
        )
        .known;
        let RankRecord { rank, .. } = known;
        if let Some((phase, _)) = known.phase {
            let old = before.phase.map(|(phase, _)| phase);
            if old.is_none() {
                self.note(WorldEvent::Joined {
                    rank,
                    host: known.host,
                    pid: process(known.pid),
                });
            }
            match phase {
                Phase::Named(name) if old != Some(Phase::Named(name.clone())) => {
                    self.note(WorldEvent::Phase { rank, name });
                }
                _ => {}
            }
        }
        if let (None, Some(departure)) = (before.departure, known.departure) {
            self.note(WorldEvent::departed(rank, departure));
        }
    }

    /// Records which ranks have not entered an operation, or have entered it late.
    pub(super) fn late(&mut self, lateness: &StragglerReport) {
        WorldEvent::late(lateness).for_each(|event| self.note(event));
    }

    /// Records an operator's decision about which ranks continue.
    pub(super) fn decided(&mut self, ranks: Vec<usize>) {
        self.note(WorldEvent::SplitDecided { ranks });
    }

    /// Records that a rank has departed; the first reason stays.
    pub(super) fn record_departure(&mut self, rank: usize, departure: Departure) {
        let Some(observed) = self.ranks.get(rank) else {
            return;
        };
        if observed.known.departure.is_none() {
            let mut known = observed.known.clone();
            known.departure = Some(departure);
            self.learn(known);
        }
    }

    /// Records that no more events will follow.
    pub(super) fn end(&mut self, why: &str) {
        self.connected = false;
        if self.ended.is_none() {
            self.ended = Some(why.to_owned());
            let why = why.to_owned();
            self.note(WorldEvent::Ended { why });
        }
    }

    pub(super) fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    pub(super) fn departure(&self, rank: usize) -> Option<&Departure> {
        self.ranks.get(rank)?.known.departure.as_ref()
    }

    /// Returns the targets of a request for recordings: all ranks, departed ones included.
    pub(super) fn targets(&self) -> Vec<RecordingTarget> {
        let now = Instant::now();
        let ranks = self.ranks.iter().map(|ObservedRank { known, at }| {
            let joined = known.phase.is_some();
            let since = now.saturating_duration_since(*at);
            let phase = known.phase.as_ref().map(|(phase, age)| {
                let (name, age) = (phase.name(), age.saturating_add(since));
                let seconds = age.as_secs_f64();
                format!("it had been in phase {name:?} for {seconds:.1} s")
            });
            RecordingTarget {
                rank: known.rank,
                host: joined.then(|| known.host.clone()),
                pid: joined.then(|| process(known.pid)),
                at: (!known.at.is_empty()).then(|| known.at.clone()),
                end: known.departure.as_ref().map(ToString::to_string),
                known: phase,
            }
        });
        ranks.collect()
    }

    /// Returns the listening addresses of the present ranks from `first` on.
    pub(super) fn listening_addresses(&self, first: usize) -> Vec<(usize, String)> {
        let others = self
            .ranks
            .iter()
            .skip(first)
            .map(|observed| &observed.known);
        others
            .filter(|known| known.departure.is_none() && !known.at.is_empty())
            .map(|known| (known.rank, known.at.clone()))
            .collect()
    }

    fn note(&mut self, event: WorldEvent) {
        self.log.note(event);
    }

    /// As [`EventLog::read`].
    pub(super) fn read(&self, next: &mut u64) -> Option<WorldEvent> {
        self.log.read(next)
    }

    pub(super) fn state(&self) -> WorldState {
        let now = Instant::now();
        let ranks = self.ranks.iter().map(|ObservedRank { known, at }| {
            let since = now.saturating_duration_since(*at);
            let joined = known.phase.is_some();
            RankState {
                rank: known.rank,
                slot: known.slot,
                host: joined.then(|| known.host.clone()),
                pid: joined.then(|| process(known.pid)),
                phase: known
                    .phase
                    .as_ref()
                    .map(|(phase, age)| (phase.name().to_owned(), age.saturating_add(since))),
                end: known.departure.clone().map(|departure| match departure {
                    Departure::Left => RankEnd::Left,
                    Departure::Failed(why) => RankEnd::Failed(why.to_string()),
                    Departure::Lost(lost) => RankEnd::Gone(lost.to_string()),
                }),
            }
        });
        WorldState {
            ranks: ranks.collect(),
            connected: self.connected,
            ended: self.ended.clone(),
        }
    }
}

fn process(pid: u64) -> u32 {
    u32::try_from(pid).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::KEPT;

    fn known(phase: Phase, departure: Option<Departure>) -> RankRecord {
        RankRecord {
            rank: 1,
            slot: None,
            host: String::from("h"),
            pid: 7,
            kernel: String::from("k"),
            at: String::from("unix:/x.1"),
            phase: Some((phase, Duration::ZERO)),
            departure,
        }
    }

    fn phase_said(name: &str) -> Phase {
        Phase::Named(name.to_owned())
    }

    #[test]
    fn each_change_is_one_event_and_nothing_else_is() {
        let mut board = WorldView::default();
        board.set_size(2);
        board.learn(known(Phase::Joined, None));
        board.learn(known(Phase::Joined, None));
        board.learn(known(phase_said("load"), None));
        let departure = Departure::lost(crate::departure::LossKind::Unknown);
        board.learn(known(phase_said("load"), Some(departure.clone())));
        board.learn(known(phase_said("load"), Some(departure)));
        board.record_departure(1, Departure::Left);
        board.record_departure(7, Departure::Left);
        board.end("over");
        board.end("again");
        let mut next = 0;
        let events: Vec<_> = std::iter::from_fn(|| board.read(&mut next)).collect();
        assert_eq!(events.len(), 4, "{events:?}");
        assert!(matches!(
            &events[0],
            WorldEvent::Joined {
                rank: 1,
                pid: 7,
                ..
            }
        ));
        assert!(matches!(&events[1], WorldEvent::Phase { name, .. } if name == "load"));
        assert!(matches!(&events[2], WorldEvent::Gone { how, .. } if how == "it died"));
        assert!(matches!(&events[3], WorldEvent::Ended { why } if why == "over"));
        assert_eq!(board.listening_addresses(1), []);
    }

    #[test]
    fn who_reads_too_slowly_is_told_how_much_is_missing() {
        let mut board = WorldView::default();
        board.set_size(2);
        for n in 0..KEPT + 10 {
            board.learn(known(phase_said(&n.to_string()), None));
        }
        let mut next = 0;
        // One more for having joined.
        assert_eq!(
            board.read(&mut next),
            Some(WorldEvent::Missed { events: 11 })
        );
        let rest = std::iter::from_fn(|| board.read(&mut next)).count();
        assert_eq!(rest, KEPT);
    }
}

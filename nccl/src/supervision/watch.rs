//! The notices that a rank's line receives, and the communicators they concern.
//!
//! One watch per line, made with the first communicator of several ranks. It runs on the thread that
//! reads the connections, which must not wait: so it only writes verdicts, and leaves what follows from
//! them to other threads. A fault of a communicator that is not registered is kept for a while: a rank
//! may give the communicator up before the others have finished making it.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use super::docket::{self, Docket, Heard, Verdict, Who};
use super::late::late;
use super::trials::{FAULT, REPORT, SYMPTOM, Trials, answer};
use crate::communicator::{end_struck, leave_struck};
use crate::events;
use crate::peers::{Asker, Ending, Supervisor};
use crate::rendezvous::launched;
use crate::rendezvous::{Attendance, Line, Member, Notice};
use crate::stats;
use crate::sync::Mutex;
use crate::threads;
use nccl_base::departure::{Departure, How};
use nccl_base::fault::{Cause, Fault, Place};
use nccl_base::roster::Roster;
use nccl_core::supervision::stragglers::Inquired;
use nccl_core::supervision::watchdog;

/// Report of a rank that has nothing of the communicator any more.
pub(super) const FREED: &[u8] = &[1];

/// Patience in the report of a rank that has nothing to end: other ranks wait for those that have.
const PATIENCE: Duration = Duration::from_secs(3);

/// A communicator, as seen by the watch that ends it.
pub(super) trait Watched: Supervisor {
    /// Begins to end a struck communicator: no operation uses what it protects any more. Returns `None` while it is made or
    /// dropped: the thread that does so checks the verdict.
    fn begin_end(&self) -> Option<Ending>;

    /// Logs the verdict, once.
    fn tell(&self);
}

/// See the module.
pub(crate) struct Watch {
    line: Weak<Line>,
    rank: usize,
    generation: u64,
    /// The members of the line.
    members: Arc<OnceLock<Vec<Member>>>,
    docket: Docket<Arc<Fault>, Weak<dyn Watched>, Departure>,
    /// The verdict that was written last.
    latest: Mutex<Option<Arc<Fault>>>,
    /// Trials of communicators on which a rank ran out of time.
    trials: Trials,
    /// Number of stragglers that this rank heard of, for the log.
    stragglers: AtomicU64,
}

type Struck = docket::Struck<Weak<dyn Watched>>;
/// The key and the members of a communicator.
type Absent = (Arc<str>, Arc<[usize]>);

impl Watch {
    /// Starts to listen to the notices of `line`.
    pub(crate) fn start(line: &Arc<Line>) -> Arc<Self> {
        let watch = Arc::new(Self {
            line: Arc::downgrade(line),
            rank: line.rank(),
            generation: line.job().1,
            members: line.members(),
            docket: Docket::new(),
            latest: Mutex::new(None),
            trials: Trials::default(),
            stragglers: AtomicU64::new(0),
        });
        let listening = Arc::clone(&watch);
        line.on_notice(move |notice| listening.hear(notice));
        // Departures that another handler has heard.
        for (rank, departure) in line.departures() {
            watch.hear(&Notice::Gone { rank, departure });
        }
        watch
    }

    /// Registers a board: from now on, faults of the communicator come to it, and an earlier one is its verdict at once.
    /// Returns whether this rank has already reported the end to the others.
    pub(super) fn register(
        &self,
        key: &Arc<str>,
        who: &Who<'_>,
        verdict: &Arc<Verdict<Arc<Fault>>>,
        board: Weak<dyn Watched>,
    ) -> bool {
        let death = |rank: usize, how: &Departure| self.death(rank, how, who);
        self.docket.register(key, who, verdict, board, death)
    }

    /// Returns the docket of verdicts.
    pub(super) fn docket(&self) -> &Docket<Arc<Fault>, Weak<dyn Watched>, Departure> {
        &self.docket
    }

    /// Returns the verdict that was written last.
    pub(crate) fn latest(&self) -> Option<Arc<Fault>> {
        self.latest.lock().clone()
    }

    /// Replaces the last verdict by `fault`, if that is the same with more detail.
    pub(super) fn complete_latest(&self, fault: Option<&Arc<Fault>>) {
        let mut latest = self.latest.lock();
        if latest.as_deref() == fault.map(|fault| &**fault) {
            *latest = fault.cloned();
        }
    }

    pub(super) fn set_latest(&self, fault: &Arc<Fault>) {
        *self.latest.lock() = Some(Arc::clone(fault));
        if let Some(line) = self.line.upgrade() {
            line.tell_of(fault);
        }
    }

    fn hear(&self, notice: &Notice) {
        match notice {
            Notice::Announced { from, topic, bytes } if topic.starts_with(SYMPTOM) => {
                self.question(&topic[SYMPTOM.len()..], *from, bytes);
            }
            Notice::Told { from, topic, bytes } => {
                if let Some(key) = topic.strip_prefix(REPORT)
                    && let Ok(report) = serde_json::from_slice(bytes)
                {
                    self.trials.receive(key, *from, report);
                }
            }
            Notice::Announced { topic, bytes, .. } => {
                let Some(key) = topic.strip_prefix(FAULT) else {
                    return;
                };
                match Fault::decode(bytes) {
                    Ok((fault, members)) => self.strike(key, Arc::new(fault), members),
                    Err(broken) => {
                        tracing::error!(name: "nccl.internal", target: "nccl", what = "fault", why = broken.0, "a broken fault was announced");
                    }
                }
            }
            Notice::Gone {
                departure: Departure::Left,
                ..
            } => {}
            Notice::Gone { rank, departure } => {
                self.bury(*rank, departure);
            }
            Notice::CutOff { from, why } => self.part(from, why),
            Notice::Inquired {
                key,
                turn,
                is_sample,
            } => {
                let asker = Inquirer {
                    line: Weak::clone(&self.line),
                    board: self.docket.find(key),
                };
                watchdog::answer(Inquired::new(Box::new(asker), key, *turn, *is_sample));
            }
            Notice::Late(lateness) => {
                let members = self.docket.members_of(&lateness.subject.key);
                let roster = members.map(|members| self.roster(&members));
                late(
                    lateness,
                    &roster.unwrap_or_default(),
                    self.rank,
                    &self.stragglers,
                );
            }
            Notice::Skewed { key, skew, last } => {
                if let Some(name) = self.docket.name_of(key) {
                    stats::arrival_skew(&name, *skew, *last);
                }
            }
        }
    }

    /// Handles a rank's timeout on a communicator: opens a trial, and sends this rank's report to the elector.
    fn question(&self, key: &str, from: usize, bytes: &[u8]) {
        let Ok((fault, members)) = Fault::decode(bytes) else {
            return;
        };
        let own = members.iter().position(|member| *member == self.rank);
        if self.docket.has_verdict(key) {
            return;
        }
        let is_own = |key: &str| self.docket.find(key).is_some();
        let elector = self.trials.hear(key, from, fault, &members, is_own);
        if let (Some(rank), Some(elector), Some(line)) = (own, elector, self.line.upgrade()) {
            answer(&line, key, rank, elector);
        }
    }

    pub(super) fn trials(&self) -> &Trials {
        &self.trials
    }

    /// Strikes the communicators whose members this rank cannot reach any more.
    fn part(&self, from: &[usize], why: &str) {
        let fault = |_: &str, who: &Who<'_>| {
            let own = who.members.iter().position(|rank| *rank == self.rank)?;
            let roster = self.roster(who.members);
            let place = Place {
                communicator: who.name,
                roster: &roster,
                rank: own,
                host: &crate::host::name(),
                pid: std::process::id(),
                generation: self.generation,
            };
            let places = who.members.iter().enumerate();
            let places = places.filter(|(_, rank)| from.contains(rank));
            let places: Vec<_> = places.map(|(place, _)| place).collect();
            (!places.is_empty()).then(|| {
                let cause = Cause::cut_off(why, &places, &roster);
                Arc::new(Fault::new(cause, place))
            })
        };
        self.respond(self.docket.strike_all(fault), Vec::new());
        let how = Departure::lost(How::CutOff(why.to_owned()));
        for &rank in from {
            self.docket.bury(rank, how.clone(), |_| None);
        }
    }

    /// Strikes a communicator that a rank has given up.
    pub(super) fn strike(&self, key: &str, fault: Arc<Fault>, members: Vec<usize>) {
        match self.docket.strike(key, fault) {
            Heard::Struck(struck) => self.respond(vec![struck], Vec::new()),
            Heard::Late => {}
            Heard::Kept => self.respond(Vec::new(), vec![(key.into(), members.into())]),
        }
    }

    /// Ends all registered communicators but those with the keys `kept`: this rank is done with them, and so
    /// are the others.
    pub(crate) fn end_all(&self, why: &str, kept: &[&str]) {
        let fault = |key: &str, who: &Who<'_>| {
            if kept.contains(&key) {
                return None;
            }
            // The same on all ranks.
            let first = who.members.first().copied().unwrap_or_default();
            let (host, pid) = self.person(first);
            let place = Place {
                communicator: who.name,
                roster: &self.roster(who.members),
                rank: 0,
                host: &host,
                pid,
                generation: self.generation,
            };
            Some(Arc::new(Fault::new(Cause::asked_of_all(why), place)))
        };
        self.respond(self.docket.strike_all(fault), Vec::new());
    }

    pub(super) fn person(&self, rank: usize) -> (String, u32) {
        let person = self.members.get().and_then(|members| members.get(rank));
        match person {
            Some(member) => (member.host.clone(), member.pid),
            None => (String::from("unknown host"), 0),
        }
    }

    fn roster(&self, members: &[usize]) -> Roster {
        Roster::new(members, &launched(self.members.get()))
    }

    /// Returns whether both ranks are one, or a cut that isolates one of them isolates the other.
    fn are_beside(&self, one: usize, other: usize) -> bool {
        let member = |rank: usize| self.members.get()?.get(rank);
        let beside = |one: Option<&Member>| Some(one?.is_beside(member(other)?));
        one == other || beside(member(one)) == Some(true)
    }

    /// Strikes the communicators of a rank that cannot be reached any more.
    fn bury(&self, rank: usize, how: &Departure) {
        let death = |who: &Who<'_>| self.death(rank, how, who);
        self.respond(self.docket.bury(rank, how.clone(), death), Vec::new());
    }

    /// Returns the fault that a rank's departure means for a communicator; `None` for a non-member, and for a rank that left
    /// in order.
    pub(super) fn death(&self, rank: usize, how: &Departure, who: &Who<'_>) -> Option<Arc<Fault>> {
        let place = who.members.iter().position(|&member| member == rank)?;
        let (host, pid) = self.person(rank);
        let roster = self.roster(who.members);
        let cause = match how {
            Departure::Left => return None,
            Departure::Failed(why) => Cause::failed(why),
            Departure::Lost(lost) if lost.may_live() => {
                let members = who.members.iter().enumerate();
                // A refusal comes from the host, and says nothing of its other ranks.
                let is_lost = |member| match lost.is_refused() {
                    true => member == rank,
                    false => self.are_beside(rank, member),
                };
                let there = members.filter(|(_, member)| is_lost(**member));
                let there = there.map(|(place, _)| place).collect();
                Cause::host_lost(&host, there, &roster, lost)
            }
            Departure::Lost(lost) => Cause::died(lost),
        };
        let place = Place {
            communicator: who.name,
            roster: &roster,
            rank: place,
            host: &host,
            pid,
            generation: self.generation,
        };
        Some(Arc::new(Fault::new(cause, place)))
    }

    /// Ends what was struck, all of it together, on a thread of its own; of what is `absent` there is nothing to end here any
    /// more, or not yet.
    fn respond(&self, struck: Vec<Struck>, mut absent: Vec<Absent>) {
        let (mut boards, mut endings) = (Vec::new(), Vec::new());
        absent.iter().for_each(|(key, _)| self.trials.close(key));
        for one in struck {
            self.trials.close(&one.key);
            match one.board.upgrade() {
                Some(board) => {
                    endings.extend(board.begin_end());
                    boards.push(board);
                }
                None => absent.push((one.key, one.members)),
            }
        }
        if boards.is_empty() && absent.is_empty() {
            return;
        }
        boards.iter().for_each(|board| board.tell());
        let line = Weak::clone(&self.line);
        let left = endings.clone();
        let respond = move || {
            if let Some(line) = line.upgrade() {
                absent.retain(|(_, members)| members.contains(&line.rank()));
                for (key, members) in &absent {
                    end_alone(&line, key, members, FREED, PATIENCE);
                }
            }
            end_struck(endings);
            // This thread also releases its hold on the boards: the last release says goodbye.
            drop(boards);
        };
        let spawned = threads::spawn("nccl-abort", respond);
        if let Err(error) = spawned {
            events::no_thread("to abort communicators", &error);
            // Callers inside the communicators return, and the other ranks do not wait for this one.
            leave_struck(left);
        }
    }
}

/// The answer's way to the rank that asked about a collective.
struct Inquirer {
    line: Weak<Line>,
    /// `None` when this rank has no such communicator.
    board: Option<Weak<dyn Watched>>,
}

impl Asker for Inquirer {
    fn is_there(&self) -> bool {
        self.line.strong_count() > 0
    }

    fn supervisor(&self) -> Option<Arc<dyn Supervisor>> {
        Some(self.board.as_ref()?.upgrade()?)
    }

    fn connection(&self) -> *const () {
        self.line.as_ptr().cast()
    }

    fn answer(&self, key: &str, turn: u64, entered: Option<Duration>, last: &str) {
        if let Some(line) = self.line.upgrade() {
            line.attends(Attendance {
                key: key.to_owned(),
                turn,
                entered,
                last: last.to_owned(),
            });
        }
    }
}

/// Returns the topic of the end of all aborts.
pub(super) fn of_all(key: &str) -> String {
    format!("{key}/all")
}

/// Reports finally how far this rank has let go, without waiting for other ranks.
pub(super) fn end_alone(
    line: &Line,
    key: &str,
    members: &Arc<[usize]>,
    part: &[u8],
    patience: Duration,
) {
    for topic in [key, &of_all(key)] {
        line.end_alone(topic, members, part, patience);
    }
}

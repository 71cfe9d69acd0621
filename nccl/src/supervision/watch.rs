//! What a rank's line hears, and which of its communicators that concerns.
//!
//! One for each line, made with the first communicator of several ranks. It hears on the thread that
//! reads the connections, which must not wait: so it only writes verdicts, and leaves what follows from
//! them to threads. What it hears of a communicator that is not registered is kept for a while: a rank
//! may give it up before the others have come back from making it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use super::board::{Board, FREED};
use super::fault::{Cause, Fault, Place};
use crate::communicator::lock;
use crate::rendezvous::{Departure, Line, Member, Notice};

/// What announcements of faults are called; the communicator's key follows.
pub(super) const FAULT: &str = "fault/";

/// How many faults are kept of communicators that this rank does not have.
const EARLY: usize = 256;

/// The patience of a rank that has nothing to end: others wait for those who have.
const PATIENCE: Duration = Duration::from_secs(3);

/// The verdict on a communicator: written once.
pub(super) type Verdict = Arc<OnceLock<Arc<Fault>>>;

/// See the module.
pub(crate) struct Watch {
    line: Weak<Line>,
    /// Who the ranks of the line are.
    members: Arc<OnceLock<Vec<Member>>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    boards: HashMap<Arc<str>, Entry>,
    /// Faults of communicators that were not there.
    early: VecDeque<Early>,
    gone: HashMap<usize, Gone>,
    heard: u64,
}

struct Entry {
    members: Arc<[usize]>,
    name: Arc<str>,
    verdict: Verdict,
    /// Weak, so that nobody but the communicators keeps the line open.
    board: Weak<Board>,
}

/// A communicator that was struck: its board here, its key, and which ranks are its members.
type Struck = (Weak<Board>, Arc<str>, Arc<[usize]>);

struct Early {
    key: String,
    fault: Arc<Fault>,
    heard: u64,
}

struct Gone {
    how: String,
    heard: u64,
}

impl Watch {
    /// Begins to listen.
    pub(crate) fn start(line: &Arc<Line>) -> Arc<Self> {
        let watch = Arc::new(Self {
            line: Arc::downgrade(line),
            members: line.members(),
            state: Mutex::default(),
        });
        let listening = Arc::clone(&watch);
        line.on_notice(move |notice| listening.hear(notice));
        // Those of whom another handler has heard.
        for (rank, departure) in line.departures() {
            watch.hear(&Notice::Gone { rank, departure });
        }
        watch
    }

    /// From now on, what happens to a communicator comes to its board; what has happened already is its
    /// verdict at once.
    pub(super) fn register(
        &self,
        key: &Arc<str>,
        members: &Arc<[usize]>,
        name: &Arc<str>,
        verdict: &Verdict,
        board: Weak<Board>,
    ) {
        let mut state = lock(&self.state);
        let early = state.early.iter().position(|early| *early.key == **key);
        let early = early.and_then(|at| state.early.remove(at));
        let dead = members
            .iter()
            .filter_map(|rank| Some((state.gone.get(rank)?.heard, *rank)))
            .min();
        let first = match (early, dead) {
            (Some(early), Some((heard, _))) if early.heard < heard => Some(early.fault),
            (Some(early), None) => Some(early.fault),
            (_, Some((_, rank))) => self.fault_of(rank, &state.gone[&rank].how, members, name),
            (None, None) => None,
        };
        if let Some(fault) = first {
            let _ = verdict.set(fault);
        }
        let entry = Entry {
            members: Arc::clone(members),
            name: Arc::clone(name),
            verdict: Arc::clone(verdict),
            board,
        };
        state.boards.insert(Arc::clone(key), entry);
    }

    /// Whether there was a verdict by then.
    pub(super) fn forget(&self, key: &str) -> bool {
        let mut state = lock(&self.state);
        let entry = state.boards.remove(key);
        entry.is_some_and(|entry| entry.verdict.get().is_some())
    }

    fn hear(&self, notice: &Notice) {
        match notice {
            Notice::Announced { topic, bytes, .. } => {
                let Some(key) = topic.strip_prefix(FAULT) else {
                    return;
                };
                match Fault::decode(bytes) {
                    Ok((fault, members)) => self.strike(key, Arc::new(fault), members),
                    Err(broken) => {
                        tracing::error!(target: "nccl", why = broken.0, "a broken fault was announced");
                    }
                }
            }
            Notice::Gone {
                departure: Departure::Left,
                ..
            } => {}
            Notice::Gone { rank, departure } => {
                let how = match departure {
                    Departure::Failed(chain) => format!("failed: {chain}"),
                    departure => format!("is gone: {departure}"),
                };
                self.bury(*rank, how);
            }
        }
    }

    /// A communicator was given up.
    fn strike(&self, key: &str, fault: Arc<Fault>, members: Vec<usize>) {
        let mut state = lock(&self.state);
        state.heard += 1;
        let heard = state.heard;
        if let Some(entry) = state.boards.get(key) {
            let first = entry.verdict.set(fault).is_ok();
            let board = Weak::clone(&entry.board);
            drop(state);
            if first {
                self.respond(vec![(board, Arc::from(key), members.into())]);
            }
            return;
        }
        if state.early.iter().any(|early| early.key == key) {
            return;
        }
        if state.early.len() == EARLY {
            state.early.pop_front();
        }
        let key = key.to_owned();
        state.early.push_back(Early {
            key: key.clone(),
            fault,
            heard,
        });
        drop(state);
        self.respond(vec![(Weak::new(), key.into(), members.into())]);
    }

    /// Ends all communicators that there are: this rank is done with them, and so are the others.
    pub(crate) fn end_all(&self, why: &str) {
        let state = lock(&self.state);
        let mut struck = Vec::new();
        for (key, entry) in &state.boards {
            // The same on all ranks.
            let first = entry.members.first().copied().unwrap_or_default();
            let (host, pid) = self.person(first);
            let place = Place {
                communicator: &entry.name,
                rank: 0,
                host: &host,
                pid,
            };
            let fault = Fault::new(Cause::asked(why), place);
            if entry.verdict.set(Arc::new(fault)).is_ok() {
                let members = Arc::clone(&entry.members);
                struck.push((Weak::clone(&entry.board), Arc::clone(key), members));
            }
        }
        drop(state);
        self.respond(struck);
    }

    fn person(&self, rank: usize) -> (String, u32) {
        let person = self.members.get().and_then(|members| members.get(rank));
        match person {
            Some(member) => (member.host.clone(), member.pid),
            None => (String::from("unknown host"), 0),
        }
    }

    /// A rank can be reached no more.
    fn bury(&self, rank: usize, how: String) {
        let mut state = lock(&self.state);
        if state.gone.contains_key(&rank) {
            return;
        }
        state.heard += 1;
        let heard = state.heard;
        let mut struck = Vec::new();
        for (key, entry) in &state.boards {
            if let Some(fault) = self.fault_of(rank, &how, &entry.members, &entry.name)
                && entry.verdict.set(fault).is_ok()
            {
                let members = Arc::clone(&entry.members);
                struck.push((Weak::clone(&entry.board), Arc::clone(key), members));
            }
        }
        state.gone.insert(rank, Gone { how, heard });
        drop(state);
        self.respond(struck);
    }

    /// What the death of a rank is to a communicator; `None` if it is not a member.
    fn fault_of(
        &self,
        rank: usize,
        how: &str,
        members: &[usize],
        communicator: &str,
    ) -> Option<Arc<Fault>> {
        let place = members.iter().position(|&member| member == rank)?;
        let (host, pid) = self.person(rank);
        let place = Place {
            communicator,
            rank: place,
            host: &host,
            pid,
        };
        Some(Arc::new(Fault::new(Cause::gone(how.to_owned()), place)))
    }

    /// Ends what was struck, on threads of their own.
    fn respond(&self, struck: Vec<Struck>) {
        for (board, key, members) in struck {
            let line = Weak::clone(&self.line);
            let board = board.upgrade();
            let ending = board.as_ref().and_then(|board| board.begin_end());
            // What this thread had a hold of is let go of there, too: the last of them says goodbye.
            let respond = move || match (board, ending) {
                (Some(_board), Some((target, begun))) => target.end(begun),
                (Some(_board), None) => {}
                (None, _) => {
                    // There is nothing to end here, or not any more, or not yet.
                    if let Some(line) = line.upgrade()
                        && members.contains(&line.rank())
                    {
                        line.end_alone(&key, &members, FREED, PATIENCE);
                    }
                }
            };
            let spawned = std::thread::Builder::new()
                .name(String::from("nccl-abort"))
                .spawn(respond);
            if let Err(error) = spawned {
                tracing::error!(target: "nccl", %error, "no thread to abort a communicator");
            }
        }
    }
}

//! A member of the world that is not a rank: it sees what becomes of the ranks, and survives them.
//!
//! One thread per observer ([`scout`](super::scout)) finds the world and looks after what has to be told;
//! what comes is read by the reactor.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::board::{Board, WorldState};
use super::environment::Rendezvous;
use super::events::{Events, Wakers};
use super::incoming::{Answer, Push};
use super::node;
use super::process;
use super::reader::{Reader, Sink};
use super::recordings::Target;
use super::request::Request;
use super::scout;
use super::server::Job;
use super::succession::Loss;
#[cfg(doc)]
use super::world::World;
use crate::departure::{Lost, ProcessEnd};
use crate::error::{Error, ErrorKind, Result};
use crate::forked::{self, Resident};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::time::deadline_after;
use nccl_base::from_outside::{FromOutside, world as world_limit};

/// Sees what becomes of the ranks, and is none of them.
pub struct Observer {
    shared: Resident<Arc<Shared>>,
}

pub(super) struct Shared {
    pub(super) rendezvous: Rendezvous,
    state: Mutex<State>,
    changed: Condvar,
    pub(super) wakers: Wakers,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) board: Board,
    /// Which rank this observer hears, or heard last, and of which epoch.
    pub(super) coordinator: usize,
    epoch: u64,
    /// The epoch whose ranks have the numbers that whoever started them has given them, if there is one.
    first: Option<u64>,
    /// The epoch to which the ranks go on.
    pub(super) next: Option<u64>,
    /// Counts connections: of one that is not the last, nothing is heard.
    pub(super) ear: u64,
    pub(super) link: Option<Arc<Reader>>,
    /// How the connection ended.
    pub(super) broken: Option<Lost>,
    /// Whether it has ever been there.
    pub(super) was_there: bool,
    /// The ranks that this process has started.
    pub(super) started: Vec<(usize, u64)>,
    pub(super) words: Vec<Word>,
    pub(super) stop: bool,
    /// Its thread is to cut its connections.
    #[cfg(test)]
    pub(super) cut: bool,
    /// The thread has nothing left to do.
    pub(super) done: bool,
}

/// How a process ended.
#[derive(Clone, Debug)]
pub(super) struct Word {
    pub(super) rank: usize,
    pub(super) pid: u64,
    pub(super) end: ProcessEnd,
    /// Those who have to know do.
    pub(super) told: bool,
}

/// How long a dropped observer takes to say what it still has to say.
const FAREWELL: Duration = Duration::from_secs(2);

impl Observer {
    /// Observes the world that meets at this rendezvous, whose rank is not looked at: waits until rank 0
    /// is there.
    pub fn join(rendezvous: Rendezvous) -> Result<Self> {
        // The thread keeps the limit; it ends a little later than its last try.
        let limit = world_limit(rendezvous.timeout).saturating_add(Duration::from_secs(5));
        let observer = Self::start(rendezvous)?;
        let deadline = deadline_after(limit);
        let mut state = observer.shared.state.lock();
        while !state.was_there {
            if let Some(why) = state.board.ended() {
                return Err(Error::rendezvous(why));
            }
            if Instant::now() >= deadline {
                return Err(Error::rendezvous("the observer's thread stands still"));
            }
            observer.shared.wait(&mut state, deadline);
        }
        drop(state);
        Ok(observer)
    }

    /// As [`join`](Self::join), but comes back at once, and looks for rank 0 in the background: for whoever
    /// starts the ranks. When rank 0 does not answer in time, that is the observer's last event.
    pub fn start(rendezvous: Rendezvous) -> Result<Self> {
        rendezvous.job.check()?;
        FromOutside::of_process()?;
        let limit = world_limit(rendezvous.timeout);
        Self::start_with(rendezvous.timeout(limit), true)
    }

    /// As [`start`](Self::start), for the launcher of the ranks, whose limit is its own: the environment has those of the
    /// ranks.
    pub fn start_by_number(rendezvous: Rendezvous) -> Result<Self> {
        Self::start_with(rendezvous, true)
    }

    /// As [`start_by_number`](Self::start_by_number), for whoever has started ranks of which some have been started again, alone: the
    /// ranks of the world are others by then, and it is their processes that tell which.
    pub fn start_by_process(rendezvous: Rendezvous) -> Result<Self> {
        Self::start_with(rendezvous, false)
    }

    fn start_with(rendezvous: Rendezvous, numbered: bool) -> Result<Self> {
        forked::begin()?;
        let mut state = State::default();
        state.board.set_size(rendezvous.world_size);
        state.epoch = rendezvous.job.epoch;
        state.first = numbered.then_some(rendezvous.job.epoch);
        let shared = Arc::new(Shared {
            rendezvous,
            state: Mutex::new(state),
            changed: Condvar::new(),
            wakers: Wakers::default(),
        });
        let scout = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(String::from("nccl-observer"))
            .spawn(move || match node::is_chosen() {
                true => node::observe(&scout),
                false => scout::run(&scout),
            })
            .map_err(Error::io("starting an observer's thread"))?;
        Ok(Self {
            shared: Resident::new(shared),
        })
    }

    /// How it stands with every rank, as far as this observer has heard.
    pub fn snapshot(&self) -> WorldState {
        if forked::is_child() {
            return State::default().board.state();
        }
        self.shared.state.lock().board.state()
    }

    /// What has happened since this observer has been there, and what will. Each reader has its own place;
    /// the last 4096 events are kept.
    pub fn events(&self) -> Events {
        Events::of_observer(&self.shared)
    }

    /// Says that this process has started `rank`, as process `pid`, and will say how it ends, with
    /// [`rank_ended`](Self::rank_ended). The rank is the one as which the process was started, also when the ranks have other
    /// numbers since in a later epoch.
    pub fn rank_started(&self, rank: usize, pid: u32) -> Result<()> {
        forked::check()?;
        let mut state = self.shared.state.lock();
        check_rank(rank, &state)?;
        let entry = (rank, u64::from(pid));
        state.started.retain(|&(other, _)| other != rank);
        state.started.push(entry);
        state.watch(&[entry]);
        drop(state);
        self.shared.notify();
        Ok(())
    }

    /// Says how the process `pid` of `rank` ended, and what it wrote to stderr at last (of which the last
    /// lines count; it may be empty). Every rank's errors then say so, instead of "its connection closed
    /// without goodbye". Says nothing when the rank has said goodbye, or why it fails. The rank is the one as which the process
    /// was started.
    pub fn rank_ended(&self, rank: usize, pid: u32, how: &str, stderr_tail: &str) -> Result<()> {
        self.process_ended(rank, pid, ProcessEnd::in_words(how, stderr_tail))
    }
}

impl Observer {
    /// As [`rank_ended`](Self::rank_ended), for who knows how, and not only the words for it.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`].
    pub fn process_ended(&self, rank: usize, pid: u32, end: ProcessEnd) -> Result<()> {
        forked::check()?;
        let mut state = self.shared.state.lock();
        check_rank(rank, &state)?;
        let word = Word {
            rank,
            pid: pid.into(),
            end,
            told: false,
        };
        state.words.push(word);
        let last = state.words.len() - 1;
        if state.link.is_some() {
            state.tell(last);
        }
        drop(state);
        self.shared.notify();
        Ok(())
    }

    /// Whether it has found the world, and has not lost it for good.
    pub fn is_on(&self) -> bool {
        let state = self.shared.state.lock();
        state.was_there && state.board.ended().is_none()
    }

    /// Where somebody who is new may ask for the one that coordinates.
    pub fn doors(&self) -> Vec<String> {
        self.shared.state.lock().doors()
    }

    /// Whom to ask for recordings.
    pub(super) fn targets(&self) -> (Job, Vec<Target>) {
        if forked::is_child() {
            return (State::default().job(&self.shared.rendezvous), Vec::new());
        }
        let state = self.shared.state.lock();
        (state.job(&self.shared.rendezvous), state.board.targets())
    }
}

/// In an epoch whose ranks have other numbers than whoever started them gave them, the process tells which it is.
fn check_rank(rank: usize, state: &State) -> Result<()> {
    let world_size = state.board.size();
    if world_size == 0 || rank < world_size || !state.is_numbered() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::NoSuchRank {
        role: "rank",
        rank,
        world_size,
    }))
}

pub(super) fn send(link: &Reader, id: u64, request: Request) {
    link.connection.enqueue(request.encode(id));
    link.connection.flush_quietly();
}

impl State {
    /// The job of the epoch that is observed.
    pub(super) fn job(&self, rendezvous: &Rendezvous) -> Job {
        let mut job = rendezvous.job.clone();
        job.epoch = self.epoch;
        job
    }

    /// From now on, another epoch is observed.
    pub(super) fn set_epoch(&mut self, epoch: u64) {
        self.next = self.next.filter(|next| *next > epoch);
        if self.epoch != epoch {
            self.epoch = epoch;
            match self.was_there {
                true => self.board.go_on(epoch),
                false => self.board.clear(),
            }
        }
    }

    /// Whether the ranks have the numbers that this process has given them.
    pub(super) fn is_numbered(&self) -> bool {
        self.first == Some(self.epoch)
    }

    /// Where the ranks listen that are there, for somebody who is new.
    pub(super) fn doors(&self) -> Vec<String> {
        let doors = self.board.doors(0).into_iter();
        doors.map(|(_, at)| at).collect()
    }

    /// Which rank of the epoch that is observed a process is that was started as `rank`: in a later epoch than that,
    /// the process tells.
    pub(super) fn rank_now(&self, rank: usize, pid: u64) -> Option<usize> {
        match self.is_numbered() {
            true => Some(rank),
            false => self.board.rank_of(pid, process::kernel()),
        }
    }

    /// Tells the coordinator whose parent this process is.
    pub(super) fn watch_started(&self) {
        self.watch(&self.started);
    }

    /// A rank is there: whoever started its process says so, and how it has ended since.
    fn watch_now(&self, rank: usize, pid: u64) {
        let is_its = |&&(started, other): &&(usize, u64)| {
            other == pid && self.rank_now(started, other) == Some(rank)
        };
        if let Some(&entry) = self.started.iter().find(is_its) {
            self.watch(&[entry]);
        }
        for (index, word) in self.words.iter().enumerate() {
            if !word.told && word.pid == pid && self.rank_now(word.rank, pid) == Some(rank) {
                self.tell(index);
            }
        }
    }

    fn watch(&self, started: &[(usize, u64)]) {
        let now = |&(rank, pid)| Some((self.rank_now(rank, pid)?, pid));
        let ranks: Vec<_> = started.iter().filter_map(now).collect();
        if let (Some(link), false) = (&self.link, ranks.is_empty()) {
            send(link, u64::MAX, Request::Watches { ranks });
        }
    }

    /// Tells the coordinator one of the words.
    pub(super) fn tell(&self, index: usize) {
        if let (Some(link), Some(word)) = (&self.link, self.words.get(index))
            && let Some(rank) = self.rank_now(word.rank, word.pid)
        {
            let request = Request::Ended {
                rank,
                pid: word.pid,
                end: word.end.clone(),
            };
            send(link, index as u64, request);
        }
    }
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Until something changes, or the deadline.
    pub(super) fn wait(&self, state: &mut MutexGuard<'_, State>, deadline: Instant) {
        self.changed.wait_until(state, deadline);
    }

    pub(super) fn notify(&self) {
        self.changed.notify_all();
        self.wakers.wake();
    }
}

/// What hears one of an observer's connections.
pub(super) struct Ear {
    shared: Arc<Shared>,
    number: u64,
}

impl Ear {
    /// From now on, this one alone is heard.
    pub(super) fn new(shared: &Arc<Shared>, state: &mut State) -> Arc<Self> {
        state.ear += 1;
        Arc::new(Self {
            shared: Arc::clone(shared),
            number: state.ear,
        })
    }

    fn state(&self) -> Option<MutexGuard<'_, State>> {
        let state = self.shared.state();
        (state.ear == self.number).then_some(state)
    }
}

impl Sink for Ear {
    fn answer(&self, id: u64, _: Answer) {
        let Some(mut state) = self.state() else {
            return;
        };
        let word = usize::try_from(id).ok();
        if let Some(word) = word.and_then(|index| state.words.get_mut(index)) {
            word.told = true;
        }
    }

    fn push(&self, push: Push) {
        let Some(mut state) = self.state() else {
            return;
        };
        match push {
            Push::GoesOn(epoch) => state.next = Some(epoch),
            Push::Size(size) => state.board.set_size(size),
            Push::Member(known) => {
                let (rank, pid) = (known.rank, known.pid);
                let is_new = state.board.rank_of(pid, process::kernel()) != Some(rank);
                state.board.learn(known);
                if is_new && !state.is_numbered() {
                    state.watch_now(rank, pid);
                }
            }
            Push::Lateness(lateness) => state.board.late(&lateness),
            _ => {}
        }
    }

    fn settle(&self) {
        self.shared.notify();
    }

    fn waits_for_word(&self) -> bool {
        false
    }

    fn close(&self, loss: Loss) {
        let Some(mut state) = self.state() else {
            return;
        };
        state.broken = Some(loss.into_lost());
        state.link = None;
        state.board.connected = false;
        drop(state);
        self.shared.notify();
    }
}

#[cfg(test)]
impl Observer {
    /// As if the network had broken it.
    pub(super) fn cut_for_a_test(&self) {
        let mut state = self.shared.state();
        match &state.link {
            Some(link) => link.connection.shut(),
            None => state.cut = true,
        }
        drop(state);
        self.shared.notify();
    }
}

impl Drop for Observer {
    /// What is still to be told is told first, within two seconds.
    fn drop(&mut self) {
        if forked::is_child() {
            return;
        }
        let deadline = Instant::now() + FAREWELL;
        let mut state = self.shared.state();
        state.stop = true;
        self.shared.notify();
        while !state.done && Instant::now() < deadline {
            self.shared.wait(&mut state, deadline);
        }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer")
            .field("rendezvous", &self.shared.rendezvous.address.to_string())
            .finish_non_exhaustive()
    }
}

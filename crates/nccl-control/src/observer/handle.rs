//! What a program has of an observer.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_base::from_outside::{FromOutside, world as world_limit};

use super::driver;
use super::state::{Shared, State, Word};
use crate::board::WorldState;
use crate::departure::ProcessEnd;
use crate::environment::Rendezvous;
use crate::error::{Error, ErrorKind, Result};
use crate::events::{Events, Wakers};
use crate::forked::{self, Resident};
use crate::recordings::{Asked, Asker, Decode};
use crate::sync::{Condvar, Mutex};
use crate::time::deadline_after;

/// Sees what becomes of the ranks, and is none of them.
pub struct Observer {
    shared: Resident<Arc<Shared>>,
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
        let observed = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(String::from("nccl-observer"))
            .spawn(move || driver::run(&observed))
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
        Events::of(Arc::<Shared>::clone(&self.shared))
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
        drop(state);
        self.shared.notify();
        Ok(())
    }

    /// The operator's word: these ranks may go on, although no more than half of the voters reach each other.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`].
    pub fn decide_split(&self, ranks: &[usize]) -> Result<()> {
        forked::check()?;
        let mut state = self.shared.state.lock();
        let world_size = state.board.size();
        let strange = ranks.iter().find(|rank| **rank >= world_size);
        if let Some(&rank) = strange.filter(|_| world_size > 0) {
            let role = "rank";
            return Err(Error::new(ErrorKind::NoSuchRank {
                role,
                rank,
                world_size,
            }));
        }
        state.decision = Some(ranks.to_vec());
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

    /// The recordings of all ranks.
    pub fn ask_for_recordings<T: Send>(&self, limit: Duration, decode: &Decode<'_, T>) -> Asked<T> {
        let (job, targets) = match forked::is_child() {
            true => (State::default().job(&self.shared.rendezvous), Vec::new()),
            false => {
                let state = self.shared.state.lock();
                (state.job(&self.shared.rendezvous), state.board.targets())
            }
        };
        let asker = Asker {
            job: &job,
            size: targets.len(),
            limit,
        };
        asker.ask(targets, decode)
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

#[cfg(test)]
impl Observer {
    /// As if the network had broken it.
    pub(crate) fn cut_for_a_test(&self) {
        let mut state = self.shared.state();
        state.cut = true;
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

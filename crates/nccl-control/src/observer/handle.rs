//! The program's handle to an observer.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_base::env_timeouts::{EnvTimeouts, world_timeout};

use super::driver;
use super::state::{ExitReport, Shared, State};
use crate::departure::ProcessEnd;
use crate::environment::Rendezvous;
use crate::error::{Error, ErrorKind, Result};
use crate::events::{Events, Wakers};
use crate::forked::{self, ForkGuarded};
use crate::recordings::{Decode, RecordingAnswers, RecordingQuery};
use crate::sync::{Condvar, Mutex};
use crate::time::deadline_after;
use crate::world_view::WorldState;

/// An observer of the ranks, which has no rank itself.
pub struct Observer {
    shared: ForkGuarded<Arc<Shared>>,
}

/// How long a dropped observer may take to deliver its pending reports.
const DROP_TIMEOUT: Duration = Duration::from_secs(2);

impl Observer {
    /// Observes the world of this rendezvous, whose rank is ignored; waits until rank 0 has been found.
    pub fn join(rendezvous: Rendezvous) -> Result<Self> {
        // The thread enforces the timeout; it ends a little later than its last attempt.
        let timeout = world_timeout(rendezvous.timeout).saturating_add(Duration::from_secs(5));
        let observer = Self::start(rendezvous)?;
        let deadline = deadline_after(timeout);
        let mut state = observer.shared.state.lock();
        while !state.was_connected {
            if let Some(why) = state.view.ended() {
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

    /// As [`join`](Self::join), but returns at once and looks for rank 0 in the background; meant for the process that
    /// starts the ranks. When rank 0 does not answer in time, that is the observer's last event.
    pub fn start(mut rendezvous: Rendezvous) -> Result<Self> {
        rendezvous.job_identity().check()?;
        EnvTimeouts::of_process()?;
        rendezvous.timeout = world_timeout(rendezvous.timeout);
        Self::start_with(rendezvous, true)
    }

    /// As [`start`](Self::start), for the launcher of the ranks, which sets its own timeout: the timeout in the
    /// environment is for the ranks.
    pub fn start_by_number(rendezvous: Rendezvous) -> Result<Self> {
        Self::start_with(rendezvous, true)
    }

    /// As [`start_by_number`](Self::start_by_number), for a launcher that has restarted some of its ranks alone. The
    /// rank numbers of the world have changed by then, so process ids identify the ranks.
    pub fn start_by_process(rendezvous: Rendezvous) -> Result<Self> {
        Self::start_with(rendezvous, false)
    }

    fn start_with(rendezvous: Rendezvous, numbered: bool) -> Result<Self> {
        forked::begin()?;
        let mut state = State::default();
        state.view.set_size(rendezvous.world_size);
        state.generation = rendezvous.generation;
        state.first = numbered.then_some(rendezvous.generation);
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
            shared: ForkGuarded::new(shared),
        })
    }

    /// Returns the state of every rank, as far as this observer knows.
    pub fn snapshot(&self) -> WorldState {
        if forked::is_child() {
            return State::default().view.state();
        }
        self.shared.state.lock().view.state()
    }

    /// Returns a reader of all events since this observer connected, and of later events. Each reader has its own
    /// position; the last 4096 events are kept.
    pub fn events(&self) -> Events {
        Events::of(Arc::<Shared>::clone(&self.shared))
    }

    /// Declares that this process has started `rank` as process `pid`, and will report its end with
    /// [`rank_ended`](Self::rank_ended). `rank` is the rank as which the process was started, even if it has another
    /// number in a later generation.
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

    /// Reports how the process `pid` of `rank` ended, and the end of its stderr, which may be empty and of which only
    /// the last lines are used. Every rank's errors then contain that, instead of "its connection closed without
    /// goodbye". Has no effect if the rank has left, or has reported a failure. `rank` is the rank as which the process
    /// was started.
    pub fn rank_ended(&self, rank: usize, pid: u32, how: &str, stderr_tail: &str) -> Result<()> {
        self.process_ended(rank, pid, ProcessEnd::in_words(how, stderr_tail))
    }
}

impl Observer {
    /// As [`rank_ended`](Self::rank_ended), with a typed end instead of its description.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`].
    pub fn process_ended(&self, rank: usize, pid: u32, end: ProcessEnd) -> Result<()> {
        forked::check()?;
        let mut state = self.shared.state.lock();
        check_rank(rank, &state)?;
        let report = ExitReport {
            rank,
            pid: pid.into(),
            end,
            was_received: false,
        };
        state.exit_reports.push(report);
        drop(state);
        self.shared.notify();
        Ok(())
    }

    /// Applies an operator's decision that `ranks` may continue, although no more than half of the voters reach each
    /// other.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`].
    pub fn decide_split(&self, ranks: &[usize]) -> Result<()> {
        forked::check()?;
        let mut state = self.shared.state.lock();
        let world_size = state.view.size();
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

    /// Whether the observer has found the world and has not lost it for good; it may be looking for the coordinator.
    pub fn is_on(&self) -> bool {
        let state = self.shared.state.lock();
        state.was_connected && state.view.ended().is_none()
    }

    /// Returns the addresses at which a new process can ask for the coordinator.
    pub fn listening_addresses(&self) -> Vec<String> {
        self.shared.state.lock().listening_addresses()
    }

    /// Returns the recordings of all ranks.
    pub fn ask_for_recordings<T: Send>(
        &self,
        timeout: Duration,
        decode: &Decode<'_, T>,
    ) -> RecordingAnswers<T> {
        let (job, targets) = match forked::is_child() {
            true => (State::default().job(&self.shared.rendezvous), Vec::new()),
            false => {
                let state = self.shared.state.lock();
                (state.job(&self.shared.rendezvous), state.view.targets())
            }
        };
        let asker = RecordingQuery {
            job: &job,
            size: targets.len(),
            timeout,
        };
        asker.ask(targets, decode)
    }
}

/// Checks `rank`. In a generation whose rank numbers differ from those of the launcher, any rank is valid: the process
/// id identifies it.
fn check_rank(rank: usize, state: &State) -> Result<()> {
    let world_size = state.view.size();
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
    /// Simulates a network failure of all connections of this observer.
    pub(crate) fn cut_for_a_test(&self) {
        let mut state = self.shared.state();
        state.cut = true;
        drop(state);
        self.shared.notify();
    }
}

impl Drop for Observer {
    /// Delivers the pending reports first, within two seconds.
    fn drop(&mut self) {
        if forked::is_child() {
            return;
        }
        let deadline = Instant::now() + DROP_TIMEOUT;
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

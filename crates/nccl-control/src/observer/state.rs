//! The state shared by the program's threads and the observer's own thread.

use std::time::Instant;

use crate::departure::ProcessEnd;
use crate::environment::Rendezvous;
use crate::events::{EventSource, Wakers, WorldEvent};
use crate::job::Job;
use crate::process;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::world_view::WorldView;

pub(super) struct Shared {
    pub(super) rendezvous: Rendezvous,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    pub(super) wakers: Wakers,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) view: WorldView,
    /// The rank to which this observer is or was last connected, and its generation.
    pub(super) coordinator: usize,
    pub(super) generation: u64,
    /// The generation in which rank numbers equal launcher ranks, if there is one.
    pub(super) first: Option<u64>,
    /// Whether the observer has ever been connected.
    pub(super) was_connected: bool,
    /// The ranks that this process has started.
    pub(super) started: Vec<(usize, u64)>,
    pub(super) exit_reports: Vec<ExitReport>,
    /// The operator's decision, until it is sent.
    pub(super) decision: Option<Vec<usize>>,
    pub(super) stop: bool,
    /// Whether the thread should cut its connections.
    #[cfg(test)]
    pub(super) cut: bool,
    /// Whether the thread has ended its work.
    pub(super) done: bool,
}

/// A report of how a process ended.
#[derive(Clone, Debug)]
pub(super) struct ExitReport {
    pub(super) rank: usize,
    pub(super) pid: u64,
    pub(super) end: ProcessEnd,
    /// Whether the coordinator has received it.
    pub(super) was_received: bool,
}

impl State {
    /// Returns the job with the observed generation.
    pub(super) fn job(&self, rendezvous: &Rendezvous) -> Job {
        let mut job = rendezvous.job_identity();
        job.generation = self.generation;
        job
    }

    /// Changes the observed generation.
    pub(super) fn set_generation(&mut self, generation: u64) {
        if self.generation != generation {
            self.generation = generation;
            match self.was_connected {
                true => self.view.reconfigure(generation),
                false => self.view.clear(),
            }
        }
    }

    /// Whether the current rank numbers are those that this process assigned.
    pub(super) fn is_numbered(&self) -> bool {
        self.first == Some(self.generation)
    }

    /// Returns the addresses at which the present ranks listen, for a joiner.
    pub(super) fn listening_addresses(&self) -> Vec<String> {
        let listening_addresses = self.view.listening_addresses(0).into_iter();
        listening_addresses.map(|(_, at)| at).collect()
    }

    /// Returns the rank in the observed generation of a process that was started as `rank`. In a later generation than
    /// that of its start, the process id identifies the process.
    pub(super) fn rank_now(&self, rank: usize, pid: u64) -> Option<usize> {
        match self.is_numbered() {
            true => Some(rank),
            false => self.view.rank_of(pid, process::kernel()),
        }
    }
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits until something changes, or until the deadline.
    pub(super) fn wait(&self, state: &mut MutexGuard<'_, State>, deadline: Instant) {
        self.changed.wait_until(state, deadline);
    }

    pub(super) fn notify(&self) {
        self.changed.notify_all();
        self.wakers.wake();
    }
}

impl EventSource for Shared {
    fn wait_for_event(&self, next: &mut u64, deadline: Instant) -> Option<Option<WorldEvent>> {
        let mut state = self.state();
        loop {
            if let Some(event) = state.view.read(next) {
                return Some(Some(event));
            }
            if state.view.ended().is_some() || state.done {
                return Some(None);
            }
            if Instant::now() >= deadline {
                return None;
            }
            self.wait(&mut state, deadline);
        }
    }

    fn wakers(&self) -> &Wakers {
        &self.wakers
    }
}

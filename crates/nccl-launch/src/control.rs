//! What the ranks of a world learn from the parent of one that has ended: how.
//!
//! The parent takes part in the world as an observer. A word about an end goes out at once; what the rank said
//! last is waited for a little, because it mostly is there by then.

use std::time::{Duration, Instant};

use super::environment::Environment;
use super::rank::Running;
use crate::error::Result;
use nccl_control::{Observer, Rendezvous};

/// The connection to the world.
pub(super) struct Control {
    /// The last is the newest. One goes on with the ranks to their next epochs; but those who survive may as well
    /// leave their world, and meet the rank that was started again in another.
    observers: Vec<Observer>,
}

impl Control {
    /// Looks for the world in the background, as long as it takes: when ranks join is up to them.
    pub(super) fn start(environment: &Environment, epoch: u64) -> Self {
        let mut control = Self {
            observers: Vec::new(),
        };
        let place = rendezvous(environment, epoch);
        control
            .look(place.and_then(|place| Observer::start_by_number(place.timeout(Duration::MAX))));
        control
    }

    /// A rank is started again alone, as attempt `epoch`, by somebody who knows where others listen. From now on, the
    /// ranks of the world are told apart by their processes.
    pub(super) fn start_again(&mut self, environment: &Environment, epoch: u64, doors: &[String]) {
        let mut before = std::mem::take(&mut self.observers);
        if before.last().is_some_and(Observer::is_on) {
            self.observers.extend(before.pop());
        }
        dismiss(before);
        let place = rendezvous_at(environment, epoch, Some(doors));
        let place = place.map(|place| place.timeout(Duration::MAX));
        self.look(place.and_then(Observer::start_by_process));
    }

    fn look(&mut self, started: Result<Observer>) {
        match started {
            Ok(observer) => self.observers.push(observer),
            Err(error) => {
                // The ranks get the same error, if they care for a world at all.
                tracing::debug!(name: "nccl.launch.alone", target: "nccl", "the ranks are not told how others end: {error}");
            }
        }
    }

    /// The processes that take part in the world, as far as has been heard.
    pub(super) fn joined(&self) -> Vec<u32> {
        let states = self.observers.iter().map(Observer::snapshot);
        let ranks = states.flat_map(|state| state.ranks);
        let there = ranks.filter(|rank| rank.has_joined() && rank.end.is_none());
        there.filter_map(|rank| rank.pid).collect()
    }

    /// Where the ranks listen that are there.
    pub(super) fn doors(&self) -> Vec<String> {
        let doors = self.observers.iter().map(Observer::doors);
        doors.max_by_key(Vec::len).unwrap_or_default()
    }

    /// This process will say how that process of the rank ends.
    pub(super) fn started(&self, rank: usize, pid: u32) {
        for observer in &self.observers {
            let _ = observer.rank_started(rank, pid);
        }
    }

    /// Says how it ended, unless it is too early for that.
    pub(super) fn tell(&self, running: &mut Running, now: Instant) {
        let Some(end) = running.word(now) else {
            return;
        };
        for observer in &self.observers {
            let _ = observer.process_ended(running.rank(), running.id(), end.clone());
        }
    }
}

/// Lets go of observers that may still have something to tell, of a coordinator that has died say, and to ranks that do not
/// listen any more: nobody who is to be started waits for that.
fn dismiss(observers: Vec<Observer>) {
    if observers.is_empty() {
        return;
    }
    // Without a thread it is waited for here.
    let _ = std::thread::Builder::new()
        .name(String::from("nccl-farewell"))
        .spawn(move || drop(observers));
}

/// Where the ranks meet, for somebody who has started them.
pub(super) fn rendezvous(environment: &Environment, epoch: u64) -> Result<Rendezvous> {
    rendezvous_at(environment, epoch, None)
}

fn rendezvous_at(
    environment: &Environment,
    epoch: u64,
    alone: Option<&[String]>,
) -> Result<Rendezvous> {
    let variables = environment.of(environment.first_rank, epoch, alone);
    Rendezvous::from_variables(|name| {
        match variables.iter().find(|(known, _)| *known == name) {
            Some((_, value)) => value.clone(),
            // What the ranks inherit.
            None => std::env::var_os(name),
        }
    })
}

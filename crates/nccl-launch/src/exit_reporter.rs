//! Reports to the ranks of a world how a process of this host ended.
//!
//! The launcher takes part in the world as an observer. It reports an end as soon as the rank's last output has been
//! read, and waits only briefly for that.

use std::time::{Duration, Instant};

use super::environment::Environment;
use super::rank::Running;
use crate::error::Result;
use nccl_control::{Observer, Rendezvous};

/// The launcher's connections to the world.
pub(super) struct ExitReporter {
    /// The last is the newest. An observer follows the ranks into their next generations; but the surviving ranks may
    /// also leave their world, and meet the restarted rank in another.
    observers: Vec<Observer>,
}

impl ExitReporter {
    /// Looks for the world in the background, without a timeout, because the ranks decide when they join.
    pub(super) fn start(environment: &Environment, generation: u64) -> Self {
        let mut control = Self {
            observers: Vec::new(),
        };
        let place = rendezvous(environment, generation);
        control.follow(place.and_then(|place| {
            Observer::start_by_number(place.with(|meet| meet.timeout = Duration::MAX))
        }));
        control
    }

    /// Observes the world for a rank that is restarted alone, as attempt `generation`; `addresses` are the addresses
    /// where other ranks listen. From now on, the ranks of the world are identified by their process ids.
    pub(super) fn start_again(
        &mut self,
        environment: &Environment,
        generation: u64,
        addresses: &[String],
    ) {
        let mut before = std::mem::take(&mut self.observers);
        if before.last().is_some_and(Observer::is_on) {
            self.observers.extend(before.pop());
        }
        drop_in_background(before);
        let place = rendezvous_at(environment, generation, Some(addresses));
        let place = place.map(|place| place.with(|meet| meet.timeout = Duration::MAX));
        self.follow(place.and_then(Observer::start_by_process));
    }

    fn follow(&mut self, started: Result<Observer>) {
        match started {
            Ok(observer) => self.observers.push(observer),
            Err(error) => {
                // The ranks get the same error if they join a world.
                tracing::debug!(name: "nccl.launch.alone", target: "nccl", "the ranks are not told how others end: {error}");
            }
        }
    }

    /// The processes known to take part in the world.
    pub(super) fn joined(&self) -> Vec<u32> {
        let states = self.observers.iter().map(Observer::snapshot);
        let ranks = states.flat_map(|state| state.ranks);
        let there = ranks.filter(|rank| rank.phase.is_some() && rank.end.is_none());
        there.filter_map(|rank| rank.pid).collect()
    }

    /// The addresses where the ranks of the world listen.
    pub(super) fn addresses(&self) -> Vec<String> {
        let addresses = self.observers.iter().map(Observer::listening_addresses);
        addresses.max_by_key(Vec::len).unwrap_or_default()
    }

    /// Announces that this launcher will report how process `pid` of `rank` ends.
    pub(super) fn started(&self, rank: usize, pid: u32) {
        for observer in &self.observers {
            let _ = observer.rank_started(rank, pid);
        }
    }

    /// Reports how the process ended, once its report is due.
    pub(super) fn report_exit(&self, running: &mut Running, now: Instant) {
        let Some(end) = running.take_exit_report(now) else {
            return;
        };
        for observer in &self.observers {
            let _ = observer.process_ended(running.rank(), running.id(), end.clone());
        }
    }
}

/// Drops observers on a separate thread: their last reports may go to a coordinator that has died, or to ranks that do
/// not listen any more, and the start of a rank must not wait for that.
fn drop_in_background(observers: Vec<Observer>) {
    if observers.is_empty() {
        return;
    }
    // If no thread can be started, the observers are dropped on this one.
    let _ = std::thread::Builder::new()
        .name(String::from("nccl-leave"))
        .spawn(move || drop(observers));
}

/// The rendezvous of the ranks, for their launcher.
pub(super) fn rendezvous(environment: &Environment, generation: u64) -> Result<Rendezvous> {
    rendezvous_at(environment, generation, None)
}

fn rendezvous_at(
    environment: &Environment,
    generation: u64,
    alone: Option<&[String]>,
) -> Result<Rendezvous> {
    let variables = environment.of(environment.first_rank, generation, alone);
    Rendezvous::from_variables(|name| {
        match variables.iter().find(|(known, _)| *known == name) {
            Some((_, value)) => value.clone(),
            // Inherited by the ranks.
            None => std::env::var_os(name),
        }
    })
}

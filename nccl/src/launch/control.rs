//! What the ranks of a world learn from the parent of one that has ended: how.
//!
//! The parent takes part in the world as an observer. A word about an end goes out at once; what the rank said
//! last is waited for a little, because it mostly is there by then.

use std::time::{Duration, Instant};

use super::environment::Environment;
use super::rank::Running;
use crate::error::Result;
use crate::rendezvous::{Observer, Rendezvous};

/// How long the word about an end waits for the rank's last words. The other ranks wait a little longer for
/// the word.
pub(super) const PATIENCE: Duration = Duration::from_millis(60);

/// The connection to the world of one epoch.
pub(super) struct Control {
    observer: Observer,
}

impl Control {
    /// Looks for the world in the background, as long as it takes: when ranks join is up to them.
    /// After a rank was started again alone, the ranks of the world are told apart by their processes.
    pub(super) fn start(
        environment: &Environment,
        epoch: u64,
        alone: Option<&[String]>,
    ) -> Option<Self> {
        let place = rendezvous_at(environment, epoch, alone);
        let place = place.map(|place| place.timeout(Duration::MAX));
        let started = place.and_then(|place| match alone {
            Some(_) => Observer::start_by_process(place),
            None => Observer::start(place),
        });
        match started {
            Ok(observer) => Some(Self { observer }),
            Err(error) => {
                // The ranks get the same error, if they care for a world at all.
                tracing::debug!(name: "nccl.launch.alone", target: "nccl", "the ranks are not told how others end: {error}");
                None
            }
        }
    }

    /// Where the ranks listen that are there.
    pub(super) fn doors(&self) -> Vec<String> {
        self.observer.doors()
    }

    /// This process will say how that process of the rank ends.
    pub(super) fn started(&self, rank: usize, pid: u32) {
        let _ = self.observer.rank_started(rank, pid);
    }

    /// Says how it ended, unless it is too early for that.
    pub(super) fn tell(&self, running: &mut Running, now: Instant) {
        let Some((how, said)) = running.word(now) else {
            return;
        };
        let _ = self
            .observer
            .rank_ended(running.rank(), running.id(), &how, &said);
    }
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
            Some((_, value)) => value.as_ref()?.to_str().map(str::to_owned),
            // What the ranks inherit.
            None => std::env::var(name).ok(),
        }
    })
}

//! What a rank knows about itself and about the others, available at any time.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::handle::{RankSession, SessionBackend};
use crate::application::RankRecorder;
use crate::departure::Departure;
use crate::events::{EventBus, WorldEvent};
use crate::fault::{Fault, Roster};
use crate::forked;
use crate::heartbeat::Suspect;
use crate::rank_process::{RankProcess, launcher_ranks};

impl RankSession {
    /// Returns the coordinator, as far as this rank knows.
    pub fn coordinator(&self) -> usize {
        self.inbox.coordinator()
    }

    /// Describes a rank with its host and process.
    pub fn describe(&self, rank: usize) -> String {
        match self.members.get().and_then(|members| members.get(rank)) {
            Some(member) => {
                let RankProcess { host, pid, .. } = member;
                let other = member
                    .launcher_rank
                    .filter(|launcher_rank| *launcher_rank != rank);
                let other = other.map(|rank| format!("launcher rank {rank}, "));
                format!(
                    "rank {rank} ({}{host}, pid {pid})",
                    other.unwrap_or_default()
                )
            }
            None => format!("rank {rank}"),
        }
    }

    /// Returns the job's name and generation.
    pub fn job(&self) -> (&str, u64) {
        (&self.job.0, self.job.1)
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the recorder of this rank's communicators.
    pub fn recorder(&self) -> &Arc<dyn RankRecorder> {
        &self.recorder
    }

    /// Returns the processes of the ranks; set when the generation is formed.
    pub fn members(&self) -> Arc<OnceLock<Vec<RankProcess>>> {
        Arc::clone(&self.members)
    }

    /// Whether this rank takes part in exchanges of its world, and the world has no later generation yet.
    pub(crate) fn is_in_world(&self) -> bool {
        !self.has_left_world.load(Ordering::Acquire) && self.reconfigured_to().is_none()
    }

    /// Returns the numbers of `members` in a communicator, and their launcher ranks.
    pub fn roster(&self, members: &[usize]) -> Roster {
        Roster::new(members, &launcher_ranks(self.members.get()))
    }

    /// Returns where a rank listens; `None` for a rank that is a thread of this process.
    pub fn address_of(&self, rank: usize) -> Option<&str> {
        self.members.get()?.get(rank)?.at.as_deref()
    }

    /// Returns this rank's phase, and for how long.
    pub fn phase(&self) -> Option<(String, Duration)> {
        let phase = self.phase.lock();
        phase
            .as_ref()
            .map(|(name, since)| (name.clone(), since.elapsed()))
    }

    pub(crate) fn set_phase(&self, name: &str) {
        *self.phase.lock() = Some((name.to_owned(), Instant::now()));
    }

    /// Whether no more messages will arrive.
    pub fn is_closed(&self) -> bool {
        self.inbox.is_closed()
    }

    /// Returns the generation that has followed this one.
    pub fn reconfigured_to(&self) -> Option<u64> {
        let generation = self.reconfigured_to.load(Ordering::Acquire);
        (generation > 0).then_some(generation)
    }

    /// Returns the ranks that have departed or are unreachable, and how or why.
    pub fn departures(&self) -> Vec<(usize, Departure)> {
        self.inbox.departures()
    }

    /// Returns the ranks whose processes do not answer although their kernels do, as far as this rank knows. These
    /// ranks are the first to check when an operation times out, but not a cause by themselves.
    pub fn suspects(&self) -> Vec<Suspect> {
        let mut suspects = self.inbox.suspects();
        suspects.retain(|suspect| suspect.rank != self.rank);
        suspects
    }

    /// Returns for how long other processes have not been heard: on the coordinator, those of all other ranks, which are
    /// to answer its heartbeats; elsewhere, the coordinator.
    pub fn heartbeat_ages(&self) -> Vec<(usize, Duration)> {
        match self.backend() {
            SessionBackend::Node { node, generation } if self.coordinator() == self.rank => {
                node.heartbeat_ages(generation)
            }
            SessionBackend::Threads(_) => Vec::new(),
            SessionBackend::Node { .. } => {
                let age = self.inbox.coordinator_age();
                let age = age.map(|age| (self.coordinator(), age));
                age.into_iter().collect()
            }
        }
    }

    /// Returns the latest fault of a communicator of this session.
    pub(crate) fn fault(&self) -> Option<Arc<Fault>> {
        self.fault_listener.get()?.latest_fault()
    }

    /// Returns the event bus, which contains the events since the first call.
    pub(crate) fn event_bus(&self) -> Arc<EventBus> {
        if forked::is_child() {
            return Arc::default();
        }
        let members = self.members.get().map_or(&[][..], Vec::as_slice);
        self.inbox.event_bus(members, || self.fault())
    }

    /// Records that a communicator of this rank was ended.
    pub fn record_fault(&self, fault: &Arc<Fault>) {
        let fault = Arc::clone(fault);
        self.inbox.record_event(|| WorldEvent::Fault { fault });
    }
}

//! What the inbox has received about the other ranks and the coordinator, available at any time.

use std::time::{Duration, Instant};

use super::state::Inbox;
use crate::departure::Departure;
use crate::events::WorldEvent;
use crate::heartbeat::Suspect;

impl Inbox {
    /// Returns the coordinator, as far as this rank knows.
    pub(crate) fn coordinator(&self) -> usize {
        self.state.lock().coordinator
    }

    /// Records which rank coordinates. With `is_event`, the change is also an event of the world.
    pub(crate) fn set_coordinator(&self, rank: usize, is_event: bool) {
        let mut state = self.state.lock();
        state.coordinator = rank;
        if is_event {
            state.record_event(|| WorldEvent::Coordinator { rank });
        }
    }

    /// Records a heartbeat of the coordinator.
    pub(crate) fn record_coordinator_heartbeat(&self, now: Instant) {
        self.state.lock().suspects.record_coordinator_heartbeat(now);
    }

    /// Returns for how long the coordinator has not been heard.
    pub(crate) fn coordinator_age(&self) -> Option<Duration> {
        self.state.lock().suspects.coordinator_age()
    }

    /// Returns the suspects.
    pub(crate) fn suspects(&self) -> Vec<Suspect> {
        self.state.lock().suspects.all()
    }

    /// Returns the number of processes that wait to be admitted to the next generation.
    pub(crate) fn joiners(&self) -> usize {
        self.state.lock().joiners
    }

    /// Returns how a rank departed, if it has.
    pub(crate) fn departure(&self, rank: usize) -> Option<Departure> {
        self.state.lock().departed.get(&rank).cloned()
    }

    /// Returns the ranks that have departed, and how.
    pub(crate) fn departures(&self) -> Vec<(usize, Departure)> {
        let state = self.state.lock();
        let departed = state.departed.iter();
        departed
            .map(|(&rank, departure)| (rank, departure.clone()))
            .collect()
    }

    /// Returns the rank that died or failed first, if any.
    pub(crate) fn first_failed(&self) -> Option<(usize, Departure)> {
        let state = self.state.lock();
        let rank = state.first_failed?;
        Some((rank, state.departed.get(&rank)?.clone()))
    }
}

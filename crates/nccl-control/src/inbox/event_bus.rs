//! The events of a rank's world, recorded from the first reader on.

use std::sync::Arc;

use super::state::{Inbox, State};
use crate::events::{EventBus, WorldEvent};
use crate::fault::Fault;
use crate::rank_process::RankProcess;

impl Inbox {
    /// Returns the event bus of the world. The first call also records which ranks have joined, which have departed,
    /// which are suspects, and the last `fault`.
    pub(crate) fn event_bus(
        &self,
        members: &[RankProcess],
        fault: impl FnOnce() -> Option<Arc<Fault>>,
    ) -> Arc<EventBus> {
        let mut state = self.state.lock();
        if let Some(event_bus) = &state.event_bus {
            return Arc::clone(event_bus);
        }
        let event_bus = Arc::<EventBus>::default();
        state.begin(&event_bus, members);
        // A fault that is decided at this moment may be recorded twice, but is not missed.
        if let Some(fault) = fault() {
            event_bus.note(WorldEvent::Fault { fault });
        }
        event_bus
    }

    /// Moves the readers of the world `before` to this one, its next generation.
    pub(crate) fn continue_from(
        &self,
        before: &Self,
        members: &[RankProcess],
        generation: WorldEvent,
    ) {
        let mut state = before.state.lock();
        if state.has_next_generation {
            return;
        }
        let Some(event_bus) = state.event_bus.clone() else {
            return;
        };
        state.has_next_generation = true;
        drop(state);
        event_bus.note(generation);
        self.state.lock().begin(&event_bus, members);
    }

    pub(crate) fn record_event(&self, event: impl FnOnce() -> WorldEvent) {
        self.state.lock().record_event(event);
    }

    /// Records that the world has ended here, unless it has a next generation.
    pub(crate) fn record_world_end(&self, why: &str) {
        let why = why.to_owned();
        self.record_event(|| WorldEvent::Ended { why });
    }
}

impl State {
    fn begin(&mut self, event_bus: &Arc<EventBus>, members: &[RankProcess]) {
        for (rank, member) in members.iter().enumerate() {
            let (host, pid) = (member.host.clone(), member.pid);
            event_bus.note(WorldEvent::Joined { rank, host, pid });
        }
        let mut departed: Vec<_> = self.departed.iter().collect();
        departed.sort_by_key(|(rank, _)| **rank);
        for (rank, departure) in departed {
            event_bus.note(WorldEvent::departed(*rank, departure.clone()));
        }
        for suspect in self.suspects.all() {
            event_bus.note(WorldEvent::Silent {
                rank: suspect.rank,
                silent: suspect.silence,
                process: suspect.state.map(|state| state.to_string()),
            });
        }
        self.event_bus = Some(Arc::clone(event_bus));
    }

    /// Records an event, if there is a reader.
    pub(super) fn record_event(&self, event: impl FnOnce() -> WorldEvent) {
        if let Some(event_bus) = self
            .event_bus
            .as_ref()
            .filter(|_| !self.has_next_generation)
        {
            event_bus.note(event());
        }
    }
}

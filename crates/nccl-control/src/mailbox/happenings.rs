//! The events of a rank's world, recorded from the first reader on.

use std::sync::Arc;

use super::state::{Mailbox, State};
use crate::events::{Happenings, WorldEvent};
use crate::fault::Fault;
use crate::member::Member;

impl Mailbox {
    /// Returns the events of the world from now on. The first call also records which ranks are there, which are gone, which are
    /// silent, and the last `fault`.
    pub(crate) fn happenings(
        &self,
        members: &[Member],
        fault: impl FnOnce() -> Option<Arc<Fault>>,
    ) -> Arc<Happenings> {
        let mut state = self.state.lock();
        if let Some(happenings) = &state.happenings {
            return Arc::clone(happenings);
        }
        let happenings = Arc::<Happenings>::default();
        state.begin(&happenings, members);
        // A fault of this moment may be recorded twice, and is not missed.
        if let Some(fault) = fault() {
            happenings.note(WorldEvent::Fault { fault });
        }
        happenings
    }

    /// Moves the readers of the world `before` to this one, its next generation.
    pub(crate) fn goes_on_from(&self, before: &Self, members: &[Member], generation: WorldEvent) {
        let mut state = before.state.lock();
        if state.passed_on {
            return;
        }
        let Some(happenings) = state.happenings.clone() else {
            return;
        };
        state.passed_on = true;
        drop(state);
        happenings.note(generation);
        self.state.lock().begin(&happenings, members);
    }

    pub(crate) fn happens(&self, event: impl FnOnce() -> WorldEvent) {
        self.state.lock().happens(event);
    }

    /// Records that the world has ended here, unless it has gone on.
    pub(crate) fn nothing_happens(&self, why: &str) {
        let why = why.to_owned();
        self.happens(|| WorldEvent::Ended { why });
    }
}

impl State {
    fn begin(&mut self, happenings: &Arc<Happenings>, members: &[Member]) {
        for (rank, member) in members.iter().enumerate() {
            let (host, pid) = (member.host.clone(), member.pid);
            happenings.note(WorldEvent::Joined { rank, host, pid });
        }
        let mut departed: Vec<_> = self.departed.iter().collect();
        departed.sort_by_key(|(rank, _)| **rank);
        for (rank, departure) in departed {
            happenings.note(WorldEvent::departed(*rank, departure.clone()));
        }
        for suspect in self.suspects.all() {
            happenings.note(WorldEvent::Silent {
                rank: suspect.rank,
                silent: suspect.silent,
                process: suspect.state.map(|state| state.to_string()),
            });
        }
        self.happenings = Some(Arc::clone(happenings));
    }

    /// Records an event, if there is a reader.
    pub(super) fn happens(&self, event: impl FnOnce() -> WorldEvent) {
        if let Some(happenings) = self.happenings.as_ref().filter(|_| !self.passed_on) {
            happenings.note(event());
        }
    }
}

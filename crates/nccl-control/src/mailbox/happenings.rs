//! What happens, for those who read it: from what comes here, once somebody has asked.

use std::sync::Arc;

use super::state::{Mailbox, State};
use crate::events::{Happenings, WorldEvent};
use crate::fault::Fault;
use crate::member::Member;

impl Mailbox {
    /// What happens from now on, to these ranks; who is there and who is not, the last `fault` and who is silent are
    /// told of at once, the first time.
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
        // One that comes at this moment may be told of twice, and is not missed.
        if let Some(fault) = fault() {
            happenings.note(WorldEvent::Fault { fault });
        }
        happenings
    }

    /// Those who read what happens in the world `before` read on here, where it is `epoch`.
    pub(crate) fn goes_on_from(&self, before: &Self, members: &[Member], epoch: WorldEvent) {
        let mut state = before.state.lock();
        if state.passed_on {
            return;
        }
        let Some(happenings) = state.happenings.clone() else {
            return;
        };
        state.passed_on = true;
        drop(state);
        happenings.note(epoch);
        self.state.lock().begin(&happenings, members);
    }

    pub(crate) fn happens(&self, event: impl FnOnce() -> WorldEvent) {
        self.state.lock().happens(event);
    }

    /// The world is gone here, unless it has gone on.
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

    /// Nothing is made of it when nobody has asked.
    pub(super) fn happens(&self, event: impl FnOnce() -> WorldEvent) {
        if let Some(happenings) = self.happenings.as_ref().filter(|_| !self.passed_on) {
            happenings.note(event());
        }
    }
}

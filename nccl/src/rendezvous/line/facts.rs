//! What a rank knows of itself and of the others, to be looked up at any time.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::{Line, Link, Member, launched};
use crate::fault::{Fault, Roster};
use crate::forked;
use crate::rendezvous::attached::Attached;
use crate::rendezvous::events::{Happenings, WorldEvent};
use crate::rendezvous::heartbeat::Suspect;
use crate::rendezvous::message::Departure;

impl Line {
    /// Who coordinates, as far as this rank knows.
    pub(crate) fn coordinator(&self) -> usize {
        self.mailbox.coordinator()
    }

    /// A rank with its host and process.
    pub(crate) fn describe(&self, rank: usize) -> String {
        match self.members.get().and_then(|members| members.get(rank)) {
            Some(member) => {
                let Member { host, pid, .. } = member;
                let launched = member.launched.filter(|launched| *launched != rank);
                let launched = launched.map(|rank| format!("launcher rank {rank}, "));
                format!(
                    "rank {rank} ({}{host}, pid {pid})",
                    launched.unwrap_or_default()
                )
            }
            None => format!("rank {rank}"),
        }
    }

    /// The job's name and epoch.
    pub(crate) fn job(&self) -> (&str, u64) {
        (&self.job.0, self.job.1)
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Under which its communicators record what they do.
    pub(crate) fn attached(&self) -> &Arc<dyn Attached> {
        &self.attached
    }

    /// Who the ranks are; known when all have met.
    pub(crate) fn members(&self) -> Arc<OnceLock<Vec<Member>>> {
        Arc::clone(&self.members)
    }

    /// Which of its ranks are `members`, as a communicator and the launcher number them.
    pub(crate) fn roster(&self, members: &[usize]) -> Roster {
        Roster::new(members, &launched(self.members.get()))
    }

    /// Where a rank listens; `None` for one that is a thread of this process.
    pub(crate) fn address_of(&self, rank: usize) -> Option<&str> {
        self.members.get()?.get(rank)?.at.as_deref()
    }

    /// What the program of this rank does, as it says, and for how long.
    pub(crate) fn phase(&self) -> Option<(String, Duration)> {
        let phase = self.phase.lock();
        phase
            .as_ref()
            .map(|(name, since)| (name.clone(), since.elapsed()))
    }

    pub(in crate::rendezvous) fn set_phase(&self, name: &str) {
        *self.phase.lock() = Some((name.to_owned(), Instant::now()));
    }

    /// Whether nothing comes any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.mailbox.is_closed()
    }

    /// The epoch to which the world has gone on.
    pub(crate) fn gone_on(&self) -> Option<u64> {
        let epoch = self.gone_on.load(Ordering::Acquire);
        (epoch > 0).then_some(epoch)
    }

    /// Those that can be reached no more, and why.
    pub(crate) fn departures(&self) -> Vec<(usize, Departure)> {
        self.mailbox.departures()
    }

    /// The ranks whose processes are silent although their kernels answer, as far as this one has heard: what to
    /// look at when something runs out of time, and no cause by itself.
    pub(crate) fn suspects(&self) -> Vec<Suspect> {
        let mut suspects = self.mailbox.suspects();
        suspects.retain(|suspect| suspect.rank != self.rank);
        suspects
    }

    /// For how long other processes have not been heard: all on the coordinator, which all others answer once in
    /// a second; elsewhere the coordinator.
    pub(crate) fn heartbeat_ages(&self) -> Vec<(usize, Duration)> {
        match self.link() {
            Link::Here { hub, .. } => hub.heartbeat_ages(),
            Link::Elsewhere { .. } | Link::Between { .. } => {
                let age = self.mailbox.coordinator_age();
                let age = age.map(|age| (self.coordinator(), age));
                age.into_iter().collect()
            }
        }
    }

    /// The verdict on one of its communicators that was written last.
    pub(crate) fn fault(&self) -> Option<Arc<Fault>> {
        self.watcher.get()?.latest()
    }

    /// What happens, since the first that asked.
    pub(in crate::rendezvous) fn happenings(&self) -> Arc<Happenings> {
        if forked::is_child() {
            return Arc::default();
        }
        let members = self.members.get().map_or(&[][..], Vec::as_slice);
        self.mailbox.happenings(members, || self.fault())
    }

    /// A communicator of this rank was ended.
    pub(crate) fn tell_of(&self, fault: &Arc<Fault>) {
        let fault = Arc::clone(fault);
        self.mailbox.happens(|| WorldEvent::Fault { fault });
    }
}

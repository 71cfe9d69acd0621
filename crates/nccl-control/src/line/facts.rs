//! What a rank knows of itself and of the others, to be looked up at any time.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::link::{Line, Link};
use crate::attached::Attached;
use crate::departure::Departure;
use crate::events::{Happenings, WorldEvent};
use crate::fault::{Fault, Roster};
use crate::forked;
use crate::heartbeat::Suspect;
use crate::member::{Member, launched};

impl Line {
    /// Who coordinates, as far as this rank knows.
    pub fn coordinator(&self) -> usize {
        self.mailbox.coordinator()
    }

    /// A rank with its host and process.
    pub fn describe(&self, rank: usize) -> String {
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
    pub fn job(&self) -> (&str, u64) {
        (&self.job.0, self.job.1)
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Under which its communicators record what they do.
    pub fn attached(&self) -> &Arc<dyn Attached> {
        &self.attached
    }

    /// Who the ranks are; known when all have met.
    pub fn members(&self) -> Arc<OnceLock<Vec<Member>>> {
        Arc::clone(&self.members)
    }

    /// Which of its ranks are `members`, as a communicator and the launcher number them.
    pub fn roster(&self, members: &[usize]) -> Roster {
        Roster::new(members, &launched(self.members.get()))
    }

    /// Where a rank listens; `None` for one that is a thread of this process.
    pub fn address_of(&self, rank: usize) -> Option<&str> {
        self.members.get()?.get(rank)?.at.as_deref()
    }

    /// What the program of this rank does, as it says, and for how long.
    pub fn phase(&self) -> Option<(String, Duration)> {
        let phase = self.phase.lock();
        phase
            .as_ref()
            .map(|(name, since)| (name.clone(), since.elapsed()))
    }

    pub(crate) fn set_phase(&self, name: &str) {
        *self.phase.lock() = Some((name.to_owned(), Instant::now()));
    }

    /// Whether nothing comes any more.
    pub fn is_closed(&self) -> bool {
        self.mailbox.is_closed()
    }

    /// The epoch to which the world has gone on.
    pub fn gone_on(&self) -> Option<u64> {
        let epoch = self.gone_on.load(Ordering::Acquire);
        (epoch > 0).then_some(epoch)
    }

    /// Those that can be reached no more, and why.
    pub fn departures(&self) -> Vec<(usize, Departure)> {
        self.mailbox.departures()
    }

    /// The ranks whose processes are silent although their kernels answer, as far as this one has heard: what to
    /// look at when something runs out of time, and no cause by itself.
    pub fn suspects(&self) -> Vec<Suspect> {
        let mut suspects = self.mailbox.suspects();
        suspects.retain(|suspect| suspect.rank != self.rank);
        suspects
    }

    /// For how long other processes have not been heard: all on the coordinator, which all others answer once in
    /// a second; elsewhere the coordinator.
    pub fn heartbeat_ages(&self) -> Vec<(usize, Duration)> {
        match self.link() {
            Link::Node { node, generation } if self.coordinator() == self.rank => {
                node.heartbeat_ages(generation)
            }
            Link::Threads(_) => Vec::new(),
            Link::Node { .. } => {
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
    pub(crate) fn happenings(&self) -> Arc<Happenings> {
        if forked::is_child() {
            return Arc::default();
        }
        let members = self.members.get().map_or(&[][..], Vec::as_slice);
        self.mailbox.happenings(members, || self.fault())
    }

    /// A communicator of this rank was ended.
    pub fn tell_of(&self, fault: &Arc<Fault>) {
        let fault = Arc::clone(fault);
        self.mailbox.happens(|| WorldEvent::Fault { fault });
    }
}

//! What NCCL's proxies see of a peer over sockets: that its end is closed, while an operation waits for it.

use std::cmp::Ordering;
use std::time::{Duration, Instant};

use super::lane::Head;
use super::{Launch, Scope, ring_at};
use crate::code::REMOTE;
use crate::nccl::communicator::{Route, has_hung_up, warn_of_closed_connection};
use crate::nccl::debug;
use crate::version;

/// How soon a launch that waits looks again, and how rarely in the end.
const PERIOD: Duration = Duration::from_millis(2);
const LONGEST: Duration = Duration::from_millis(50);

/// When a launch looked, and what it saw.
#[derive(Debug, Default)]
pub(super) struct Watch {
    next: Option<Instant>,
    pause: Duration,
    /// A peer was seen to be gone: what it did before is looked at once more.
    suspicion: bool,
    warned: bool,
}

impl Watch {
    /// When to look again; each time a little later.
    fn again(&mut self, now: Instant) -> Instant {
        self.pause = (self.pause * 2).clamp(PERIOD, LONGEST);
        *self.next.insert(now + self.pause)
    }
}

impl Launch {
    /// Looks whether a peer that the launch waits for over the network is gone, if it is time to. True: step again.
    pub(super) fn look_at_connections(&mut self) -> bool {
        if !self.session.has_network_peers() {
            return false;
        }
        let now = Instant::now();
        if self.connection.next.is_some_and(|next| now < next) {
            return false;
        }
        let mut peers = self.awaited();
        let session = &self.session;
        peers.retain(|&peer| session.route(peer) == Route::Network);
        if peers.is_empty() {
            return false;
        }
        let gone = peers.into_iter().find(|&peer| has_hung_up(session, peer));
        let Some(peer) = gone else {
            self.connection.suspicion = false;
            ring_at(self.connection.again(now), session);
            return false;
        };
        if !std::mem::replace(&mut self.connection.suspicion, true) {
            return true;
        }
        if !std::mem::replace(&mut self.connection.warned, true) {
            let _device = debug::on_device(self.communicator.device);
            warn_of_closed_connection(session, peer);
        }
        if version::is_at_least(2, 28, 0) && !self.communicator.fail(REMOTE) {
            // The end of the group that is under way would hide it.
            ring_at(self.connection.again(now), session);
            return false;
        }
        self.stuck = true;
        false
    }

    /// The peers whose part is missing: of a collective, which goes around a ring, the neighbours.
    fn awaited(&self) -> Vec<usize> {
        let (own, ranks) = (self.session.rank, self.session.ranks());
        if self.collective.is_some() {
            let mut neighbours = vec![(own + 1) % ranks, (own + ranks - 1) % ranks];
            neighbours.retain(|&rank| rank != own);
            return neighbours;
        }
        let scope = Scope {
            communicator: &self.communicator,
            session: &self.session,
        };
        let waiting = self.messages.lanes.iter().filter(|lane| {
            matches!(lane.head, Head::Open) && lane.compare(&scope) == Ordering::Greater
        });
        waiting.map(|lane| lane.peer).collect()
    }
}

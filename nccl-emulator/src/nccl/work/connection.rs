//! What NCCL's proxies see of a peer over sockets: that its end is closed, while an operation waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ring::ring_at;
use crate::code::REMOTE;
use crate::nccl::communicator::{
    Communicator, Route, Session, has_hung_up, warn_of_closed_connection,
};
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

    /// Whether it is time to look at the peers.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    /// Looks whether one of the `peers` that the launch waits for is reached over the network, and gone.
    pub(super) fn look(
        &mut self,
        communicator: &Communicator,
        session: &Arc<Session>,
        mut peers: Vec<usize>,
        now: Instant,
    ) -> Seen {
        peers.retain(|&peer| session.route(peer) == Route::Network);
        if peers.is_empty() {
            return Seen::Nothing;
        }
        let gone = peers.into_iter().find(|&peer| has_hung_up(session, peer));
        let Some(peer) = gone else {
            self.suspicion = false;
            ring_at(self.again(now), session);
            return Seen::Nothing;
        };
        if !std::mem::replace(&mut self.suspicion, true) {
            return Seen::Suspicion;
        }
        if !std::mem::replace(&mut self.warned, true) {
            let _device = debug::on_device(communicator.device);
            warn_of_closed_connection(session, peer);
        }
        if version::is_at_least(2, 28, 0) && !communicator.fail(REMOTE) {
            // The end of the group that is under way would hide it.
            ring_at(self.again(now), session);
            return Seen::Nothing;
        }
        Seen::Gone
    }
}

/// What a look came to.
pub(super) enum Seen {
    /// All are there, or it is not time to say otherwise.
    Nothing,
    /// One is gone: what it did before is to be looked at once more.
    Suspicion,
    /// One is gone, and the launch can never complete.
    Gone,
}

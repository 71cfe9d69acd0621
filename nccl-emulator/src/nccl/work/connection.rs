//! The detection of a closed socket by NCCL's proxies, while an operation waits for the peer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ring::ring_at;
use crate::code::REMOTE;
use crate::nccl::communicator::{
    Communicator, Route, Session, has_hung_up, warn_of_closed_connection,
};
use crate::nccl::debug;
use crate::version;

/// The shortest and the longest pause between two looks of a waiting launch.
const PERIOD: Duration = Duration::from_millis(2);
const LONGEST: Duration = Duration::from_millis(50);

/// The schedule and the findings of a launch's looks.
#[derive(Debug, Default)]
pub(super) struct Watch {
    next: Option<Instant>,
    pause: Duration,
    /// A peer was seen to be gone; its earlier work is checked once more.
    suspicion: bool,
    warned: bool,
}

impl Watch {
    /// Returns the time of the next look; the pauses grow.
    fn again(&mut self, now: Instant) -> Instant {
        self.pause = (self.pause * 2).clamp(PERIOD, LONGEST);
        *self.next.insert(now + self.pause)
    }

    /// Whether the next look is due.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    /// Checks whether one of the `peers` that the launch waits for over the network is gone.
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
            // The result of the group in progress would hide the error.
            ring_at(self.again(now), session);
            return Seen::Nothing;
        }
        Seen::Gone
    }
}

/// The result of a look.
pub(super) enum Seen {
    /// All peers are alive, or the error cannot be reported yet.
    Nothing,
    /// A peer is gone: its earlier work must be checked once more.
    Suspicion,
    /// A peer is gone, and the launch can never complete.
    Gone,
}

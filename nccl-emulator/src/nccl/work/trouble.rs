//! Messages that can never complete: their reports, and the outcome of the launch.
//!
//! A rank whose own memory is bad fails its context. A rank whose peer's memory is bad tells the
//! peer, and waits, as a kernel on a GPU waits for a peer that died. Different sizes are reported
//! once; both ends then wait, or fail under STRICT.

use super::lane::{Head, Wrong, describe, view};
use super::point_to_point::PointToPoint;
use super::scope::{Outcome, Scope};
use crate::transport::{Direction, Spoiled};
use cuda_emulator::violations::{Violation, ViolationKind};

impl PointToPoint {
    /// Finds the messages that a peer has marked as faulty.
    pub(super) fn look_for_spoiled(&mut self, scope: &Scope<'_>) -> Option<Outcome> {
        for at in 0..self.lanes.len() {
            let lane = &self.lanes[at];
            if matches!(lane.head, Head::Open | Head::Theirs)
                && let Some(why) = lane.exchange(scope.session).spoiled(lane.number)
                && let Some(outcome) = self.spoiled(scope, at, why)
            {
                return Some(outcome);
            }
        }
        None
    }

    /// Handles a head that can never complete. Returns `None` if the other lanes can continue.
    pub(super) fn spoiled(
        &mut self,
        scope: &Scope<'_>,
        at: usize,
        why: Spoiled,
    ) -> Option<Outcome> {
        let lane = &mut self.lanes[at];
        lane.head = Head::Stuck;
        let ours = match why {
            Spoiled::SizeMismatch => {
                let theirs = lane.peer_half(scope.session).0.len;
                return self.mismatch(scope, at, theirs, false);
            }
            Spoiled::Withdrawn => {
                lane.head = Head::Abandoned;
                return None;
            }
            Spoiled::BadSource => lane.direction == Direction::Send,
            Spoiled::BadDestination => lane.direction == Direction::Receive,
        };
        if !ours {
            return None;
        }
        let pool = scope.session.pool(scope.session.rank);
        let violation = view(pool, &lane.span).err().unwrap_or_else(|| {
            let text = format!(
                "rank {} found this rank's memory in use after it was freed",
                lane.peer
            );
            Violation::new(
                ViolationKind::UseAfterFree,
                Some(scope.communicator.device),
                text,
            )
        });
        let operation = describe(lane);
        Some(scope.fail(violation, &operation))
    }

    /// Reports a fault that this rank found in a message.
    pub(super) fn report(&mut self, scope: &Scope<'_>, at: usize, wrong: Wrong) -> Option<Outcome> {
        self.pay(scope);
        let lane = &mut self.lanes[at];
        let exchange = lane.exchange(scope.session);
        let peer = lane.peer;
        match wrong {
            // As on a GPU: this rank's kernel dies, the peer's kernel waits.
            Wrong::Own(violation) => Some(scope.fail(violation, &describe(lane))),
            Wrong::Peer(violation) => {
                lane.head = Head::Stuck;
                let why = match lane.direction {
                    Direction::Send => Spoiled::BadDestination,
                    Direction::Receive => Spoiled::BadSource,
                };
                if exchange.spoil(lane.number, why) {
                    eprintln!(
                        "nccl-emulator: {}: {} waits for ever: the memory of rank {peer} is bad ({violation})",
                        scope.communicator,
                        describe(lane)
                    );
                    scope.session.segment.call_attention(peer);
                }
                None
            }
            Wrong::Size { theirs } => {
                lane.head = Head::Stuck;
                let first = exchange.spoil(lane.number, Spoiled::SizeMismatch);
                if first {
                    scope.session.segment.call_attention(peer);
                }
                self.mismatch(scope, at, theirs, first)
            }
        }
    }

    fn mismatch(
        &mut self,
        scope: &Scope<'_>,
        at: usize,
        theirs: u64,
        first: bool,
    ) -> Option<Outcome> {
        let lane = &self.lanes[at];
        let (own, peer, ours) = (scope.session.rank, lane.peer, lane.span.len);
        let text = match lane.direction {
            Direction::Send => {
                format!("rank {own} sends {ours} bytes to rank {peer}, which receives {theirs}")
            }
            Direction::Receive => {
                format!("rank {own} receives {ours} bytes from rank {peer}, which sends {theirs}")
            }
        };
        match scope.mismatch(first, &text) {
            Outcome::Stuck => None,
            outcome => Some(outcome),
        }
    }
}

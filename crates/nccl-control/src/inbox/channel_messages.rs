//! Messages received over channels, kept in order until the program takes them.

use std::sync::Arc;
use std::time::Instant;

use super::state::Inbox;
use crate::departure::{Departure, Lost};
use crate::service::CAPACITY;

/// The result of taking a message.
#[derive(Debug)]
pub(crate) enum ReceiveOutcome {
    Message {
        from: usize,
        bytes: Arc<[u8]>,
        /// How many taken messages the coordinator has to be told of.
        took: Option<usize>,
    },
    Over(usize, Departure),
    /// The connection is closed, and why.
    Closed(Lost),
    Late,
}

/// After how many taken messages the coordinator is told.
const TOLD: usize = CAPACITY / 4;

impl Inbox {
    /// Takes the next message of a channel, or returns the end of all channels when there is none.
    pub(crate) fn receive(&self, channel: &str, deadline: Instant) -> ReceiveOutcome {
        let mut state = self.state.lock();
        loop {
            if let Some(queue) = state.channels.get_mut(channel)
                && let Some((from, bytes)) = queue.waiting.pop_front()
            {
                queue.taken += 1;
                let told = queue.taken >= TOLD;
                let took = told.then(|| std::mem::take(&mut queue.taken));
                return ReceiveOutcome::Message { from, bytes, took };
            }
            if let Some((rank, departure)) = state.over.clone() {
                return ReceiveOutcome::Over(rank, departure);
            }
            if let Some(why) = &state.closed {
                return ReceiveOutcome::Closed(why.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return ReceiveOutcome::Late;
            }
            self.message_arrived.wait_for(&mut state, left);
        }
    }
}

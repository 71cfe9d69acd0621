//! What comes over channels, in order, until somebody takes it.

use std::sync::Arc;
use std::time::Instant;

use super::state::Mailbox;
use crate::departure::{Departure, Lost};
use crate::service::CAPACITY;

/// What taking a message came to.
#[derive(Debug)]
pub(crate) enum Taken {
    Message {
        from: usize,
        bytes: Arc<[u8]>,
        /// How many the coordinator has to be told of.
        took: Option<usize>,
    },
    Over(usize, Departure),
    /// The connection is closed, and why.
    Closed(Lost),
    Late,
}

/// After how many messages the coordinator is told that they were taken.
const TOLD: usize = CAPACITY / 4;

impl Mailbox {
    /// The next message of a channel, and what the end of all channels is when there is none.
    pub(crate) fn receive(&self, channel: &str, deadline: Instant) -> Taken {
        let mut state = self.state.lock();
        loop {
            if let Some(queue) = state.channels.get_mut(channel)
                && let Some((from, bytes)) = queue.waiting.pop_front()
            {
                queue.taken += 1;
                let told = queue.taken >= TOLD;
                let took = told.then(|| std::mem::take(&mut queue.taken));
                return Taken::Message { from, bytes, took };
            }
            if let Some((rank, departure)) = state.over.clone() {
                return Taken::Over(rank, departure);
            }
            if let Some(why) = &state.closed {
                return Taken::Closed(why.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Taken::Late;
            }
            self.bell.wait_for(&mut state, left);
        }
    }
}

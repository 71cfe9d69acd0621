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
        /// The number of taken messages to report to the coordinator now, if any.
        took: Option<usize>,
    },
    /// A rank has left, which closes all channels.
    ChannelsClosed(usize, Departure),
    /// The connection is closed, and why.
    Closed(Lost),
    Late,
}

/// The number of taken messages after which a report is due.
const REPORT_AFTER: usize = CAPACITY / 4;

impl Inbox {
    /// Takes the next message of a channel; if there is none, returns the end of all channels.
    pub(crate) fn receive(&self, channel: &str, deadline: Instant) -> ReceiveOutcome {
        let mut state = self.state.lock();
        loop {
            if let Some(queue) = state.channels.get_mut(channel)
                && let Some((from, bytes)) = queue.waiting.pop_front()
            {
                queue.taken += 1;
                let must_report = queue.taken >= REPORT_AFTER;
                let took = must_report.then(|| std::mem::take(&mut queue.taken));
                return ReceiveOutcome::Message { from, bytes, took };
            }
            if let Some((rank, departure)) = state.channels_closed_by.clone() {
                return ReceiveOutcome::ChannelsClosed(rank, departure);
            }
            if let Some(why) = &state.closed {
                return ReceiveOutcome::Closed(why.clone());
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return ReceiveOutcome::Late;
            }
            self.message_arrived.wait_for(&mut state, remaining);
        }
    }
}

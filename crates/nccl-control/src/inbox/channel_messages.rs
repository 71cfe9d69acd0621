//! Messages received over channels, kept in order until the program takes them.

use std::sync::Arc;
use std::time::Instant;

use super::state::Inbox;
use crate::departure::{Departure, Lost};
use crate::request::ChannelPosition;
use crate::service::{CAPACITY, LARGEST_MESSAGE};

/// The result of taking a message.
#[derive(Debug)]
pub(crate) enum ReceiveOutcome {
    Message {
        from: usize,
        bytes: Arc<[u8]>,
        /// The number of messages taken in all, if it is to be reported to the coordinator now.
        took: Option<u64>,
    },
    /// A rank has left, which closes all channels.
    ChannelsClosed(usize, Departure),
    /// Messages may be lost with this rank, which coordinated before.
    ChannelsLost(usize),
    /// The connection is closed, and why.
    Closed(Lost),
    Late,
}

/// The number of taken messages after which a report is due, and their bytes: the coordinator keeps them until then.
const REPORT_AFTER: u64 = CAPACITY as u64 / 4;
const REPORT_AFTER_BYTES: usize = LARGEST_MESSAGE;

impl Inbox {
    /// Returns what was received of each channel.
    pub(crate) fn channel_positions(&self) -> Vec<ChannelPosition> {
        let state = self.state.lock();
        let channels = state.channels.iter();
        channels
            .map(|(channel, queue)| ChannelPosition {
                channel: channel.clone(),
                received: queue.received,
                taken: queue.taken(),
            })
            .collect()
    }

    /// Takes the next message of a channel; if there is none, returns the end of all channels.
    pub(crate) fn receive(&self, channel: &str, deadline: Instant) -> ReceiveOutcome {
        let mut state = self.state.lock();
        loop {
            if let Some(queue) = state.channels.get_mut(channel)
                && let Some((from, bytes)) = queue.waiting.pop_front()
            {
                queue.unreported_bytes += bytes.len();
                let taken = queue.taken();
                let must_report = taken - queue.reported >= REPORT_AFTER
                    || queue.unreported_bytes >= REPORT_AFTER_BYTES;
                let took = must_report.then_some(taken);
                if must_report {
                    (queue.reported, queue.unreported_bytes) = (taken, 0);
                }
                return ReceiveOutcome::Message { from, bytes, took };
            }
            if let Some((rank, departure)) = state.channels_closed_by.clone() {
                return ReceiveOutcome::ChannelsClosed(rank, departure);
            }
            if let Some(rank) = state.channels_lost_with {
                return ReceiveOutcome::ChannelsLost(rank);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordinator_message::Push;

    fn message(number: u64, bytes: usize) -> Push {
        Push::Message {
            channel: String::from("steps"),
            from: 1,
            number,
            bytes: vec![number as u8; bytes].into(),
        }
    }

    /// Takes the next message; returns its number, and the report that is due.
    fn take(inbox: &Inbox) -> Option<(u8, Option<u64>)> {
        match inbox.receive("steps", Instant::now()) {
            ReceiveOutcome::Message { bytes, took, .. } => Some((bytes[0], took)),
            _ => None,
        }
    }

    #[test]
    fn messages_are_received_once_and_none_overtakes_a_lost_one() {
        let inbox = Inbox::default();
        for number in [1, 2, 2, 1, 4, 5, 3, 3, 4] {
            inbox.push(message(number, 1));
        }
        let position = |received, taken| ChannelPosition {
            channel: String::from("steps"),
            received,
            taken,
        };
        assert_eq!(inbox.channel_positions(), [position(4, 0)]);
        let taken: Vec<_> = std::iter::from_fn(|| take(&inbox)).collect();
        assert_eq!(taken, [(1, None), (2, None), (3, None), (4, None)]);
        assert_eq!(inbox.channel_positions(), [position(4, 4)]);
        inbox.push(Push::ChannelsLost { rank: 2 });
        inbox.push(message(5, 1));
        assert_eq!(take(&inbox), Some((5, None)));
        let lost = inbox.receive("steps", Instant::now());
        assert!(matches!(lost, ReceiveOutcome::ChannelsLost(2)), "{lost:?}");
    }

    #[test]
    fn what_was_taken_is_reported_after_some_messages_or_bytes() {
        let inbox = Inbox::default();
        let mut reports = Vec::new();
        for number in 1..=40 {
            inbox.push(message(number, 1));
            reports.extend(take(&inbox).unwrap().1);
        }
        assert_eq!(reports, [16, 32]);
        inbox.push(message(41, REPORT_AFTER_BYTES - 8));
        assert_eq!(take(&inbox).unwrap().1, Some(41));
        inbox.push(message(42, REPORT_AFTER_BYTES - 1));
        assert_eq!(take(&inbox).unwrap().1, None);
        inbox.push(message(43, 1));
        assert_eq!(take(&inbox).unwrap().1, Some(43));
    }
}

//! Messages received over channels, kept in order until the program takes them.

use std::sync::Arc;
use std::time::Instant;

use super::state::Inbox;
use crate::departure::Lost;
use crate::request::{ChannelPosition, FollowedBefore};
use crate::round::RequestError;
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
    ChannelsEnded(RequestError),
    /// The connection is closed, and why.
    Closed(Lost),
    Late,
}

/// The number of taken messages after which a report is due, and their bytes: the coordinator keeps them until then.
const REPORT_AFTER: u64 = CAPACITY as u64 / 4;
const REPORT_AFTER_BYTES: usize = LARGEST_MESSAGE;

impl Inbox {
    /// Returns what this rank tells a coordinator that it follows again.
    pub(crate) fn follow_again(&self) -> FollowedBefore {
        let mut state = self.state.lock();
        state.follow_number += 1;
        state.awaits_messages = true;
        let channels = state.channels.iter();
        let received = channels
            .map(|(channel, queue)| ChannelPosition {
                channel: channel.clone(),
                received: queue.received,
                taken: queue.taken(),
            })
            .collect();
        let number = state.follow_number;
        FollowedBefore::Same { number, received }
    }

    /// Records that this rank follows another coordinator.
    pub(crate) fn follow_another(&self) {
        let mut state = self.state.lock();
        (state.awaits_messages, state.ignores_messages) = (false, true);
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
            if let Some(why) = state.channels_ended.clone() {
                return ReceiveOutcome::ChannelsEnded(why);
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
        let follow = |number, received| {
            let received = vec![received];
            FollowedBefore::Same { number, received }
        };
        assert_eq!(inbox.follow_again(), follow(1, position(4, 0)));
        let taken: Vec<_> = std::iter::from_fn(|| take(&inbox)).collect();
        assert_eq!(taken, [(1, None), (2, None), (3, None), (4, None)]);
        assert_eq!(inbox.follow_again(), follow(2, position(4, 4)));
        inbox.push(message(5, 1));
        assert_eq!(take(&inbox), Some((5, None)));
    }

    #[test]
    fn the_end_of_channels_does_not_overtake_messages_that_are_sent_again() {
        let ended = |inbox: &Inbox| match inbox.receive("steps", Instant::now()) {
            ReceiveOutcome::ChannelsEnded(why) => Some(why),
            _ => None,
        };
        let lost = |rank| RequestError::ChannelsLost { rank };
        let inbox = Inbox::default();
        for _ in 0..2 {
            inbox.follow_again();
        }
        // The answer to the first report has left out what was lost since then.
        for push in [Push::Followed(1), Push::ChannelsLost { rank: 2 }] {
            inbox.push(push);
            assert_eq!(ended(&inbox), None);
        }
        inbox.push(message(1, 1));
        for push in [Push::Followed(2), Push::ChannelsLost { rank: 3 }] {
            inbox.push(push);
        }
        assert_eq!(take(&inbox), Some((1, None)));
        // The first reason stays.
        inbox.push(Push::ChannelsLost { rank: 4 });
        assert_eq!(ended(&inbox), Some(lost(3)));
        let inbox = Inbox::default();
        inbox.follow_again();
        inbox.follow_another();
        inbox.push(message(1, 1));
        inbox.push(Push::ChannelsLost { rank: 2 });
        assert_eq!(ended(&inbox), Some(lost(2)));
        let inbox = Inbox::default();
        inbox.follow_again();
        inbox.push(Push::NotServed);
        assert_eq!(ended(&inbox), Some(RequestError::OldGeneration));
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

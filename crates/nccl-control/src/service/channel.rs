//! The state of channels, and of the messages that wait in them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use crate::departure::Departure;

/// The maximum number of messages of a channel that may wait for one rank.
pub(crate) const CAPACITY: usize = 64;

/// The largest message, in bytes.
pub(crate) const LARGEST_MESSAGE: usize = 1 << 20;

#[derive(Default)]
pub(super) struct Channels {
    pub(super) by_name: BTreeMap<String, Channel>,
    /// The rank that left first: from then on, no channel includes all ranks.
    pub(super) closed_by: Option<(usize, Departure)>,
    pub(super) former: Option<Former>,
}

/// The rank that coordinated before: messages that passed through it may be lost, so channels are not continued.
#[derive(Clone, Copy)]
pub(super) struct Former {
    pub(super) rank: usize,
    /// How long it may depart, which is then the reason.
    pub(super) until: Instant,
    /// Whether the ranks have been told that messages may be lost.
    pub(super) is_lost: bool,
}

#[derive(Default)]
pub(super) struct Channel {
    pub(super) receivers: Vec<Receiver>,
    /// Sends for which there is no room, in order.
    pub(super) held: VecDeque<Sending>,
}

/// The messages of a channel to one rank.
#[derive(Default)]
pub(super) struct Receiver {
    /// The number of messages sent to it, which is the number of the last one.
    pub(super) sent: u64,
    /// The last of them, which it has not taken as far as is known, with their senders. It may not have received them.
    pub(super) untaken: VecDeque<(usize, Arc<[u8]>)>,
}

impl Receiver {
    /// Returns the number of the last message that it has taken.
    pub(super) fn taken(&self) -> u64 {
        self.sent - self.untaken.len() as u64
    }

    /// Records that it has taken the messages up to this one.
    pub(super) fn take(&mut self, number: u64) {
        let taken = number.saturating_sub(self.taken());
        let taken = usize::try_from(taken).unwrap_or(usize::MAX);
        self.untaken.drain(..taken.min(self.untaken.len()));
    }
}

/// A message to send.
pub(super) struct Sending {
    pub(super) from: usize,
    pub(super) id: u64,
    /// To one rank, or to all others.
    pub(super) to: Option<usize>,
    pub(super) bytes: Arc<[u8]>,
    pub(super) begun: Instant,
    pub(super) deadline: Instant,
}

impl Channels {
    pub(super) fn holds(&self, rank: usize, id: u64) -> bool {
        let mut channels = self.by_name.values();
        channels.any(|channel| {
            let mut held = channel.held.iter();
            held.any(|sending| (sending.from, sending.id) == (rank, id))
        })
    }
}

impl Sending {
    pub(super) fn goes_to(&self, rank: usize) -> bool {
        match self.to {
            Some(to) => to == rank,
            None => self.from != rank,
        }
    }
}

impl Channel {
    /// Returns the ranks that have no room for the message.
    pub(super) fn full(&self, sending: &Sending) -> Vec<usize> {
        let receivers = self.receivers.iter().enumerate();
        receivers
            .filter(|(rank, receiver)| sending.goes_to(*rank) && receiver.untaken.len() >= CAPACITY)
            .map(|(rank, _)| rank)
            .collect()
    }
}

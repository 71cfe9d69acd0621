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
}

#[derive(Default)]
pub(super) struct Channel {
    /// For each rank, the number of messages sent to it and not yet taken.
    pub(super) waiting: Vec<usize>,
    /// Sends for which there is no room, in order.
    pub(super) held: VecDeque<Sending>,
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
        let ranks = 0..self.waiting.len();
        ranks
            .filter(|&rank| sending.goes_to(rank) && self.waiting[rank] >= CAPACITY)
            .collect()
    }
}

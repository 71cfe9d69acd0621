//! The coordinator's part of channels: it puts the messages of all senders into one order, and holds a
//! sender back whose receivers do not take what has come.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::hub::LONGEST_NAME;
use super::incoming::{Answer, Push};
use super::message::{Incomplete, Missing};
use super::state::State;
use crate::departure::Departure;

/// How many messages of a channel may wait for one rank.
pub(super) const CAPACITY: usize = 64;

/// The largest message, in bytes.
pub(super) const LARGEST_MESSAGE: usize = 1 << 20;

/// The most channels; a program that has more has lost count of their names.
const MOST: usize = 1024;

#[derive(Default)]
pub(super) struct Channels {
    by_name: HashMap<String, Channel>,
    /// Who left first: from then on no channel has all its ranks.
    pub(super) over: Option<(usize, Departure)>,
}

#[derive(Default)]
struct Channel {
    /// By rank: sent to it, and not yet taken.
    waiting: Vec<usize>,
    /// Sends for which there is no room, in their order.
    held: VecDeque<Sending>,
}

/// A message on its way.
pub(super) struct Sending {
    pub(super) from: usize,
    pub(super) id: u64,
    /// To one rank, or to all others.
    pub(super) to: Option<usize>,
    pub(super) bytes: Arc<[u8]>,
    pub(super) begun: Instant,
    pub(super) deadline: Instant,
}

impl Sending {
    fn goes_to(&self, rank: usize) -> bool {
        match self.to {
            Some(to) => to == rank,
            None => self.from != rank,
        }
    }
}

impl Channel {
    /// Who has no room for it.
    fn full(&self, sending: &Sending) -> Vec<usize> {
        let ranks = 0..self.waiting.len();
        ranks
            .filter(|&rank| sending.goes_to(rank) && self.waiting[rank] >= CAPACITY)
            .collect()
    }
}

impl State {
    pub(super) fn send_message(&mut self, name: String, sending: Sending) {
        let (rank, id) = (sending.from, sending.id);
        if let Some((rank, departure)) = self.channels.over.clone() {
            return self.refuse(sending.from, id, Incomplete::Gone { rank, departure });
        }
        let size = self.members.len();
        let is_new = !self.channels.by_name.contains_key(&name);
        let too_many = is_new && self.channels.by_name.len() >= MOST;
        let bytes = sending.bytes.len();
        let nobody = sending.to.is_some_and(|to| to >= size);
        if bytes > LARGEST_MESSAGE || name.len() > LONGEST_NAME || too_many || nobody {
            return self.refuse(rank, id, Incomplete::TooLarge { bytes });
        }
        let channel = self.channels.by_name.entry(name.clone()).or_default();
        channel.waiting.resize(size, 0);
        // Who came first goes first.
        if !channel.held.is_empty() || !channel.full(&sending).is_empty() {
            let deadline = sending.deadline;
            channel.held.push_back(sending);
            return self.due(deadline);
        }
        self.deliver(&name, &sending);
    }

    fn deliver(&mut self, name: &str, sending: &Sending) {
        let Some(channel) = self.channels.by_name.get_mut(name) else {
            return;
        };
        let push = Push::Message {
            channel: name.to_owned(),
            from: sending.from,
            bytes: Arc::clone(&sending.bytes),
        };
        let mut encoded = None;
        for (rank, member) in self.members.iter().enumerate() {
            if !sending.goes_to(rank) {
                continue;
            }
            channel.waiting[rank] += 1;
            if let Some(outlet) = &member.outlet {
                outlet.push(&push, &mut encoded);
                self.dirty.push(outlet.clone());
            }
        }
        self.answer_all(&[(sending.from, sending.id)], &Answer::Done);
    }

    /// A rank has taken so many messages.
    pub(super) fn took(&mut self, rank: usize, name: &str, count: usize) {
        if let Some(channel) = self.channels.by_name.get_mut(name) {
            channel.waiting[rank] = channel.waiting[rank].saturating_sub(count);
        }
        while let Some(channel) = self.channels.by_name.get_mut(name)
            && let Some(first) = channel.held.front()
            && channel.full(first).is_empty()
            && let Some(first) = channel.held.pop_front()
        {
            self.deliver(name, &first);
        }
    }

    /// A rank takes part in nothing any more.
    pub(super) fn end_channels(&mut self, rank: usize, departure: &Departure) {
        if self.channels.over.is_some() {
            return;
        }
        self.channels.over = Some((rank, departure.clone()));
        let channels = self.channels.by_name.values_mut();
        let held: Vec<_> = channels
            .flat_map(|channel| channel.held.drain(..))
            .map(|sending| (sending.from, sending.id))
            .collect();
        let departure = departure.clone();
        let gone = Incomplete::Gone {
            rank,
            departure: departure.clone(),
        };
        self.answer_all(&held, &Answer::Incomplete(Arc::new(gone)));
        self.push(&Push::Over { rank, departure });
    }

    /// Sends that have waited long enough.
    pub(super) fn give_up_sending(&mut self, now: Instant) {
        let mut late = Vec::new();
        for channel in self.channels.by_name.values_mut() {
            let mut kept = VecDeque::new();
            for sending in std::mem::take(&mut channel.held) {
                match sending.deadline <= now {
                    true => late.push((channel.full(&sending), sending)),
                    false => kept.push_back(sending),
                }
            }
            channel.held = kept;
        }
        for (full, sending) in late {
            let since = |at: Instant| now.saturating_duration_since(at);
            let missing = full.into_iter().map(|rank| {
                let phase = self.members[rank].phase.as_ref();
                Missing {
                    rank,
                    phase: phase.map(|(name, at)| (name.clone(), since(*at))),
                }
            });
            let why = Incomplete::TimedOut {
                missing: missing.collect(),
                waited: since(sending.begun),
                remarks: Vec::new(),
            };
            self.refuse(sending.from, sending.id, why);
        }
        // A send that is gone may have stood before one for which there is room.
        let names: Vec<_> = self.channels.by_name.keys().cloned().collect();
        for name in names {
            self.took(0, &name, 0);
        }
    }

    pub(super) fn next_send_deadline(&self) -> Option<Instant> {
        let channels = self.channels.by_name.values();
        channels
            .flat_map(|channel| &channel.held)
            .map(|sending| sending.deadline)
            .min()
    }
}

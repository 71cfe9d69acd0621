//! Channels: the messages of all senders in one order. A send waits while a receiver has no room.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::channel::{LARGEST_MESSAGE, Sending};
use super::state::{LONGEST_NAME, Recipients, Service, departure_error};
use crate::coordinator_message::{Answer, Push};
use crate::departure::Departure;
use crate::round::RequestError;
use crate::time::later;

/// The maximum number of channels; a program that exceeds it leaks names.
const MOST: usize = 1024;

impl Service {
    pub(super) fn send(
        &mut self,
        now: Instant,
        (rank, id): (usize, u64),
        name: String,
        to: Option<usize>,
        timeout: Duration,
        bytes: Arc<[u8]>,
    ) {
        if let Some((first, departure)) = &self.channels.closed_by {
            let why = departure_error(*first, departure);
            return self.refuse(rank, id, why);
        }
        let size = self.ranks.len();
        let is_new = !self.channels.by_name.contains_key(&name);
        let too_many = is_new && self.channels.by_name.len() >= MOST;
        let no_such_rank = to.is_some_and(|to| to >= size);
        let length = bytes.len();
        if length > LARGEST_MESSAGE || name.len() > LONGEST_NAME || too_many || no_such_rank {
            return self.refuse(rank, id, RequestError::TooLarge { bytes: length });
        }
        let sending = Sending {
            from: rank,
            id,
            to,
            bytes,
            begun: now,
            deadline: later(now, timeout),
        };
        let channel = self.channels.by_name.entry(name.clone()).or_default();
        channel.waiting.resize(size, 0);
        // Sends are served in order of arrival.
        if !channel.held.is_empty() || !channel.full(&sending).is_empty() {
            let deadline = sending.deadline;
            channel.held.push_back(sending);
            return self.note_deadline(deadline);
        }
        self.deliver(&name, sending);
    }

    fn deliver(&mut self, name: &str, sending: Sending) {
        let Some(channel) = self.channels.by_name.get_mut(name) else {
            return;
        };
        let ranks = 0..channel.waiting.len();
        let ranks: Vec<_> = ranks.filter(|&rank| sending.goes_to(rank)).collect();
        for &rank in &ranks {
            channel.waiting[rank] += 1;
        }
        let push = Push::Message {
            channel: name.to_owned(),
            from: sending.from,
            bytes: sending.bytes,
        };
        self.push(Recipients::Ranks(ranks), push);
        self.answer(vec![(sending.from, sending.id)], Answer::Done);
    }

    /// Records that a rank has taken `count` messages.
    pub(super) fn consume(&mut self, rank: usize, name: &str, count: usize) {
        if let Some(channel) = self.channels.by_name.get_mut(name) {
            channel.waiting[rank] = channel.waiting[rank].saturating_sub(count);
        }
        while let Some(channel) = self.channels.by_name.get_mut(name)
            && let Some(first) = channel.held.front()
            && channel.full(first).is_empty()
            && let Some(first) = channel.held.pop_front()
        {
            self.deliver(name, first);
        }
    }

    /// Ends all channels, because a rank does not take part any more.
    pub(super) fn end_channels(&mut self, rank: usize, departure: Departure) {
        if self.channels.closed_by.is_some() {
            return;
        }
        self.channels.closed_by = Some((rank, departure.clone()));
        let channels = self.channels.by_name.values_mut();
        let held = channels
            .flat_map(|channel| channel.held.drain(..))
            .map(|sending| (sending.from, sending.id))
            .collect();
        let why = departure_error(rank, &departure);
        self.answer(held, Answer::Failed(Arc::new(why)));
        self.push(Recipients::All, Push::ChannelsClosed { rank, departure });
    }

    /// Ends the sends whose deadline has passed.
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
            let missing = full.into_iter().map(|rank| self.missing(rank, now));
            let why = RequestError::TimedOut {
                missing: missing.collect(),
                waited: now.saturating_duration_since(sending.begun),
                notes: Vec::new(),
            };
            self.refuse(sending.from, sending.id, why);
        }
        // A removed send may have blocked another one for which there is room.
        let names: Vec<_> = self.channels.by_name.keys().cloned().collect();
        for name in names {
            self.consume(0, &name, 0);
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

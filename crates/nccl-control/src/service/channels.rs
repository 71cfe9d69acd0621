//! Channels: the messages of all senders in one order. A send waits while a receiver has no room.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::channel::{Former, LARGEST_MESSAGE, Receiver, Sending};
use super::state::{LONGEST_NAME, Output, Recipients, Service, departure_error};
use crate::coordinator_message::{Answer, Push};
use crate::departure::Departure;
use crate::request::{ChannelPosition, FollowedBefore};
use crate::round::RequestError;
use crate::time::later;

/// The maximum number of channels; a program that exceeds it leaks names.
const MOST: usize = 1024;

/// How long the ranks wait for the departure of a former coordinator, which explains more than that messages may be lost: it
/// takes longer than a connection can be resumed, and than the report of the launcher that has started it.
const DEPARTURE_TIMEOUT: Duration = Duration::from_secs(5);

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
        if let Some(why) = self.end_of_channels() {
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
        channel.receivers.resize_with(size, Receiver::default);
        // Sends are served in order of arrival, and not until it is known how the former coordinator ended.
        if self.channels.former.is_some()
            || !channel.held.is_empty()
            || !channel.full(&sending).is_empty()
        {
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
        // A message is encoded once for all ranks to which it has the same number.
        let mut by_number: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        let receivers = channel.receivers.iter_mut().enumerate();
        for (rank, receiver) in receivers.filter(|(rank, _)| sending.goes_to(*rank)) {
            receiver.sent += 1;
            let message = (sending.from, Arc::clone(&sending.bytes));
            receiver.untaken.push_back(message);
            by_number.entry(receiver.sent).or_default().push(rank);
        }
        for (number, ranks) in by_number {
            let push = Push::Message {
                channel: name.to_owned(),
                from: sending.from,
                number,
                bytes: Arc::clone(&sending.bytes),
            };
            self.push(Recipients::Ranks(ranks), push);
        }
        self.answer(vec![(sending.from, sending.id)], Answer::Done);
    }

    /// Records that a rank has taken the messages up to this number.
    pub(super) fn consume(&mut self, rank: usize, name: &str, taken: u64) {
        if let Some(channel) = self.channels.by_name.get_mut(name) {
            channel.receivers[rank].take(taken);
        }
        self.deliver_held(name);
    }

    /// Sends the messages for which there is room now.
    fn deliver_held(&mut self, name: &str) {
        if self.channels.former.is_some() {
            return;
        }
        while let Some(channel) = self.channels.by_name.get_mut(name)
            && let Some(first) = channel.held.front()
            && channel.full(first).is_empty()
            && let Some(first) = channel.held.pop_front()
        {
            self.deliver(name, first);
        }
    }

    /// Sends what a rank that follows again has not received. It has disregarded messages that were sent since then.
    pub(super) fn resend_messages(&mut self, rank: usize, positions: &[ChannelPosition]) {
        let known: HashMap<&str, &ChannelPosition> = positions
            .iter()
            .map(|position| (position.channel.as_str(), position))
            .collect();
        for (name, channel) in &mut self.channels.by_name {
            let receiver = &mut channel.receivers[rank];
            let position = known.get(name.as_str());
            let (received, taken) = position.map_or((0, 0), |own| (own.received, own.taken));
            receiver.take(taken);
            let first = received.saturating_sub(receiver.taken());
            let first = usize::try_from(first).unwrap_or(usize::MAX);
            let unreceived = receiver.untaken.iter().enumerate().skip(first);
            for (index, (from, bytes)) in unreceived {
                let push = Push::Message {
                    channel: name.clone(),
                    from: *from,
                    number: receiver.taken() + index as u64 + 1,
                    bytes: Arc::clone(bytes),
                };
                let to = Recipients::Rank(rank);
                self.outputs.push_back(Output::Push { to, push });
            }
        }
        self.deliver_all_held();
    }

    fn deliver_all_held(&mut self) {
        let names: Vec<_> = self.channels.by_name.keys().cloned().collect();
        for name in names {
            self.deliver_held(&name);
        }
    }

    /// Handles which coordinator a rank has followed before.
    pub(super) fn hear_followed_before(
        &mut self,
        now: Instant,
        rank: usize,
        before: FollowedBefore,
    ) {
        match before {
            FollowedBefore::None => {}
            FollowedBefore::Same { number, received } => {
                self.resend_messages(rank, &received);
                self.push(Recipients::Rank(rank), Push::Followed(number));
            }
            // This process has not heard of that coordinator.
            FollowedBefore::Other(other)
                if self.channels.former.is_none() && self.channels.closed_by.is_none() =>
            {
                self.follows(now, other.min(self.ranks.len() - 1));
                self.lose_channels();
            }
            FollowedBefore::Other(_) => {}
        }
        // It has not ended.
        if self
            .channels
            .former
            .is_some_and(|former| former.rank == rank)
        {
            self.lose_channels();
        }
    }

    /// Records that another rank has coordinated before, whose channels are not continued.
    pub(super) fn follows(&mut self, now: Instant, rank: usize) {
        let (until, is_lost) = (later(now, DEPARTURE_TIMEOUT), false);
        self.channels.former = Some(Former {
            rank,
            until,
            is_lost,
        });
        self.note_deadline(until);
    }

    /// Returns until when the former coordinator may depart.
    pub(crate) fn next_former_deadline(&self) -> Option<Instant> {
        let former = self.channels.former.as_ref()?;
        let is_known = former.is_lost || self.ranks[former.rank].departure.is_some();
        (!is_known).then_some(former.until)
    }

    /// Closes the channels if the former coordinator has not departed in time.
    pub(super) fn give_up_former(&mut self, now: Instant) {
        if self
            .next_former_deadline()
            .is_some_and(|until| until <= now)
        {
            self.lose_channels();
        }
    }

    /// Closes all channels, because messages that passed through the former coordinator may be lost.
    fn lose_channels(&mut self) {
        if self.next_former_deadline().is_none() {
            return;
        }
        if let Some(former) = &mut self.channels.former {
            former.is_lost = true;
            let rank = former.rank;
            self.refuse_held(&RequestError::ChannelsLost { rank });
            self.push(Recipients::All, Push::ChannelsLost { rank });
        }
    }

    /// Answers the sends for which there was no room.
    fn refuse_held(&mut self, why: &RequestError) {
        let channels = self.channels.by_name.values_mut();
        let held = channels
            .flat_map(|channel| channel.held.drain(..))
            .map(|sending| (sending.from, sending.id))
            .collect();
        self.answer(held, Answer::Failed(Arc::new(why.clone())));
    }

    /// Continues the channels of an earlier coordinator, as a planted mistake.
    #[cfg(any(test, feature = "simulator"))]
    pub(crate) fn continue_channels(&mut self) {
        self.channels.former = None;
    }

    /// Returns why the channels are closed, if they are.
    fn end_of_channels(&self) -> Option<RequestError> {
        let Some(former) = self.channels.former else {
            let closed_by = self.channels.closed_by.as_ref();
            return closed_by.map(|(rank, departure)| departure_error(*rank, departure));
        };
        // A rank that has not learned of an earlier departure may miss messages from before it.
        let rank = former.rank;
        match &self.ranks[rank].departure {
            _ if former.is_lost => Some(RequestError::ChannelsLost { rank }),
            Some(departure) => Some(departure_error(rank, departure)),
            None => None,
        }
    }

    /// Returns the message that tells a rank why the channels are closed, if they are.
    pub(crate) fn closed_channels(&self) -> Option<Push> {
        match self.end_of_channels()? {
            RequestError::Departed { rank, departure } => {
                Some(Push::ChannelsClosed { rank, departure })
            }
            RequestError::ChannelsLost { rank } => Some(Push::ChannelsLost { rank }),
            _ => None,
        }
    }

    /// Ends all channels, because a rank does not take part any more.
    pub(super) fn end_channels(&mut self, rank: usize, departure: Departure) {
        // It receives nothing more.
        for channel in self.channels.by_name.values_mut() {
            channel.receivers[rank].untaken.clear();
        }
        let is_first = self.channels.closed_by.is_none();
        if is_first {
            self.channels.closed_by = Some((rank, departure.clone()));
        }
        let is_reason = match &self.channels.former {
            Some(former) => former.rank == rank && !former.is_lost,
            None => is_first,
        };
        if is_reason {
            self.refuse_held(&departure_error(rank, &departure));
            self.push(Recipients::All, Push::ChannelsClosed { rank, departure });
        }
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
            let why = match self.channels.former {
                Some(Former { rank, .. }) => RequestError::ChannelsLost { rank },
                None => RequestError::TimedOut {
                    missing: missing.collect(),
                    waited: now.saturating_duration_since(sending.begun),
                    notes: Vec::new(),
                },
            };
            self.refuse(sending.from, sending.id, why);
        }
        // A removed send may have blocked another one for which there is room.
        self.deliver_all_held();
    }

    pub(super) fn next_send_deadline(&self) -> Option<Instant> {
        let channels = self.channels.by_name.values();
        channels
            .flat_map(|channel| &channel.held)
            .map(|sending| sending.deadline)
            .min()
    }
}

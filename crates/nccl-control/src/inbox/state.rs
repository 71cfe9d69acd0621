//! The state of an inbox.

use std::collections::hash_map::{self, HashMap};
use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use super::answer_slot::AnswerSlot;
use super::notice::Notice;
use crate::departure::{Departure, Lost};
use crate::events::{EventBus, WorldEvent};
use crate::heartbeat::Suspects;
use crate::round::RequestError;
use crate::sync::{Condvar, Mutex};

pub(super) type Handler = Box<dyn Fn(&Notice) + Send + Sync>;

/// The messages received over a channel.
#[derive(Default)]
pub(super) struct ChannelQueue {
    pub(super) waiting: VecDeque<(usize, Arc<[u8]>)>,
    /// The number of the last received message.
    pub(super) received: u64,
    /// The number of the last message that was taken before the last report to the coordinator, and the bytes of those
    /// that were taken since.
    pub(super) reported: u64,
    pub(super) unreported_bytes: usize,
}

impl ChannelQueue {
    /// Returns the number of the last message that was taken.
    pub(super) fn taken(&self) -> u64 {
        self.received - self.waiting.len() as u64
    }
}

#[derive(Default)]
pub(crate) struct Inbox {
    pub(super) state: Mutex<State>,
    /// Signalled when a message arrives over a channel.
    pub(super) message_arrived: Condvar,
    /// Locked while handlers run, by one thread at a time, so that notices stay in order.
    pub(super) handlers: Mutex<Vec<Handler>>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) next: u64,
    pub(super) waiting: HashMap<u64, Arc<AnswerSlot>>,
    /// The requests that outlive a coordinator: they are repeated to its successor.
    pub(super) repeatable: HashSet<u64>,
    /// The rank that coordinates.
    pub(super) coordinator: usize,
    pub(super) notices: VecDeque<Notice>,
    pub(super) handler_is_running: bool,
    /// Notices that arrived before the first handler.
    pub(super) early_notices: Vec<Notice>,
    pub(super) departed: HashMap<usize, Departure>,
    /// The rank that died or failed first.
    pub(super) first_failed: Option<usize>,
    pub(super) channels: HashMap<String, ChannelQueue>,
    /// Why the channels have ended.
    pub(super) channels_ended: Option<RequestError>,
    /// The number of times that this rank has followed a coordinator again, and whether messages of channels that were
    /// sent before the last time may still arrive.
    pub(super) follow_number: u64,
    pub(super) awaits_messages: bool,
    /// Whether this rank has followed another coordinator, which does not continue the channels.
    pub(super) ignores_messages: bool,
    /// The number of processes that wait to be admitted to the next generation.
    pub(super) joiners: usize,
    pub(super) suspects: Suspects,
    /// Why no more messages will arrive.
    pub(super) closed: Option<Lost>,
    /// The ranks that this rank cannot reach any more, and why, if the inbox was closed for that reason.
    pub(super) cut_off: Option<(Vec<usize>, String)>,
    /// The event bus, from the first reader on; passed on to the next generation.
    pub(super) event_bus: Option<Arc<EventBus>>,
    /// Whether the events continue in the inbox of the next generation.
    pub(super) has_next_generation: bool,
}

impl State {
    /// Queues a notice for the handlers, in order.
    pub(super) fn deliver(&mut self, notice: Notice) {
        if let Notice::Departed { rank, departure } = &notice {
            match self.departed.entry(*rank) {
                hash_map::Entry::Occupied(_) => return,
                hash_map::Entry::Vacant(departed) => departed.insert(departure.clone()),
            };
            self.record_event(|| WorldEvent::departed(*rank, departure.clone()));
            self.suspects.forget(*rank);
            if *departure != Departure::Left {
                self.first_failed.get_or_insert(*rank);
            }
        }
        self.notices.push_back(notice);
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").finish_non_exhaustive()
    }
}

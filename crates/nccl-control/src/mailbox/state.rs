//! The state of a mailbox.

use std::collections::hash_map::{self, HashMap};
use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use super::notice::Notice;
use super::slot::Slot;
use crate::departure::{Departure, Lost};
use crate::events::{Happenings, WorldEvent};
use crate::heartbeat::Suspects;
use crate::sync::{Condvar, Mutex};

pub(super) type Handler = Box<dyn Fn(&Notice) + Send + Sync>;

/// The messages received over a channel.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) waiting: VecDeque<(usize, Arc<[u8]>)>,
    /// How many messages were taken since the coordinator was told.
    pub(super) taken: usize,
}

#[derive(Default)]
pub(crate) struct Mailbox {
    pub(super) state: Mutex<State>,
    /// Signalled when a message arrives over a channel.
    pub(super) bell: Condvar,
    /// Held while handlers run, by one thread at a time, so that notices stay in their order.
    pub(super) handlers: Mutex<Vec<Handler>>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) next: u64,
    pub(super) waiting: HashMap<u64, Arc<Slot>>,
    /// The tickets that outlast a coordinator: the request is repeated to its successor.
    pub(super) lasting: HashSet<u64>,
    /// The rank that coordinates.
    pub(super) coordinator: usize,
    pub(super) inbox: VecDeque<Notice>,
    pub(super) running: bool,
    /// Notices that arrived before the first handler.
    pub(super) kept: Vec<Notice>,
    pub(super) departed: HashMap<usize, Departure>,
    /// The rank that died or failed first.
    pub(super) first_failed: Option<usize>,
    pub(super) channels: HashMap<String, Queue>,
    /// The rank that left first, and how: the end of all channels.
    pub(super) over: Option<(usize, Departure)>,
    /// How many processes wait to be taken into the next generation.
    pub(super) newcomers: usize,
    pub(super) suspects: Suspects,
    /// Why no message will arrive any more.
    pub(super) closed: Option<Lost>,
    /// The ranks that this rank cannot reach any more, and why, if the mailbox closed for that.
    pub(super) cut_off: Option<(Vec<usize>, String)>,
    /// The events, from the first reader on; passed on to the next generation.
    pub(super) happenings: Option<Arc<Happenings>>,
    /// Whether the events go on in the mailbox of the next generation.
    pub(super) passed_on: bool,
}

impl State {
    /// Queues a notice for the handlers, in order.
    pub(super) fn deliver(&mut self, notice: Notice) {
        if let Notice::Gone { rank, departure } = &notice {
            match self.departed.entry(*rank) {
                hash_map::Entry::Occupied(_) => return,
                hash_map::Entry::Vacant(departed) => departed.insert(departure.clone()),
            };
            self.happens(|| WorldEvent::departed(*rank, departure.clone()));
            self.suspects.forget(*rank);
            if *departure != Departure::Left {
                self.first_failed.get_or_insert(*rank);
            }
        }
        self.inbox.push_back(notice);
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").finish_non_exhaustive()
    }
}

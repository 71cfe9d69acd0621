//! A mailbox and what is in it.

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

/// What has come over a channel.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) waiting: VecDeque<(usize, Arc<[u8]>)>,
    /// How many were taken since the coordinator was told.
    pub(super) taken: usize,
}

#[derive(Default)]
pub(crate) struct Mailbox {
    pub(super) state: Mutex<State>,
    /// Rings when something comes over a channel.
    pub(super) bell: Condvar,
    /// Runs the handlers, one thread at a time, so that notices stay in their order.
    pub(super) handlers: Mutex<Vec<Handler>>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) next: u64,
    pub(super) waiting: HashMap<u64, Arc<Slot>>,
    /// The tickets that outlast a coordinator: its successor is asked the same.
    pub(super) lasting: HashSet<u64>,
    /// Who coordinates.
    pub(super) coordinator: usize,
    pub(super) inbox: VecDeque<Notice>,
    pub(super) running: bool,
    /// Notices that came before the first handler.
    pub(super) kept: Vec<Notice>,
    pub(super) departed: HashMap<usize, Departure>,
    /// Who died or failed before everybody else.
    pub(super) first_failed: Option<usize>,
    pub(super) channels: HashMap<String, Queue>,
    /// Who left first, and how: the end of all channels.
    pub(super) over: Option<(usize, Departure)>,
    /// How many wait to be taken into the next epoch.
    pub(super) newcomers: usize,
    pub(super) suspects: Suspects,
    /// Why nothing comes any more.
    pub(super) closed: Option<Lost>,
    /// Whom this rank cannot reach any more, and why, if that is it.
    pub(super) cut_off: Option<(Vec<usize>, String)>,
    /// The events, from the first reader on; in the next epoch, too.
    pub(super) happenings: Option<Arc<Happenings>>,
    /// Whether they go on in the mailbox of the next epoch.
    pub(super) passed_on: bool,
}

impl State {
    /// For the handlers, in order.
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

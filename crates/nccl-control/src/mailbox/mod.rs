//! What has come for one rank: answers to requests that threads wait for, and notices.
//!
//! All of it is behind one lock, in `State`, which is here with what a notice changes in it.
//!
//! - `sink`: how what comes gets in; `facts`: what can be looked up; `closing`: when nothing comes any more;
//! - `ticket`: a request whose answer is waited for;
//! - `notice`, `handlers`: what comes unasked, and who is called with it;
//! - `messages`: what comes over channels;

mod closing;
mod facts;
mod handlers;
mod happenings;
mod messages;
mod notice;
mod sink;
mod ticket;

use std::collections::hash_map::{self, HashMap};
use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use self::handlers::Handler;
use self::messages::Queue;
use self::ticket::Slot;
use super::events::{Happenings, WorldEvent};
use super::heartbeat::Suspects;
use crate::departure::{Departure, Lost};
use crate::sync::{Condvar, Mutex};

pub(super) use self::messages::Taken;
pub use self::notice::Notice;
pub(super) use self::ticket::Waited;

#[derive(Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
    /// Rings when something comes over a channel.
    bell: Condvar,
    /// Runs the handlers, one thread at a time, so that notices stay in their order.
    handlers: Mutex<Vec<Handler>>,
}

#[derive(Default)]
struct State {
    next: u64,
    waiting: HashMap<u64, Arc<Slot>>,
    /// The tickets that outlast a coordinator: its successor is asked the same.
    lasting: HashSet<u64>,
    /// Who coordinates.
    coordinator: usize,
    inbox: VecDeque<Notice>,
    running: bool,
    /// Notices that came before the first handler.
    kept: Vec<Notice>,
    departed: HashMap<usize, Departure>,
    /// Who died or failed before everybody else.
    first_failed: Option<usize>,
    channels: HashMap<String, Queue>,
    /// Who left first, and how: the end of all channels.
    over: Option<(usize, Departure)>,
    /// How many wait to be taken into the next epoch.
    newcomers: usize,
    suspects: Suspects,
    /// Why nothing comes any more.
    closed: Option<Lost>,
    /// Whom this rank cannot reach any more, and why, if that is it.
    cut_off: Option<(Vec<usize>, String)>,
    /// What happens, once somebody has asked; in the next epoch, too.
    happenings: Option<Arc<Happenings>>,
    /// Whether they go on in the mailbox of the next epoch.
    passed_on: bool,
}

impl State {
    /// For the handlers, in order.
    fn deliver(&mut self, notice: Notice) {
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

//! What has come for one rank: answers to requests that threads wait for, and notices.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::channels::CAPACITY;
use super::client::Sink;
use super::incoming::{Answer, Push};
use super::message::Departure;
use crate::communicator::lock;

/// Something that another rank announced, or that happened to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    Announced {
        from: usize,
        topic: String,
        bytes: Arc<[u8]>,
    },
    /// A rank left, failed or died. Comes once for each.
    Gone { rank: usize, departure: Departure },
}

type Handler = Box<dyn Fn(&Notice) + Send + Sync>;

#[derive(Default)]
pub(super) struct Mailbox {
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
    inbox: VecDeque<Notice>,
    running: bool,
    /// Notices that came before the first handler.
    kept: Vec<Notice>,
    departed: HashMap<usize, Departure>,
    /// Who died or failed before everybody else.
    first_failed: Option<usize>,
    /// Whether somebody will say how rank 0's process ends.
    watched: bool,
    channels: HashMap<String, Queue>,
    /// Who left first, and how: the end of all channels.
    over: Option<(usize, Departure)>,
    /// How many wait to be taken into the next epoch.
    newcomers: usize,
    /// Why nothing comes any more.
    closed: Option<String>,
}

/// What has come over a channel.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<(usize, Arc<[u8]>)>,
    /// How many were taken since the coordinator was told.
    taken: usize,
}

/// What taking a message came to.
#[derive(Debug)]
pub(super) enum Taken {
    Message {
        from: usize,
        bytes: Arc<[u8]>,
        /// How many the coordinator has to be told of.
        took: Option<usize>,
    },
    Over(usize, Departure),
    /// The connection is closed; the text says why.
    Closed(String),
    Late,
}

#[derive(Default)]
struct Slot {
    answer: Mutex<Option<Result<Answer, String>>>,
    came: Condvar,
}

/// What waiting for an answer came to.
#[derive(Debug)]
pub(super) enum Waited {
    Answer(Answer),
    /// The connection is closed; the text says why.
    Closed(String),
    Late,
    Interrupted,
}

/// A request on its way; dropped, its answer is nobody's.
pub(super) struct Ticket<'m> {
    mailbox: &'m Mailbox,
    pub(super) id: u64,
    slot: Arc<Slot>,
}

/// After how many messages the coordinator is told that they were taken.
const TOLD: usize = CAPACITY / 4;

/// How many notices are kept for the first handler.
const KEPT: usize = 1024;

impl Mailbox {
    /// A number for a request, under which its answer will come.
    pub(super) fn ticket(&self) -> Ticket<'_> {
        let slot = Arc::new(Slot::default());
        let mut state = lock(&self.state);
        let id = state.next;
        state.next += 1;
        match &state.closed {
            None => {
                state.waiting.insert(id, Arc::clone(&slot));
            }
            Some(why) => *lock(&slot.answer) = Some(Err(why.clone())),
        }
        Ticket {
            mailbox: self,
            id,
            slot,
        }
    }

    pub(super) fn answer(&self, id: u64, answer: Answer) {
        // An answer to a request that was given up may still come.
        if let Some(slot) = lock(&self.state).waiting.remove(&id) {
            slot.put(Ok(answer));
        }
    }

    pub(super) fn push(&self, push: Push) {
        let mut state = lock(&self.state);
        let notice = match push {
            Push::Notice { from, topic, bytes } => Notice::Announced { from, topic, bytes },
            Push::Gone { rank, departure } => {
                if state.departed.contains_key(&rank) {
                    return;
                }
                state.departed.insert(rank, departure.clone());
                if departure != Departure::Left {
                    state.first_failed.get_or_insert(rank);
                }
                Notice::Gone { rank, departure }
            }
            Push::Watched(watched) => {
                state.watched = watched;
                return;
            }
            Push::Message {
                channel,
                from,
                bytes,
            } => {
                let queue = state.channels.entry(channel).or_default();
                queue.waiting.push_back((from, bytes));
                drop(state);
                self.bell.notify_all();
                return;
            }
            Push::Over { rank, departure } => {
                state.over.get_or_insert((rank, departure));
                drop(state);
                self.bell.notify_all();
                return;
            }
            Push::Newcomers(count) => {
                state.newcomers = count;
                return;
            }
            // What others are told.
            Push::Size(_) | Push::Member(_) | Push::Invited { .. } => return,
        };
        state.inbox.push_back(notice);
    }

    /// How many wait to be taken into the next epoch.
    pub(super) fn newcomers(&self) -> usize {
        lock(&self.state).newcomers
    }

    /// How a rank left, if it did.
    pub(super) fn departure(&self, rank: usize) -> Option<Departure> {
        lock(&self.state).departed.get(&rank).cloned()
    }

    /// Who left, and how.
    pub(super) fn departures(&self) -> Vec<(usize, Departure)> {
        let state = lock(&self.state);
        let departed = state.departed.iter();
        departed
            .map(|(&rank, departure)| (rank, departure.clone()))
            .collect()
    }

    /// Who died or failed first, if anybody did.
    pub(super) fn first_failed(&self) -> Option<(usize, Departure)> {
        let state = lock(&self.state);
        let rank = state.first_failed?;
        Some((rank, state.departed.get(&rank)?.clone()))
    }

    /// The next message of a channel, and what the end of all channels is when there is none.
    pub(super) fn receive(&self, channel: &str, deadline: Instant) -> Taken {
        let mut state = lock(&self.state);
        loop {
            if let Some(queue) = state.channels.get_mut(channel)
                && let Some((from, bytes)) = queue.waiting.pop_front()
            {
                queue.taken += 1;
                let told = queue.taken >= TOLD;
                let took = told.then(|| std::mem::take(&mut queue.taken));
                return Taken::Message { from, bytes, took };
            }
            if let Some((rank, departure)) = state.over.clone() {
                return Taken::Over(rank, departure);
            }
            if let Some(why) = &state.closed {
                return Taken::Closed(why.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Taken::Late;
            }
            let waited = self.bell.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Nothing comes any more: everybody who waits learns why. Unless rank 0 has said that it leaves, that
    /// is how its death shows.
    pub(super) fn close(&self, why: &str) {
        let mut state = lock(&self.state);
        if state.closed.is_some() {
            return;
        }
        state.closed = Some(why.to_owned());
        if let Entry::Vacant(departed) = state.departed.entry(0) {
            let departure = Departure::Lost(why.to_owned());
            departed.insert(departure.clone());
            state.first_failed.get_or_insert(0);
            state.inbox.push_back(Notice::Gone { rank: 0, departure });
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.bell.notify_all();
        for slot in waiting.into_values() {
            slot.put(Err(why.to_owned()));
        }
    }

    /// From now on, `handler` is called with each notice, on the thread that received it: it must not
    /// wait. Notices that came before go to the first handler at once.
    pub(super) fn on_notice(&self, handler: Handler) {
        let mut handlers = lock(&self.handlers);
        let kept = std::mem::take(&mut lock(&self.state).kept);
        kept.iter().for_each(&handler);
        handlers.push(handler);
    }

    /// Calls the handlers with what has come, unless another thread is at it. Whether all is heard.
    pub(super) fn run_handlers(&self) -> bool {
        loop {
            let notice = {
                let mut state = lock(&self.state);
                if state.running {
                    return false;
                }
                let Some(notice) = state.inbox.pop_front() else {
                    return true;
                };
                state.running = true;
                notice
            };
            let handlers = lock(&self.handlers);
            if handlers.is_empty() {
                let mut state = lock(&self.state);
                if state.kept.len() < KEPT {
                    state.kept.push(notice);
                }
            } else {
                for handler in handlers.iter() {
                    // A handler that panics takes nobody else with it.
                    let call = std::panic::AssertUnwindSafe(|| handler(&notice));
                    let _ = std::panic::catch_unwind(call);
                }
            }
            drop(handlers);
            lock(&self.state).running = false;
        }
    }
}

impl Sink for Mailbox {
    fn answer(&self, id: u64, answer: Answer) {
        Mailbox::answer(self, id, answer);
    }

    fn push(&self, push: Push) {
        Mailbox::push(self, push);
    }

    fn settle(&self) {
        self.run_handlers();
    }

    fn waits_for_word(&self) -> bool {
        lock(&self.state).watched
    }

    fn close(&self, why: &str) {
        Mailbox::close(self, why);
        self.run_handlers();
    }
}

impl Slot {
    fn put(&self, answer: Result<Answer, String>) {
        *lock(&self.answer) = Some(answer);
        self.came.notify_all();
    }
}

impl Ticket<'_> {
    /// Waits for the answer. An interruption rings no bell, and is looked for now and then.
    pub(super) fn wait(&self, deadline: Instant, interrupted: Option<&dyn Fn() -> bool>) -> Waited {
        let mut answer = lock(&self.slot.answer);
        loop {
            match answer.take() {
                Some(Ok(answer)) => return Waited::Answer(answer),
                Some(Err(why)) => return Waited::Closed(why),
                None => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Waited::Late;
            }
            let pause = match interrupted {
                Some(interrupted) if interrupted() => return Waited::Interrupted,
                Some(_) => left.min(Duration::from_millis(20)),
                None => left,
            };
            answer = self
                .slot
                .came
                .wait_timeout(answer, pause)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        lock(&self.mailbox.state).waiting.remove(&self.id);
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").finish_non_exhaustive()
    }
}

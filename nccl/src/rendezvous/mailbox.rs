//! What has come for one rank: answers to requests that threads wait for, and notices.

use std::collections::hash_map::{self, HashMap};
use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::channels::CAPACITY;
use super::client::Sink;
use super::heartbeat::{self, Suspect, Suspects, Turn};
use super::incoming::{Answer, Push};
use super::inquiry::Lateness;
use super::message::Departure;
use super::succession::{Action, Entry, Event, Loss, Report, Stage, Succession};
use crate::communicator::lock;

/// Something that another rank announced, or that happened to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    Announced {
        from: usize,
        topic: String,
        bytes: Arc<[u8]>,
    },
    /// By another rank, to this one alone; in no order with the rest.
    Told {
        from: usize,
        topic: String,
        bytes: Arc<[u8]>,
    },
    /// A rank left, failed or died. Comes once for each.
    Gone { rank: usize, departure: Departure },
    /// Whether this rank has entered an operation of a communicator.
    Inquired {
        key: String,
        turn: u64,
        is_sample: bool,
    },
    /// Who has not entered an operation, or has at last.
    Late(Arc<Lateness>),
    /// How far apart the ranks entered one, and who was last.
    Skewed {
        key: String,
        skew: Duration,
        last: usize,
    },
    /// This rank and those can reach each other no more, and nobody can tell which side is at fault.
    CutOff { from: Vec<usize>, why: String },
}

impl Entry for Notice {
    fn gone(rank: usize, how: &str) -> Self {
        let departure = Departure::Lost(how.to_owned());
        Self::Gone { rank, departure }
    }

    fn departed(&self) -> Option<(usize, bool)> {
        match self {
            Self::Gone { rank, departure } => {
                let lives = matches!(departure, Departure::Lost(how) if how.starts_with(SILENT));
                Some((*rank, lives))
            }
            _ => None,
        }
    }
}

/// How the word on a rank begins whose host does not answer: it may live.
pub(crate) const SILENT: &str = "its connection broke without goodbye";

type Handler = Box<dyn Fn(&Notice) + Send + Sync>;

/// What to do when the coordinator is gone.
type OnLoss = Box<dyn Fn(Loss) + Send + Sync>;

#[derive(Default)]
pub(super) struct Mailbox {
    state: Mutex<State>,
    /// Rings when something comes over a channel.
    bell: Condvar,
    /// Runs the handlers, one thread at a time, so that notices stay in their order.
    handlers: Mutex<Vec<Handler>>,
    on_loss: Mutex<Option<Arc<OnLoss>>>,
}

#[derive(Default)]
struct State {
    next: u64,
    waiting: HashMap<u64, Arc<Slot>>,
    /// The tickets that outlast a coordinator: its successor is asked the same.
    lasting: HashSet<u64>,
    /// Where ranks are processes: who coordinates, and what it has told.
    succession: Option<Succession<Notice>>,
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
    suspects: Suspects,
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
    /// Who was to give it, and why it cannot.
    answer: Mutex<Option<Result<Answer, (usize, String)>>>,
    came: Condvar,
}

/// What waiting for an answer came to.
#[derive(Debug)]
pub(super) enum Waited {
    Answer(Answer),
    /// The connection to that rank is closed; the text says why.
    Closed(usize, String),
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
            Some(why) => *lock(&slot.answer) = Some(Err((state.coordinator(), why.clone()))),
        }
        Ticket {
            mailbox: self,
            id,
            slot,
        }
    }

    /// As [`ticket`](Self::ticket), for what is asked of a successor as well when the coordinator is gone.
    pub(super) fn lasting_ticket(&self) -> Ticket<'_> {
        let ticket = self.ticket();
        lock(&self.state).lasting.insert(ticket.id);
        ticket
    }

    pub(super) fn answer(&self, id: u64, answer: Answer) {
        // An answer to a request that was given up may still come.
        if let Some(slot) = lock(&self.state).waiting.remove(&id) {
            slot.put(Ok(answer));
        }
    }

    /// From now on, what is told is kept for a successor: this is number `rank` of `size`.
    pub(super) fn keep_log(&self, rank: usize, size: usize) {
        lock(&self.state).succession = Some(Succession::new(rank, size));
    }

    /// From now on, the end of the connection to the coordinator is not the end.
    pub(super) fn on_loss(&self, handler: impl Fn(Loss) + Send + Sync + 'static) {
        *lock(&self.on_loss) = Some(Arc::new(Box::new(handler)));
    }

    /// Nobody looks for another coordinator any more.
    pub(super) fn forget_loss(&self) {
        lock(&self.on_loss).take();
    }

    /// Who coordinates, as far as this rank knows.
    pub(super) fn coordinator(&self) -> usize {
        lock(&self.state).coordinator()
    }

    /// Whether nothing comes any more.
    pub(super) fn is_closed(&self) -> bool {
        lock(&self.state).closed.is_some()
    }

    /// Whether somebody waits for an answer of this number.
    pub(super) fn is_waited_for(&self, id: u64) -> bool {
        lock(&self.state).waiting.contains_key(&id)
    }

    /// Who left, and how, in the order in which all have heard.
    pub(super) fn gone(&self) -> Vec<(usize, Departure)> {
        let state = lock(&self.state);
        let Some(succession) = &state.succession else {
            return Vec::new();
        };
        let told = succession.log().iter().filter_map(|notice| match notice {
            Notice::Gone { rank, departure } => Some((*rank, departure.clone())),
            _ => None,
        });
        let left = succession.lost().iter();
        let left = left.filter(|(_, loss)| **loss == Loss::Left);
        told.chain(left.map(|(rank, _)| (*rank, Departure::Left)))
            .collect()
    }

    /// Whose hosts this rank found silent itself, and how.
    pub(super) fn silent(&self) -> Vec<(usize, String)> {
        let state = lock(&self.state);
        let lost = state
            .succession
            .iter()
            .flat_map(|succession| succession.lost());
        lost.filter_map(|(rank, loss)| match loss {
            Loss::Silent(how) => Some((*rank, how.clone())),
            _ => None,
        })
        .collect()
    }

    /// Whose reports this rank waits for, while it takes over.
    pub(super) fn awaited(&self) -> Option<Vec<usize>> {
        let state = lock(&self.state);
        let succession = state.succession.as_ref()?;
        matches!(succession.stage(), Stage::Collecting(_)).then(|| succession.awaited())
    }

    pub(super) fn report(&self) -> Option<Report<Notice>> {
        Some(lock(&self.state).succession.as_ref()?.report())
    }

    /// Something that all are to hear, which is kept until it is heard.
    pub(super) fn say(&self, notice: Notice) {
        if let Some(succession) = &mut lock(&self.state).succession {
            succession.say(notice);
        }
    }

    /// One step of the succession. What this rank is to hear by it waits for [`settle`](Sink::settle).
    pub(super) fn step(&self, event: Event<Notice>) -> Vec<Action<Notice>> {
        let mut state = lock(&self.state);
        let Some(succession) = &mut state.succession else {
            return Vec::new();
        };
        let mut actions = succession.step(event);
        for told in actions.extract_if(.., |action| matches!(action, Action::Deliver(_))) {
            if let Action::Deliver(notice) = told {
                state.deliver(notice);
            }
        }
        actions
    }

    /// Those who wait for the coordinator's answer learn that it is gone, but for those whose question goes
    /// on to its successor.
    pub(super) fn interrupt(&self, why: &str) {
        let mut state = lock(&self.state);
        state.watched = false;
        state.suspects.clear();
        let coordinator = state.coordinator();
        let State {
            waiting, lasting, ..
        } = &mut *state;
        let ended: Vec<_> = waiting.extract_if(|id, _| !lasting.contains(id)).collect();
        drop(state);
        for (_, slot) in ended {
            slot.put(Err((coordinator, why.to_owned())));
        }
    }

    /// This rank hears no more of those others, and they not of it. The handlers hear it with
    /// [`settle`](Sink::settle).
    pub(super) fn cut_off(&self, from: Vec<usize>, why: &str) {
        {
            let mut state = lock(&self.state);
            if state.closed.is_some() {
                return;
            }
            let why = why.to_owned();
            state.inbox.push_back(Notice::CutOff { from, why });
        }
        self.end(why);
    }

    pub(super) fn push(&self, push: Push) {
        let mut state = lock(&self.state);
        let notice = match push {
            Push::Notice { from, topic, bytes } => Notice::Announced { from, topic, bytes },
            Push::Gone { rank, .. } if state.departed.contains_key(&rank) => return,
            Push::Gone { rank, departure } => Notice::Gone { rank, departure },
            Push::Succeeded { by, start, entries } => {
                drop(state);
                self.step(Event::Succeeded { by, start, entries });
                return;
            }
            Push::CutOff { from, why } => {
                drop(state);
                return self.cut_off(from, &why);
            }
            Push::Told { from, topic, bytes } => {
                // No successor has to know it.
                state.inbox.push_back(Notice::Told { from, topic, bytes });
                return;
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
            Push::Suspected {
                rank,
                silent,
                state: seen,
            } => {
                if !state.departed.contains_key(&rank) {
                    state.suspects.learn(rank, silent, seen.as_deref());
                }
                return;
            }
            // Of these, no successor has to know.
            Push::Inquire {
                key,
                turn,
                is_sample,
            } => {
                let inquired = Notice::Inquired {
                    key,
                    turn,
                    is_sample,
                };
                return state.inbox.push_back(inquired);
            }
            Push::Lateness(lateness) => return state.inbox.push_back(Notice::Late(lateness)),
            Push::Skew { key, skew, last } => {
                return state.inbox.push_back(Notice::Skewed { key, skew, last });
            }
            // What others are told, and what the reader of the connection answers.
            Push::Size(_)
            | Push::Member(_)
            | Push::Invited { .. }
            | Push::Ping(_)
            | Push::Look { .. } => return,
        };
        if let Some(succession) = &mut state.succession {
            succession.record(notice.clone());
        }
        state.deliver(notice);
    }

    /// Whose processes are silent.
    pub(super) fn suspects(&self) -> Vec<Suspect> {
        lock(&self.state).suspects.all()
    }

    /// For how long the coordinator has not been heard.
    pub(super) fn coordinator_age(&self) -> Option<Duration> {
        lock(&self.state).suspects.coordinator_age()
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

    /// Nothing comes any more: everybody who waits learns why. Unless the coordinator has said that it
    /// leaves, that is how its death shows.
    pub(super) fn close(&self, loss: Loss) {
        let on_loss = lock(&self.on_loss).clone();
        if let Some(on_loss) = on_loss {
            return on_loss(loss);
        }
        let mut state = lock(&self.state);
        let coordinator = state.coordinator();
        let why = loss.to_string();
        if state.closed.is_none() && !state.departed.contains_key(&coordinator) {
            let departure = Departure::Lost(why.clone());
            let rank = coordinator;
            state.deliver(Notice::Gone { rank, departure });
        }
        drop(state);
        self.end(&why);
    }

    /// Nobody gets an answer any more.
    pub(super) fn end(&self, why: &str) {
        let mut state = lock(&self.state);
        if state.closed.is_some() {
            return;
        }
        state.closed = Some(why.to_owned());
        let coordinator = state.coordinator();
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.bell.notify_all();
        for slot in waiting.into_values() {
            slot.put(Err((coordinator, why.to_owned())));
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

impl State {
    fn coordinator(&self) -> usize {
        self.succession.as_ref().map_or(0, Succession::coordinator)
    }

    /// For the handlers, in order.
    fn deliver(&mut self, notice: Notice) {
        if let Notice::Gone { rank, departure } = &notice {
            match self.departed.entry(*rank) {
                hash_map::Entry::Occupied(_) => return,
                hash_map::Entry::Vacant(departed) => departed.insert(departure.clone()),
            };
            self.suspects.forget(*rank);
            if *departure != Departure::Left {
                self.first_failed.get_or_insert(*rank);
            }
        }
        self.inbox.push_back(notice);
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

    fn coordinator_heard(&self, now: Instant) {
        lock(&self.state).suspects.coordinator_heard(now);
    }

    fn coordinator_turns(&self, turn: Turn, seen: Option<String>) {
        let mut state = lock(&self.state);
        let rank = state.coordinator();
        let seen = seen.as_deref();
        match turn {
            Turn::Same => {}
            Turn::Silent(silent) => {
                heartbeat::found_silent(rank, silent, seen);
                state.suspects.learn(rank, Some(silent), seen);
            }
            Turn::Heard(silent) => {
                heartbeat::heard_again(rank, silent);
                state.suspects.forget(rank);
            }
        }
    }

    fn close(&self, loss: Loss) {
        Mailbox::close(self, loss);
        self.run_handlers();
    }
}

impl Slot {
    fn put(&self, answer: Result<Answer, (usize, String)>) {
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
                Some(Err((rank, why))) => return Waited::Closed(rank, why),
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
        let mut state = lock(&self.mailbox.state);
        state.waiting.remove(&self.id);
        state.lasting.remove(&self.id);
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").finish_non_exhaustive()
    }
}

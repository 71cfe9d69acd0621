//! Ranks that are threads of one process: a [`Service`] and the inboxes of all ranks. No message between them is lost
//! and no rank ends unreported, so membership needs no protocol here.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nccl_base::clock;

use super::coordinator_message::{Answer, Push};
use super::inbox::Inbox;
use super::reactor::{EventFlags, Reactor, Source};
use super::request::Request;
use super::round::RequestError;
use super::service::{Output, Recipients, Service};
use super::slot::Slot;
use crate::departure::{Departure, LossKind};
use crate::sync::{Condvar, Mutex};
use crate::time::later;

pub(crate) struct ThreadWorld {
    this: Weak<Self>,
    /// Distinguishes the worlds of one process.
    number: u64,
    generation: u64,
    inboxes: Vec<Arc<Inbox>>,
    /// The number of the slot of each rank.
    slots: Vec<usize>,
    slot_count: usize,
    state: Mutex<State>,
    /// Signalled when requests for the next generation have an outcome.
    decided: Condvar,
}

struct State {
    service: Service,
    /// Which ranks can receive messages.
    present: Vec<bool>,
    /// The ranks to which something was sent since the handlers last ran.
    receivers: Vec<usize>,
    pending: BTreeMap<usize, PendingReconfigure>,
    /// The number of generations that were agreed upon.
    agreed: u64,
    alarm: Option<Instant>,
}

/// A rank that has requested the next generation.
struct PendingReconfigure {
    begun: Instant,
    leaves_behind: bool,
    outcome: Option<Result<Arc<NextThreadWorld>, RequestError>>,
}

/// The next generation.
pub(crate) struct NextThreadWorld {
    pub(crate) threads: Arc<ThreadWorld>,
    /// For each rank of the next generation, its rank in this one.
    pub(crate) previous_ranks: Vec<usize>,
}

impl ThreadWorld {
    pub(crate) fn new(size: usize) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let slots = (0..size).collect();
        Self::of_generation(NEXT.fetch_add(1, Ordering::Relaxed), 0, slots, size)
    }

    fn of_generation(
        number: u64,
        generation: u64,
        slots: Vec<usize>,
        slot_count: usize,
    ) -> Arc<Self> {
        let size = slots.len();
        let mut service = Service::new(size);
        let host = crate::host::name();
        for rank in 0..size {
            service.arrive(Instant::now(), rank, &host, std::process::id().into());
        }
        let state = State {
            service,
            present: vec![true; size],
            receivers: Vec::new(),
            pending: BTreeMap::new(),
            agreed: 0,
            alarm: None,
        };
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            number,
            generation,
            inboxes: (0..size).map(|_| Arc::default()).collect(),
            slots,
            slot_count,
            state: Mutex::new(state),
            decided: Condvar::new(),
        })
    }

    pub(crate) fn size(&self) -> usize {
        self.inboxes.len()
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the slot of a rank. No thread joins later, so all of them are the first in their slots.
    pub(crate) fn slot(&self, rank: usize) -> Option<Slot> {
        Some(Slot {
            number: *self.slots.get(rank)?,
            incarnation: self.number,
        })
    }

    /// Returns the number of ranks of the first generation.
    pub(crate) fn slot_count(&self) -> usize {
        self.slot_count
    }

    /// Returns the name of its job.
    pub(crate) fn job(&self) -> String {
        format!("threads {}", self.number)
    }

    pub(crate) fn inbox(&self, rank: usize) -> &Arc<Inbox> {
        &self.inboxes[rank]
    }

    /// Handles one request of `rank`; the answer, if any, arrives under `id`.
    pub(crate) fn send(&self, rank: usize, id: u64, request: Request) {
        let mut state = self.state.lock();
        if !state.present[rank] {
            return;
        }
        let from = rank;
        match request {
            Request::Announce { topic, bytes } => {
                let bytes = bytes.into();
                self.push(
                    &mut state,
                    Recipients::All,
                    &Push::Announced { from, topic, bytes },
                );
            }
            Request::Direct { to, topic, bytes } => {
                let bytes = bytes.into();
                self.push(
                    &mut state,
                    Recipients::Rank(to),
                    &Push::Direct { from, topic, bytes },
                );
            }
            Request::LeaveWorld { why } => {
                let departure = why.map_or(Departure::Left, Departure::Failed);
                self.rank_leaves(&mut state, rank, departure, true);
            }
            Request::Clock => {
                let now = clock::clock().to_le_bytes();
                self.inboxes[rank].answer(id, Answer::Value(now.as_slice().into()));
            }
            request => state.service.handle(Instant::now(), rank, id, request),
        }
        self.deliver_service_outputs(&mut state);
        drop(state);
        self.run_handlers();
    }

    /// Ends the participation of a rank; the first reason is kept.
    pub(crate) fn leave(&self, rank: usize, departure: Departure) {
        let mut state = self.state.lock();
        self.rank_leaves(&mut state, rank, departure, false);
        drop(state);
        self.run_handlers();
    }

    /// Ends the participation of a rank. A rank that `keeps_communicators` still takes part in rounds of ends, and
    /// leaves a second time.
    fn rank_leaves(
        &self,
        state: &mut State,
        rank: usize,
        departure: Departure,
        keeps_communicators: bool,
    ) {
        // A failed rank has already reported its failure. A rank that keeps its communicators and has not failed is
        // reported only after it has left for good.
        let is_reported = matches!(state.service.departure(rank), Some(Departure::Failed(_)));
        let stays_silently = keeps_communicators && departure == Departure::Left;
        if !state.service.record_departure(
            Instant::now(),
            rank,
            departure.clone(),
            keeps_communicators,
        ) {
            return;
        }
        state.present[rank] = keeps_communicators;
        self.deliver_service_outputs(state);
        if !is_reported && !stays_silently {
            self.push(state, Recipients::All, &Push::Departed { rank, departure });
        }
        if state.pending.remove(&rank).is_some() {
            self.decided.notify_all();
        }
        self.agree_if_complete(state);
    }

    /// Forms the next generation with the remaining ranks. With `leaves_behind`, ranks that make no request in time are
    /// excluded, if all requesting ranks set it.
    ///
    /// # Errors
    /// Why there is no next generation.
    pub(crate) fn reconfigure(
        &self,
        rank: usize,
        timeout: Duration,
        leaves_behind: bool,
    ) -> Result<Arc<NextThreadWorld>, RequestError> {
        let departed = RequestError::Departed {
            rank,
            departure: Departure::Left,
        };
        let begun = Instant::now();
        let deadline = later(begun, timeout);
        let mut state = self.state.lock();
        if state.service.departure(rank).is_some() {
            return Err(departed);
        }
        if state.pending.contains_key(&rank) {
            return Err(RequestError::Twice);
        }
        let pending_one = PendingReconfigure {
            begun,
            leaves_behind,
            outcome: None,
        };
        state.pending.insert(rank, pending_one);
        self.agree_if_complete(&mut state);
        loop {
            let Some(pending_one) = state.pending.get_mut(&rank) else {
                return Err(departed);
            };
            if let Some(outcome) = pending_one.outcome.take() {
                state.pending.remove(&rank);
                drop(state);
                self.run_handlers();
                return outcome;
            }
            if Instant::now() >= deadline {
                self.give_up_waiting(&mut state);
            } else {
                self.decided.wait_until(&mut state, deadline);
            }
        }
    }

    fn agree_if_complete(&self, state: &mut State) {
        if state.undecided().next().is_none() || !state.missing().is_empty() {
            return;
        }
        state.agreed += 1;
        let number = self.generation + state.agreed;
        let previous_ranks: Vec<_> = state.undecided().map(|(rank, _)| rank).collect();
        let slots = previous_ranks.iter().map(|rank| self.slots[*rank]);
        let threads = Self::of_generation(self.number, number, slots.collect(), self.slot_count);
        state.decide(&Ok(Arc::new(NextThreadWorld {
            threads,
            previous_ranks,
        })));
        self.decided.notify_all();
    }

    /// Handles the timeout of a rank that has requested the next generation.
    fn give_up_waiting(&self, state: &mut State) {
        let now = Instant::now();
        let begun = state
            .undecided()
            .map(|(_, pending_one)| pending_one.begun)
            .min();
        let waited = begun.map_or(Duration::ZERO, |begun| now.saturating_duration_since(begun));
        let missing = state.missing();
        if state
            .undecided()
            .all(|(_, pending_one)| pending_one.leaves_behind)
        {
            for rank in missing {
                let departure = Departure::lost(LossKind::LeftBehind { after: waited });
                // Delivered to the excluded rank itself, for later reads of its inbox.
                let departed = Push::Departed {
                    rank,
                    departure: departure.clone(),
                };
                self.push(state, Recipients::Rank(rank), &departed);
                // The last of these departures forms the generation.
                self.rank_leaves(state, rank, departure, false);
            }
            return;
        }
        let missing = missing.into_iter();
        let missing = missing.map(|rank| state.service.missing(rank, now));
        let why = RequestError::TimedOut {
            missing: missing.collect(),
            waited,
            notes: Vec::new(),
        };
        state.decide(&Err(why));
        self.decided.notify_all();
    }

    /// Delivers the outputs of the service.
    fn deliver_service_outputs(&self, state: &mut State) {
        while let Some(output) = state.service.poll() {
            match output {
                Output::Answer { to, answer } => {
                    for (rank, id) in to {
                        if state.present[rank] {
                            self.inboxes[rank].answer(id, answer.clone());
                        }
                    }
                }
                Output::Push { to, push } => self.push(state, to, &push),
            }
        }
    }

    fn push(&self, state: &mut State, to: Recipients, push: &Push) {
        let to = match to {
            Recipients::All => (0..self.size()).collect(),
            Recipients::Rank(rank) => vec![rank],
            Recipients::Ranks(ranks) => ranks,
            Recipients::Observers => Vec::new(),
        };
        for rank in to {
            if state.present.get(rank) == Some(&true) {
                self.inboxes[rank].push(push.clone());
                state.receivers.push(rank);
            }
        }
    }

    /// Runs the handlers for the messages that were sent, without holding the lock, and sets the next timer.
    fn run_handlers(&self) {
        let mut state = self.state.lock();
        let receivers = std::mem::take(&mut state.receivers);
        if let Some(next) = state.service.next_timeout()
            && state.alarm.is_none_or(|alarm| alarm > next)
            && let Ok(reactor) = Reactor::get()
        {
            state.alarm = Some(next);
            reactor.wake_at(next, Weak::clone(&self.this) as Weak<dyn Source>);
        }
        drop(state);
        for rank in receivers {
            self.inboxes[rank].run_handlers();
        }
    }
}

impl State {
    fn undecided(&self) -> impl Iterator<Item = (usize, &PendingReconfigure)> {
        let pending = self
            .pending
            .iter()
            .map(|(rank, pending_one)| (*rank, pending_one));
        pending.filter(|(_, pending_one)| pending_one.outcome.is_none())
    }

    /// Returns the ranks that could request the next generation and have not done so.
    fn missing(&self) -> Vec<usize> {
        let is_missing = |rank: &usize| {
            let pending_one = self.pending.get(rank);
            self.service.departure(*rank).is_none()
                && pending_one.is_none_or(|pending_one| pending_one.outcome.is_some())
        };
        (0..self.present.len()).filter(is_missing).collect()
    }

    fn decide(&mut self, outcome: &Result<Arc<NextThreadWorld>, RequestError>) {
        for pending_one in self.pending.values_mut() {
            pending_one.outcome.get_or_insert_with(|| outcome.clone());
        }
    }
}

impl Source for ThreadWorld {
    fn ready(self: Arc<Self>, _: EventFlags) {}

    fn due(self: Arc<Self>, now: Instant) {
        let mut state = self.state.lock();
        if state.alarm.is_some_and(|alarm| alarm <= now) {
            state.alarm = None;
        }
        state.service.handle_timeout(now);
        let reports = state.service.reports(now);
        self.deliver_service_outputs(&mut state);
        drop(state);
        self.run_handlers();
        for text in reports {
            tracing::info!(name: "nccl.rendezvous.waiting", target: "nccl", "still waiting: {text}");
        }
    }
}

impl fmt::Debug for ThreadWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads")
            .field("number", &self.number)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

//! A request whose answer is awaited.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::slot::Slot;
use super::state::Mailbox;
use crate::departure::Lost;
use crate::incoming::Answer;

/// The result of waiting for an answer.
#[derive(Debug)]
pub(crate) enum Waited {
    Answer(Answer),
    /// The connection to that rank is closed, and why.
    Closed(usize, Lost),
    Late,
    Interrupted,
}

/// A pending request; its answer is discarded once the ticket is dropped.
pub(crate) struct Ticket<'m> {
    mailbox: &'m Mailbox,
    pub(crate) id: u64,
    slot: Arc<Slot>,
}

impl Mailbox {
    /// Returns a number for a request, under which its answer will arrive.
    pub(crate) fn ticket(&self) -> Ticket<'_> {
        let slot = Arc::new(Slot::default());
        let mut state = self.state.lock();
        let id = state.next;
        state.next += 1;
        match &state.closed {
            None => {
                state.waiting.insert(id, Arc::clone(&slot));
            }
            Some(why) => *slot.answer.lock() = Some(Err((state.coordinator, why.clone()))),
        }
        Ticket {
            mailbox: self,
            id,
            slot,
        }
    }

    /// As [`ticket`](Self::ticket), for a request that is repeated to a successor of the coordinator.
    pub(crate) fn lasting_ticket(&self) -> Ticket<'_> {
        let ticket = self.ticket();
        self.state.lock().lasting.insert(ticket.id);
        ticket
    }

    pub(crate) fn answer(&self, id: u64, answer: Answer) {
        // The request of this answer may have been given up.
        if let Some(slot) = self.state.lock().waiting.remove(&id) {
            slot.put(Ok(answer));
        }
    }

    /// Whether a thread waits for the answer of this number.
    pub(crate) fn is_waited_for(&self, id: u64) -> bool {
        self.state.lock().waiting.contains_key(&id)
    }
}

impl Ticket<'_> {
    /// Waits for the answer. An interruption signals nothing, so it is polled.
    pub(crate) fn wait(&self, deadline: Instant, interrupted: Option<&dyn Fn() -> bool>) -> Waited {
        let mut answer = self.slot.answer.lock();
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
            self.slot.came.wait_for(&mut answer, pause);
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut state = self.mailbox.state.lock();
        state.waiting.remove(&self.id);
        state.lasting.remove(&self.id);
    }
}

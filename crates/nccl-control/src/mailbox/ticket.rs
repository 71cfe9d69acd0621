//! A request whose answer is waited for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::slot::Slot;
use super::state::Mailbox;
use crate::departure::Lost;
use crate::incoming::Answer;

/// What waiting for an answer came to.
#[derive(Debug)]
pub(crate) enum Waited {
    Answer(Answer),
    /// The connection to that rank is closed, and why.
    Closed(usize, Lost),
    Late,
    Interrupted,
}

/// A request on its way; dropped, its answer is nobody's.
pub(crate) struct Ticket<'m> {
    mailbox: &'m Mailbox,
    pub(crate) id: u64,
    slot: Arc<Slot>,
}

impl Mailbox {
    /// A number for a request, under which its answer will come.
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

    /// As [`ticket`](Self::ticket), for what is asked of a successor as well when the coordinator is gone.
    pub(crate) fn lasting_ticket(&self) -> Ticket<'_> {
        let ticket = self.ticket();
        self.state.lock().lasting.insert(ticket.id);
        ticket
    }

    pub(crate) fn answer(&self, id: u64, answer: Answer) {
        // An answer to a request that was given up may still come.
        if let Some(slot) = self.state.lock().waiting.remove(&id) {
            slot.put(Ok(answer));
        }
    }

    /// Whether somebody waits for an answer of this number.
    pub(crate) fn is_waited_for(&self, id: u64) -> bool {
        self.state.lock().waiting.contains_key(&id)
    }
}

impl Ticket<'_> {
    /// Waits for the answer. An interruption rings no bell, and is looked for now and then.
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

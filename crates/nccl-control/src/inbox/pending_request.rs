//! A request whose answer is awaited.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::answer_slot::AnswerSlot;
use super::state::Inbox;
use crate::coordinator_message::Answer;
use crate::departure::Lost;

/// The result of waiting for an answer.
#[derive(Debug)]
pub(crate) enum WaitOutcome {
    Answer(Answer),
    /// The connection to that rank is closed, with the reason.
    Closed(usize, Lost),
    Late,
    Interrupted,
}

/// A pending request; its answer is discarded once this value is dropped.
pub(crate) struct PendingRequest {
    inbox: Arc<Inbox>,
    pub(crate) id: u64,
    slot: Arc<AnswerSlot>,
}

impl Inbox {
    /// Begins a request and returns it with its number; the answer arrives under that number.
    pub(crate) fn begin_request(self: &Arc<Self>) -> PendingRequest {
        self.begin(false)
    }

    /// As [`begin_request`](Self::begin_request), for a request that is repeated to a successor of the coordinator.
    pub(crate) fn begin_repeatable_request(self: &Arc<Self>) -> PendingRequest {
        self.begin(true)
    }

    fn begin(self: &Arc<Self>, is_repeatable: bool) -> PendingRequest {
        let (id, slot) = self.register(is_repeatable);
        PendingRequest {
            inbox: Arc::clone(self),
            id,
            slot,
        }
    }

    /// Returns the number of a new request, and the slot in which its answer arrives until
    /// [`forget_request`](Self::forget_request).
    #[cfg(any(test, feature = "simulator"))]
    pub(crate) fn register_request(&self) -> (u64, Arc<AnswerSlot>) {
        self.register(false)
    }

    /// As [`register_request`](Self::register_request), for a request that is repeated to a successor of the coordinator.
    #[cfg(any(test, feature = "simulator"))]
    pub(crate) fn register_repeatable_request(&self) -> (u64, Arc<AnswerSlot>) {
        self.register(true)
    }

    fn register(&self, is_repeatable: bool) -> (u64, Arc<AnswerSlot>) {
        let slot = Arc::new(AnswerSlot::default());
        let mut state = self.state.lock();
        let id = state.next;
        state.next += 1;
        if is_repeatable {
            state.repeatable.insert(id);
        }
        match &state.closed {
            None => {
                state.waiting.insert(id, Arc::clone(&slot));
            }
            Some(why) => *slot.answer.lock() = Some(Err((state.coordinator, why.clone()))),
        }
        (id, slot)
    }

    /// Returns the number of a request whose answer no thread waits for.
    pub(crate) fn unawaited_number(&self) -> u64 {
        let mut state = self.state.lock();
        state.next += 1;
        state.next - 1
    }

    /// Discards the answer with this number when it arrives.
    pub(crate) fn forget_request(&self, id: u64) {
        let mut state = self.state.lock();
        state.waiting.remove(&id);
        state.repeatable.remove(&id);
    }

    pub(crate) fn answer(&self, id: u64, answer: Answer) {
        // The request may have been cancelled.
        if let Some(slot) = self.state.lock().waiting.remove(&id) {
            slot.complete(Ok(answer));
        }
    }

    /// Whether a thread waits for the answer with this number.
    pub(crate) fn is_waited_for(&self, id: u64) -> bool {
        self.state.lock().waiting.contains_key(&id)
    }
}

impl PendingRequest {
    /// Whether the answer has arrived, so that no wait is needed.
    pub(crate) fn is_ready(&self) -> bool {
        self.slot.answer.lock().is_some()
    }

    /// Waits for the answer. `interrupted` cannot signal the waiting thread, so it is polled.
    pub(crate) fn wait(
        &self,
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> WaitOutcome {
        let mut answer = self.slot.answer.lock();
        loop {
            match answer.take() {
                Some(Ok(answer)) => return WaitOutcome::Answer(answer),
                Some(Err((rank, why))) => return WaitOutcome::Closed(rank, why),
                None => {}
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return WaitOutcome::Late;
            }
            let pause = match interrupted {
                Some(interrupted) if interrupted() => return WaitOutcome::Interrupted,
                Some(_) => remaining.min(Duration::from_millis(20)),
                None => remaining,
            };
            self.slot.arrived.wait_for(&mut answer, pause);
        }
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        self.inbox.forget_request(self.id);
    }
}

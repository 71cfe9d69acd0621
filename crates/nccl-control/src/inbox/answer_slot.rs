//! The slot in which the answer to one request arrives.

use crate::coordinator_message::Answer;
use crate::departure::Lost;
use crate::sync::{Condvar, Mutex};

#[derive(Default)]
pub(crate) struct AnswerSlot {
    /// The answer, or the rank that should have answered and why it cannot.
    pub(super) answer: Mutex<Option<Result<Answer, (usize, Lost)>>>,
    pub(super) arrived: Condvar,
}

impl AnswerSlot {
    /// Returns the answer, if it has arrived.
    #[cfg(any(test, feature = "simulator"))]
    pub(crate) fn take(&self) -> Option<Result<Answer, (usize, Lost)>> {
        self.answer.lock().take()
    }

    pub(super) fn complete(&self, answer: Result<Answer, (usize, Lost)>) {
        *self.answer.lock() = Some(answer);
        self.arrived.notify_all();
    }
}

//! Where the answer to one request arrives.

use crate::departure::Lost;
use crate::incoming::Answer;
use crate::sync::{Condvar, Mutex};

#[derive(Default)]
pub(super) struct Slot {
    /// The answer, or the rank that was to give it and why it cannot.
    pub(super) answer: Mutex<Option<Result<Answer, (usize, Lost)>>>,
    pub(super) came: Condvar,
}

impl Slot {
    pub(super) fn put(&self, answer: Result<Answer, (usize, Lost)>) {
        *self.answer.lock() = Some(answer);
        self.came.notify_all();
    }
}

//! The end of a communicator: its members report that they are done with it.

use std::sync::Arc;
use std::time::Duration;

use nccl_base::departure::EndOutcome;

use super::handle::RankSession;
use crate::coordinator_message::Answer;
use crate::forked;
use crate::inbox::WaitOutcome;
use crate::request::Request;
use crate::round::{END_TOPIC, RequestError, Round};
use crate::time::{deadline_after, later};

impl RankSession {
    /// Reports to `members` that this rank is done with `name`, and waits until all of them that have not
    /// departed are done: at most for `timeout` after the first of them called this, or until it is
    /// `interrupted`.
    ///
    /// A rank that has dropped its world calls this all the same, as long as it has communicators.
    pub fn end(
        &self,
        name: &str,
        members: &Arc<[usize]>,
        part: &[u8],
        timeout: Duration,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> EndOutcome {
        if forked::is_child() {
            return EndOutcome::ConnectionLost;
        }
        let pending = self.inbox.begin_repeatable_request();
        self.send(pending.id, Self::end_request(name, members, part, timeout));
        let mut deadline = deadline_after(timeout);
        // The coordinator keeps the deadline; if it does not answer, it is the missing rank.
        let last = later(deadline, Duration::from_secs(1));
        loop {
            match pending.wait(deadline, interrupted) {
                WaitOutcome::Answer(Answer::Parts(parts)) => {
                    return EndOutcome::All(Arc::unwrap_or_clone(parts));
                }
                WaitOutcome::Answer(Answer::Failed(error)) => {
                    return match &*error {
                        RequestError::TimedOut { missing, .. } => EndOutcome::Missing(
                            missing.iter().map(|missing| missing.rank).collect(),
                        ),
                        _ => EndOutcome::ConnectionLost,
                    };
                }
                WaitOutcome::Answer(_) | WaitOutcome::Closed(..) | WaitOutcome::Interrupted => {
                    return EndOutcome::ConnectionLost;
                }
                WaitOutcome::Late if deadline < last => deadline = last,
                WaitOutcome::Late => return EndOutcome::Missing(vec![self.coordinator()]),
            }
        }
    }

    /// As [`end`](Self::end), without waiting for the others.
    pub fn end_alone(&self, name: &str, members: &Arc<[usize]>, part: &[u8], timeout: Duration) {
        self.send(u64::MAX, Self::end_request(name, members, part, timeout));
    }

    fn end_request(name: &str, members: &Arc<[usize]>, part: &[u8], timeout: Duration) -> Request {
        let round = Round {
            topic: format!("{END_TOPIC}{name}"),
            number: 0,
            members: Some(Arc::clone(members)),
        };
        let part = part.to_vec();
        Request::Exchange {
            round,
            timeout,
            part,
        }
    }
}

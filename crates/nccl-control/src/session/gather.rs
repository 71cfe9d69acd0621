//! Gathering a part from each member of a communicator: for its end, and for comparisons before a call.

use std::sync::Arc;
use std::time::Duration;

use nccl_base::departure::GatherOutcome;

use super::handle::RankSession;
use crate::coordinator_message::Answer;
use crate::forked;
use crate::inbox::WaitOutcome;
use crate::request::Request;
use crate::round::{END_TOPIC, RequestError, Round};
use crate::time::{deadline_after, later};

impl RankSession {
    /// Sends this rank's part of `name` to `members`, and waits for the parts of all members that have not departed.
    /// Waits at most `timeout` after the first member has called this, or until `interrupted` returns true.
    ///
    /// A rank that has dropped its world still calls this, as long as it has communicators.
    pub fn gather_parts(
        &self,
        name: &str,
        members: &Arc<[usize]>,
        part: &[u8],
        timeout: Duration,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> GatherOutcome {
        if forked::is_child() {
            return GatherOutcome::ConnectionLost;
        }
        let pending = self.inbox.begin_repeatable_request();
        self.send(
            pending.id,
            Self::parts_request(name, members, part, timeout),
        );
        let mut deadline = deadline_after(timeout);
        // The coordinator enforces the deadline; if the coordinator does not answer, it counts as the missing rank.
        let last = later(deadline, Duration::from_secs(1));
        loop {
            match pending.wait(deadline, interrupted) {
                WaitOutcome::Answer(Answer::Parts(parts)) => {
                    return GatherOutcome::All(Arc::unwrap_or_clone(parts));
                }
                WaitOutcome::Answer(Answer::Failed(error)) => {
                    return match &*error {
                        RequestError::TimedOut { missing, .. } => GatherOutcome::Missing(
                            missing.iter().map(|missing| missing.rank).collect(),
                        ),
                        _ => GatherOutcome::ConnectionLost,
                    };
                }
                WaitOutcome::Answer(_) | WaitOutcome::Closed(..) | WaitOutcome::Interrupted => {
                    return GatherOutcome::ConnectionLost;
                }
                WaitOutcome::Late if deadline < last => deadline = last,
                WaitOutcome::Late => return GatherOutcome::Missing(vec![self.coordinator()]),
            }
        }
    }

    /// As [`gather_parts`](Self::gather_parts), without waiting for the other ranks.
    pub fn send_part(&self, name: &str, members: &Arc<[usize]>, part: &[u8], timeout: Duration) {
        // The number distinguishes a repeated request from another one.
        let number = self.inbox.unawaited_number();
        self.send(number, Self::parts_request(name, members, part, timeout));
    }

    fn parts_request(
        name: &str,
        members: &Arc<[usize]>,
        part: &[u8],
        timeout: Duration,
    ) -> Request {
        let round = Round {
            topic: format!("{END_TOPIC}{name}"),
            number: 0,
            members: Some(Arc::clone(members)),
        };
        let part = part.to_vec();
        Request::Exchange {
            round,
            waited: Duration::ZERO,
            timeout,
            part,
        }
    }
}

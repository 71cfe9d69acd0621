//! The end of a communicator: its members report that they are done with it.

use std::sync::Arc;
use std::time::Duration;

use nccl_base::departure::Ended;

use super::link::Line;
use crate::forked;
use crate::incoming::Answer;
use crate::mailbox::Waited;
use crate::message::{ENDS, Incomplete, Round};
use crate::request::Request;
use crate::time::{deadline_after, later};

impl Line {
    /// Reports to `members` that this rank is done with `name`, and waits until all of them that are
    /// still there are done: at most for `patience` after the first of them called this, or until it is
    /// `interrupted`.
    ///
    /// A rank whose world is gone calls this all the same, as long as it has communicators.
    pub fn end(
        &self,
        name: &str,
        members: &Arc<[usize]>,
        part: &[u8],
        patience: Duration,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Ended {
        if forked::is_child() {
            return Ended::Unheard;
        }
        let ticket = self.mailbox.lasting_ticket();
        self.send(ticket.id, Self::end_request(name, members, part, patience));
        let mut deadline = deadline_after(patience);
        // The coordinator keeps the time; if it stands still, it is the missing rank.
        let last = later(deadline, Duration::from_secs(1));
        loop {
            match ticket.wait(deadline, interrupted) {
                Waited::Answer(Answer::Parts(parts)) => {
                    return Ended::All(Arc::unwrap_or_clone(parts));
                }
                Waited::Answer(Answer::Incomplete(incomplete)) => {
                    return match &*incomplete {
                        Incomplete::TimedOut { missing, .. } => {
                            Ended::Missing(missing.iter().map(|missing| missing.rank).collect())
                        }
                        _ => Ended::Unheard,
                    };
                }
                Waited::Answer(_) | Waited::Closed(..) | Waited::Interrupted => {
                    return Ended::Unheard;
                }
                Waited::Late if deadline < last => deadline = last,
                Waited::Late => return Ended::Missing(vec![self.coordinator()]),
            }
        }
    }

    /// As [`end`](Self::end), without waiting for the others.
    pub fn end_alone(&self, name: &str, members: &Arc<[usize]>, part: &[u8], patience: Duration) {
        self.send(u64::MAX, Self::end_request(name, members, part, patience));
    }

    fn end_request(name: &str, members: &Arc<[usize]>, part: &[u8], patience: Duration) -> Request {
        let round = Round {
            topic: format!("{ENDS}{name}"),
            number: 0,
            members: Some(Arc::clone(members)),
        };
        let part = part.to_vec();
        Request::Collect {
            round,
            patience,
            part,
        }
    }
}

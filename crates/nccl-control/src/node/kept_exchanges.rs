//! The exchanges of a session, for a coordinator that takes over: its predecessor, which may live, may have answered some ranks and
//! not others. Those that this rank waits in are made again, and of the rest the coordinator learns which outcomes are here.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::coordinator_message::Answer;
use crate::departure::Reason;
use crate::driver_message::{NumberedRequest, RequestHead};
use crate::request::Request;
use crate::round::{RequestError, Round};
use crate::time::later;

/// How long an outcome is kept: longer than a rank looks for another coordinator, and some more until that has all ranks.
const KEPT_FOR: Duration = Duration::from_secs(30);

/// How many outcomes are kept; how large the largest is, in bytes, and all of them. Of another it is known that there is one.
const MAX_OUTCOMES: usize = 128;
const LARGEST_OUTCOME: usize = 64 << 10;
const MAX_BYTES: usize = 1 << 20;

/// The exchanges of one session, without those of ends; see the module.
pub(super) struct KeptExchanges {
    rank: usize,
    all: VecDeque<KeptExchange>,
    /// Whether the coordinator is told of no outcomes, as a planted mistake.
    #[cfg(any(test, feature = "simulator"))]
    pub(super) tells_nothing: bool,
}

struct KeptExchange {
    id: u64,
    round: Round,
    deadline: Instant,
    request: Arc<[u8]>,
    outcome: Option<Outcome>,
}

struct Outcome {
    since: Instant,
    answer: Answer,
}

impl Outcome {
    fn has_failed(&self) -> bool {
        matches!(self.answer, Answer::Failed(_))
    }

    fn bytes(&self) -> usize {
        match &self.answer {
            Answer::Parts(parts) => parts.iter().map(Vec::len).sum(),
            _ => 0,
        }
    }

    /// Forgets the parts.
    fn drop_parts(&mut self) {
        if !self.has_failed() {
            self.answer = lost();
        }
    }
}

fn lost() -> Answer {
    Answer::Failed(Arc::new(RequestError::OutcomeLost))
}

impl KeptExchanges {
    pub(super) fn new(rank: usize) -> Self {
        Self {
            rank,
            all: VecDeque::new(),
            #[cfg(any(test, feature = "simulator"))]
            tells_nothing: false,
        }
    }

    /// Keeps an exchange that this rank enters, by this encoded request.
    pub(super) fn enter(
        &mut self,
        now: Instant,
        id: u64,
        round: &Round,
        timeout: Duration,
        request: &Arc<[u8]>,
    ) {
        self.all.push_back(KeptExchange {
            id,
            round: round.clone(),
            deadline: later(now, timeout),
            request: Arc::clone(request),
            outcome: None,
        });
    }

    /// Keeps the answer to an exchange.
    pub(super) fn answered(&mut self, now: Instant, id: u64, answer: &Answer) {
        self.ended(now, id, || answer.clone());
    }

    /// Keeps that this rank gives an exchange up, unless it has its answer.
    pub(super) fn given_up(&mut self, now: Instant, id: u64, reason: &Reason) {
        let rank = self.rank;
        self.ended(now, id, || {
            let reason = reason.clone();
            Answer::Failed(Arc::new(RequestError::GivenUp { rank, reason }))
        });
    }

    fn ended(&mut self, now: Instant, id: u64, answer: impl FnOnce() -> Answer) {
        let Some(index) = self.all.iter().position(|kept| kept.id == id) else {
            return;
        };
        let kept = &mut self.all[index];
        let mut outcome = Outcome {
            since: now,
            answer: answer(),
        };
        if outcome.bytes() > LARGEST_OUTCOME {
            outcome.drop_parts();
        }
        // All ranks have entered this one: those before it had ended for them, but for threads that wait in two at a time.
        let has_parts = !outcome.has_failed();
        kept.outcome = Some(outcome);
        if has_parts {
            let round = kept.round.clone();
            self.all.retain(|kept| {
                kept.outcome.is_none()
                    || (&kept.round.topic, &kept.round.members) != (&round.topic, &round.members)
                    || kept.round.number + 1 >= round.number
            });
        }
        self.limit(now);
    }

    /// Drops the outcomes that are old or too many, and the parts that are too large together.
    fn limit(&mut self, now: Instant) {
        let (mut count, mut bytes) = (0, 0);
        for index in (0..self.all.len()).rev() {
            let Some(outcome) = &mut self.all[index].outcome else {
                continue;
            };
            count += 1;
            bytes += outcome.bytes();
            if bytes > MAX_BYTES {
                outcome.drop_parts();
            }
            if count > MAX_OUTCOMES || outcome.since + KEPT_FOR <= now {
                self.all.remove(index);
            }
        }
    }

    /// Returns the exchanges whose outcome is here, and whether they failed.
    pub(super) fn outcomes(&mut self, now: Instant) -> Vec<(Round, bool)> {
        #[cfg(any(test, feature = "simulator"))]
        if self.tells_nothing {
            return Vec::new();
        }
        self.limit(now);
        let ended = self.all.iter().filter_map(|kept| {
            let outcome = kept.outcome.as_ref()?;
            Some((kept.round.clone(), outcome.has_failed()))
        });
        ended.collect()
    }

    /// Returns the outcome of an exchange, unless this rank waits in it as well.
    pub(super) fn outcome(&self, round: &Round) -> Option<Answer> {
        match self.all.iter().find(|kept| kept.round == *round) {
            Some(kept) => Some(kept.outcome.as_ref()?.answer.clone()),
            None => Some(lost()),
        }
    }

    /// Returns the encoded requests that make those that are awaited of another coordinator.
    pub(super) fn requests(&self, now: Instant) -> Vec<Arc<[u8]>> {
        let open = self.all.iter().filter(|kept| kept.outcome.is_none());
        let again = open.filter_map(|kept| {
            let (_, mut numbered) = NumberedRequest::decode(&kept.request).ok()?;
            if let Request::Exchange { timeout, .. } = &mut numbered.request {
                *timeout = kept.deadline.saturating_duration_since(now);
            }
            Some(numbered.encode(RequestHead::repeated()))
        });
        again.collect()
    }
}

//! The exchanges of a session, kept for a coordinator that takes over: its predecessor, which may still be alive, may
//! have answered some ranks and not others. Exchanges in which this rank waits are requested again; for the others, the
//! coordinator learns which outcomes this rank has.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::coordinator_message::Answer;
use crate::departure::Reason;
use crate::driver_message::{NumberedRequest, RequestHead};
use crate::inbox::Inbox;
use crate::request::Request;
use crate::round::{RequestError, Round};
use crate::time::later;

/// How long an outcome is kept: longer than a rank looks for another coordinator, plus some time until all ranks follow
/// that coordinator.
const KEPT_FOR: Duration = Duration::from_secs(30);

/// The maximum number of outcomes kept, the maximum size of one outcome in bytes, and of all outcomes. Of larger
/// outcomes, only their existence is kept.
const MAX_OUTCOMES: usize = 128;
const LARGEST_OUTCOME: usize = 64 << 10;
const MAX_BYTES: usize = 1 << 20;

/// The exchanges of one session, except those of ends; see the module.
pub(super) struct KeptExchanges {
    rank: usize,
    all: VecDeque<KeptExchange>,
    /// Whether no outcomes are reported to the coordinator, as a planted mistake.
    #[cfg(any(test, feature = "simulator"))]
    pub(super) tells_nothing: bool,
}

struct KeptExchange {
    id: u64,
    round: Round,
    state: State,
}

enum State {
    Open {
        entered: Instant,
        deadline: Instant,
        /// The encoded request.
        request: Arc<[u8]>,
    },
    Ended(Outcome),
}

struct Outcome {
    since: Instant,
    answer: Answer,
    has_failed: bool,
    /// The size in memory.
    bytes: usize,
}

impl Outcome {
    fn new(now: Instant, answer: Answer) -> Self {
        let bytes = match &answer {
            Answer::Parts(parts) => parts
                .iter()
                .map(|part| size_of_val(part) + part.len())
                .sum(),
            _ => 0,
        };
        let mut outcome = Self {
            since: now,
            has_failed: matches!(answer, Answer::Failed(_)),
            answer,
            bytes,
        };
        if bytes > LARGEST_OUTCOME {
            outcome.drop_parts();
        }
        outcome
    }

    fn drop_parts(&mut self) {
        if self.bytes > 0 {
            (self.answer, self.bytes) = (lost(), 0);
        }
    }
}

impl KeptExchange {
    fn outcome(&self) -> Option<&Outcome> {
        match &self.state {
            State::Ended(outcome) => Some(outcome),
            State::Open { .. } => None,
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

    /// Keeps an exchange that this rank enters, with its encoded request.
    pub(super) fn enter(
        &mut self,
        now: Instant,
        id: u64,
        round: &Round,
        timeout: Duration,
        request: &Arc<[u8]>,
    ) {
        let state = State::Open {
            entered: now,
            deadline: later(now, timeout),
            request: Arc::clone(request),
        };
        let round = round.clone();
        self.all.push_back(KeptExchange { id, round, state });
    }

    /// Keeps the answer to an exchange.
    pub(super) fn answered(&mut self, now: Instant, id: u64, answer: &Answer) {
        let Some(index) = self.all.iter().position(|kept| kept.id == id) else {
            return;
        };
        // A refusal by the coordinator is not the outcome, and neither is the departure of this rank.
        if let Answer::Failed(why) = answer
            && (why.is_refusal()
                || matches!(**why, RequestError::Departed { rank, .. } if rank == self.rank))
        {
            self.all.remove(index);
            return;
        }
        let kept = &mut self.all[index];
        kept.state = State::Ended(Outcome::new(now, answer.clone()));
        // All ranks have entered this exchange, so earlier exchanges of the topic have ended for them. The previous one
        // is kept, because threads of one rank may wait in two exchanges at a time.
        if matches!(answer, Answer::Parts(_)) {
            let round = kept.round.clone();
            self.all.retain(|kept| {
                kept.outcome().is_none()
                    || (&kept.round.topic, &kept.round.members) != (&round.topic, &round.members)
                    || kept.round.number + 1 >= round.number
            });
        }
        self.limit(now);
    }

    /// Records that this rank has cancelled an exchange, unless the answer has arrived.
    pub(super) fn given_up(&mut self, now: Instant, id: u64, reason: &Reason) {
        let mut all = self.all.iter_mut();
        if let Some(kept) = all.find(|kept| kept.id == id && kept.outcome().is_none()) {
            let (rank, reason) = (self.rank, reason.clone());
            let answer = Answer::Failed(Arc::new(RequestError::GivenUp { rank, reason }));
            kept.state = State::Ended(Outcome::new(now, answer));
        }
        self.limit(now);
    }

    /// Drops outcomes that are too old or too many, and parts that are too large together.
    fn limit(&mut self, now: Instant) {
        let (mut count, mut sum) = (0, 0);
        for index in (0..self.all.len()).rev() {
            let State::Ended(outcome) = &mut self.all[index].state else {
                continue;
            };
            count += 1;
            sum += outcome.bytes;
            if sum > MAX_BYTES {
                outcome.drop_parts();
            }
            if count > MAX_OUTCOMES || outcome.since + KEPT_FOR <= now {
                self.all.remove(index);
            }
        }
    }

    /// Returns the exchanges whose outcomes this rank has, and whether each failed.
    pub(super) fn outcomes(&mut self, now: Instant) -> Vec<(Round, bool)> {
        #[cfg(any(test, feature = "simulator"))]
        if self.tells_nothing {
            return Vec::new();
        }
        self.limit(now);
        let ended = self
            .all
            .iter()
            .filter_map(|kept| Some((kept.round.clone(), kept.outcome()?.has_failed)));
        ended.collect()
    }

    /// Returns the outcome of an exchange, unless this rank still waits in it.
    pub(super) fn outcome(&self, round: &Round) -> Option<Answer> {
        match self.all.iter().find(|kept| kept.round == *round) {
            Some(kept) => Some(kept.outcome()?.answer.clone()),
            None => Some(lost()),
        }
    }

    /// Returns the encoded requests for the exchanges whose answers are still awaited.
    pub(super) fn requests(&mut self, now: Instant, inbox: &Inbox) -> Vec<Arc<[u8]>> {
        self.all
            .retain(|kept| kept.outcome().is_some() || inbox.is_waited_for(kept.id));
        let again = self.all.iter().filter_map(|kept| {
            let State::Open {
                entered,
                deadline,
                request,
            } = &kept.state
            else {
                return None;
            };
            let (_, mut numbered) = NumberedRequest::decode(request).ok()?;
            if let Request::Exchange {
                waited, timeout, ..
            } = &mut numbered.request
            {
                *waited = now.saturating_duration_since(*entered);
                *timeout = deadline.saturating_duration_since(now);
            }
            Some(numbered.encode(RequestHead::repeated()))
        });
        again.collect()
    }
}

//! A rank's requests over its session, their answers, and its messages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::handle::{RankSession, SessionBackend};
use crate::coordinator_message::Answer;
use crate::departure::Reason;
use crate::departure::UnfinishedExchange;
use crate::departure::{Departure, Lost};
use crate::error::{Error, Result};
use crate::forked;
use crate::frame::LARGEST;
use crate::inbox::{PendingRequest, WaitOutcome};
use crate::phase::Phase;
use crate::refusal::HANDSHAKE_TIMEOUT;
use crate::request::{NO_ANSWER, Request};
use crate::round::{Missing, RequestError, Round};
use crate::straggler::{EntryReport, StragglerQueryRequest};

/// How long the coordinator may take to report the outcome of an exchange that a rank has cancelled.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the next coordinator may take to report how the previous one ended, and the maximum overrun of the caller's
/// deadline.
const FAILOVER_TIMEOUT: Duration = Duration::from_secs(6);
const MAX_OVERRUN: Duration = Duration::from_secs(1);

/// A sent request whose answer is awaited.
pub(crate) struct BegunRequest {
    pub(crate) topic: String,
    pending: PendingRequest,
    is_exchange: bool,
    started: Instant,
    deadline: Instant,
}

impl BegunRequest {
    /// Whether the answer has arrived.
    pub(crate) fn is_ready(&self) -> bool {
        self.pending.is_ready()
    }
}

impl RankSession {
    /// Sends a request and waits for its answer.
    pub(crate) fn ask(
        &self,
        topic: &str,
        request: impl FnOnce(Duration) -> Request,
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Answer> {
        let begun = self.begin(topic, request, deadline)?;
        self.finish(&begun, interrupted)
    }

    /// Sends a request; [`finish`](Self::finish) waits for its answer.
    fn begin(
        &self,
        topic: &str,
        request: impl FnOnce(Duration) -> Request,
        deadline: Instant,
    ) -> Result<BegunRequest> {
        forked::check()?;
        let started = Instant::now();
        self.check_takes_part(topic)?;
        let request = request(deadline.saturating_duration_since(started));
        let is_exchange = matches!(request, Request::Exchange { .. });
        let pending = match is_exchange {
            true => self.inbox.begin_repeatable_request(),
            false => self.inbox.begin_request(),
        };
        self.send(pending.id, request);
        Ok(BegunRequest {
            topic: topic.to_owned(),
            pending,
            is_exchange,
            started,
            deadline,
        })
    }

    /// Cancels a request; returns the resulting error.
    fn give_up(&self, begun: &BegunRequest, error: &RequestError, reason: Reason) -> Error {
        self.send(begun.pending.id, Request::Cancel { reason });
        self.error_of(&begun.topic, error)
    }

    /// Waits for the answer of a request.
    fn finish(
        &self,
        begun: &BegunRequest,
        mut interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Answer> {
        let BegunRequest {
            topic,
            pending,
            is_exchange,
            started,
            deadline,
        } = begun;
        let (is_exchange, started, deadline) = (*is_exchange, *started, *deadline);
        let (mut given_up, mut timeout) = (false, deadline);
        loop {
            match pending.wait(timeout, interrupted) {
                WaitOutcome::Answer(Answer::Failed(error)) => {
                    return Err(match &*error {
                        RequestError::GivenUp { rank, .. } if given_up && *rank == self.rank => {
                            self.gave_up(topic)
                        }
                        error => self.error_of(topic, error),
                    });
                }
                WaitOutcome::Answer(answer) => return Ok(answer),
                WaitOutcome::Closed(coordinator, why) => {
                    let lost = (coordinator, why);
                    return Err(self.lost_with_coordinator(topic, lost, deadline, interrupted));
                }
                WaitOutcome::Interrupted if is_exchange => {
                    // The outcome that all ranks get takes precedence: the exchange may have ended otherwise a moment
                    // ago.
                    let reason = Reason::Aborted;
                    self.send(pending.id, Request::Cancel { reason });
                    (interrupted, given_up) = (None, true);
                    timeout = Instant::now() + CANCEL_TIMEOUT;
                }
                WaitOutcome::Interrupted => {
                    return Err(self.give_up(begun, &RequestError::Interrupted, Reason::Aborted));
                }
                WaitOutcome::Late if given_up => return Err(self.gave_up(topic)),
                // The coordinator enforces the deadline, so that all ranks get the same outcome.
                WaitOutcome::Late if timeout == deadline => timeout = deadline + HANDSHAKE_TIMEOUT,
                // The coordinator itself does not answer.
                WaitOutcome::Late => {
                    let timed_out = RequestError::TimedOut {
                        missing: vec![Missing {
                            rank: self.coordinator(),
                            phase: Some((
                                Phase::Named(String::from("no answer")),
                                started.elapsed(),
                            )),
                        }],
                        waited: started.elapsed(),
                        notes: Vec::new(),
                    };
                    let by = self.coordinator();
                    let error = self.give_up(begun, &timed_out, Reason::Unanswered);
                    let unanswered = Some(UnfinishedExchange::Unanswered { by });
                    return Err(error.of_exchange(unanswered));
                }
            }
        }
    }

    /// Checks that this rank still takes part in its world.
    ///
    /// # Errors
    /// The others have continued without this rank, or its world has a next generation; the error is about `topic`.
    pub(crate) fn check_takes_part(&self, topic: &str) -> Result<()> {
        if let Some(Departure::Lost(how)) = self.inbox.departure(self.rank) {
            let rank = self.rank;
            let text = format!("rank {rank} cannot take part in {topic:?} any more: {how}");
            return Err(Error::rendezvous(text));
        }
        if let Some(generation) = self.reconfigured_to() {
            return Err(Error::rendezvous(format!(
                "{topic:?} was requested of a world of generation {}, which is now in generation {generation}: use the \
                 world that next_generation has returned",
                self.job.1
            )));
        }
        Ok(())
    }

    /// Returns the error of a request that this rank itself has cancelled.
    fn gave_up(&self, topic: &str) -> Error {
        let unfinished = UnfinishedExchange::GivenUp {
            rank: self.rank,
            reason: Reason::Aborted,
        };
        self.error_of(topic, &RequestError::Interrupted)
            .of_exchange(Some(unfinished))
    }

    /// Returns the error of a request whose coordinator was lost before it answered.
    pub(crate) fn lost_with_coordinator(
        &self,
        topic: &str,
        (coordinator, why): (usize, Lost),
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Error {
        // The successor determines how the coordinator's end is reported to all ranks.
        let now = Instant::now();
        let until = (now + FAILOVER_TIMEOUT).min(deadline.max(now) + MAX_OVERRUN);
        while self.inbox.departure(coordinator).is_none()
            && !self.inbox.is_closed()
            && Instant::now() < until
        {
            if interrupted.is_some_and(|interrupted| interrupted()) {
                return self.gave_up(topic);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let departure = self.inbox.departure(coordinator);
        let state = match departure {
            Some(_) => "is gone",
            // The coordinator may be alive, but was replaced.
            None => "cannot be reached",
        };
        let departure = departure.unwrap_or(Departure::Lost(why));
        let who = self.describe(coordinator);
        let mut text = format!("{who} {state}, and {topic:?} with it: {departure}");
        let mut root = (coordinator, departure);
        // The coordinator may have left because of another rank.
        if let Some((rank, first)) = self.inbox.first_failed()
            && rank != coordinator
        {
            let before = format!("; before that, {}: {first}", self.describe(rank));
            text.push_str(&before);
            root = (rank, first);
        }
        let unfinished = match self.inbox.cut_off_from() {
            Some((from, why)) => UnfinishedExchange::CutOff { from, why },
            None => UnfinishedExchange::Departed {
                rank: root.0,
                departure: root.1,
            },
        };
        Error::rendezvous(text).of_exchange(Some(unfinished))
    }

    /// Takes part in one exchange of all ranks or of `members`: contributes `part`, and returns the parts of all.
    pub fn exchange(
        &self,
        topic: &str,
        members: Option<&Arc<[usize]>>,
        part: &[u8],
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<Vec<u8>>> {
        let begun = self.begin_exchange(topic, members, part, deadline)?;
        self.finish_exchange(&begun, interrupted)
    }

    /// Contributes this rank's part to an exchange.
    pub(crate) fn begin_exchange(
        &self,
        topic: &str,
        members: Option<&Arc<[usize]>>,
        part: &[u8],
        deadline: Instant,
    ) -> Result<BegunRequest> {
        forked::check()?;
        let number = {
            let mut rounds = self.rounds.lock();
            let key = match members {
                None => topic.to_owned(),
                Some(members) => format!("{topic} of {members:?}"),
            };
            let next = rounds.entry(key).or_insert(0);
            *next += 1;
            *next - 1
        };
        let round = Round {
            topic: topic.to_owned(),
            number,
            members: members.cloned(),
        };
        let too_large = part.len() > LARGEST;
        let request = |timeout| Request::Exchange {
            round,
            waited: Duration::ZERO,
            timeout,
            // The coordinator must know of the exchange to end it for all ranks.
            part: if too_large { Vec::new() } else { part.to_vec() },
        };
        let begun = self.begin(topic, request, deadline)?;
        if too_large {
            let error = RequestError::TooLarge { bytes: part.len() };
            return Err(self.give_up(&begun, &error, Reason::TooLarge));
        }
        Ok(begun)
    }

    /// Waits for the parts of all ranks.
    pub(crate) fn finish_exchange(
        &self,
        begun: &BegunRequest,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<Vec<u8>>> {
        match self.finish(begun, interrupted)? {
            Answer::Parts(parts) => {
                Ok(Arc::try_unwrap(parts).unwrap_or_else(|parts| parts.to_vec()))
            }
            _ => Err(self.error_of(&begun.topic, &RequestError::OtherMembers)),
        }
    }

    /// Sends a message to all ranks, this one included.
    pub fn announce(&self, topic: &str, bytes: &[u8]) {
        let (topic, bytes) = (topic.to_owned(), bytes.to_vec());
        self.send(NO_ANSWER, Request::Announce { topic, bytes });
    }

    /// Sends a message to rank `to` alone. It is sent again to a new coordinator, so it may arrive twice.
    pub fn send_direct(&self, to: usize, topic: &str, bytes: Vec<u8>) {
        let topic = topic.to_owned();
        self.send(NO_ANSWER, Request::Direct { to, topic, bytes });
    }

    /// Reports that this rank waits in an operation that another rank may not have entered; all ranks receive the
    /// result.
    pub fn query_stragglers(&self, query: StragglerQueryRequest) {
        self.send(NO_ANSWER, Request::QueryStragglers(query));
    }

    /// Reports whether this rank has entered an operation, for the ranks that wait in it.
    pub fn report_entry(&self, report: EntryReport) {
        self.send(NO_ANSWER, Request::EntryReport(report));
    }

    /// Sends a request whose answer, if any, arrives under `id`.
    pub(crate) fn send(&self, id: u64, request: Request) {
        if forked::is_child() {
            return;
        }
        match &self.backend {
            SessionBackend::Node { node, generation } => node.send(*generation, id, request),
            SessionBackend::Threads(threads) => threads.send(self.rank, id, request),
        }
    }
}

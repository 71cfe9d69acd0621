//! A member's requests to the coordinator until they are answered, and the requests that are sent again to each new
//! coordinator.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::kept_exchanges::KeptExchanges;
use crate::coordinator_message::Answer;
use crate::driver_message::{NumberedRequest, RequestHead, with_head};
use crate::inbox::Inbox;
use crate::request::{FollowedBefore, NO_ANSWER, OnceKind, Request};
use crate::round::Round;

/// How many answered end reports are kept at least for the next coordinator, and how many end reports are kept at most.
const MIN_KEPT_ENDS: usize = 128;
const MAX_KEPT_ENDS: usize = 1024;

/// How many messages to single ranks are kept for the next coordinator, and for how long: the process that collects
/// them does not wait longer for the decided fault.
const MAX_DIRECT: usize = 16;
const DIRECT_KEPT_FOR: Duration = Duration::from_secs(2);

/// The kept requests of one session; see the module.
pub(super) struct Outbox {
    generation: u64,
    exchanges: KeptExchanges,
    /// The ends of communicators that this rank has reported.
    end_reports: VecDeque<EndReport>,
    phase: Option<Arc<[u8]>>,
    leave_world: Option<Arc<[u8]>>,
    /// Messages to single ranks, and when they were sent. A rank may receive a message twice.
    recent_direct: VecDeque<(Instant, usize, Vec<u8>)>,
    /// Requests made while there was no coordinator.
    deferred: Vec<Deferred>,
    /// Requests that have not been answered yet, except for `exchanges`.
    open: BTreeMap<u64, OpenRequest>,
    /// The requests that have not been answered yet and must be carried out only once, except for ends.
    open_once: BTreeMap<OnceKind, BTreeSet<u64>>,
}

struct EndReport {
    id: u64,
    bytes: Arc<[u8]>,
    is_answered: bool,
}

struct OpenRequest {
    once: Option<OnceKind>,
    bytes: Arc<[u8]>,
}

/// Whether a request is kept by [`KeptExchanges`].
fn is_kept_exchange(request: &Request) -> bool {
    matches!(request, Request::Exchange { round, .. } if !round.is_of_ends())
}

struct Deferred {
    id: u64,
    once: Option<OnceKind>,
    bytes: Arc<[u8]>,
    /// Whether each new coordinator gets the request anyway.
    is_kept: bool,
}

impl Outbox {
    /// Creates the outbox of a rank in a generation.
    pub(super) fn new(generation: u64, rank: usize) -> Self {
        Self {
            generation,
            exchanges: KeptExchanges::new(rank),
            end_reports: VecDeque::new(),
            phase: None,
            leave_world: None,
            recent_direct: VecDeque::new(),
            deferred: Vec::new(),
            open: BTreeMap::new(),
            open_once: BTreeMap::new(),
        }
    }

    /// Keeps what must be sent again to another coordinator, and returns the encoded request.
    pub(super) fn add(&mut self, numbered: &NumberedRequest, inbox: &Inbox) -> Arc<[u8]> {
        let is_awaited = numbered.id != NO_ANSWER && inbox.is_waited_for(numbered.id);
        let mut head = RequestHead::default();
        let once = numbered.request.once();
        if is_awaited && let Some(kind) = once.filter(|kind| *kind != OnceKind::End) {
            self.open_once.entry(kind).or_default().insert(numbered.id);
            head = self.current_head(once, false, inbox);
        }
        let bytes = numbered.encode(head);
        let is_kept_exchange = is_kept_exchange(&numbered.request);
        if is_awaited && !is_kept_exchange {
            let bytes = Arc::clone(&bytes);
            self.open.insert(numbered.id, OpenRequest { once, bytes });
        }
        match &numbered.request {
            Request::Exchange { round, .. } if round.is_of_ends() => {
                while self.end_reports.len() >= MIN_KEPT_ENDS
                    && (self.end_reports.len() >= MAX_KEPT_ENDS
                        || !inbox.is_waited_for(self.end_reports[0].id))
                {
                    self.end_reports.pop_front();
                }
                self.end_reports.push_back(EndReport {
                    id: numbered.id,
                    bytes: Arc::clone(&bytes),
                    is_answered: false,
                });
            }
            Request::Exchange { round, timeout, .. } if is_awaited => {
                let now = Instant::now();
                self.exchanges
                    .enter(now, numbered.id, round, *timeout, &bytes);
            }
            Request::Cancel { reason } => {
                self.exchanges.given_up(Instant::now(), numbered.id, reason);
            }
            Request::Phase { .. } => self.phase = Some(Arc::clone(&bytes)),
            Request::LeaveWorld { .. } => self.leave_world = Some(Arc::clone(&bytes)),
            _ => {}
        }
        bytes
    }

    /// Keeps a request until there is a coordinator.
    pub(super) fn defer(&mut self, numbered: &NumberedRequest, bytes: Arc<[u8]>) {
        if is_kept_exchange(&numbered.request) {
            return;
        }
        let is_kept = matches!(
            numbered.request,
            Request::Exchange { .. } | Request::Phase { .. } | Request::LeaveWorld { .. }
        );
        self.deferred.push(Deferred {
            id: numbered.id,
            once: numbered.request.once(),
            bytes,
            is_kept,
        });
    }

    pub(super) fn add_direct(&mut self, to: usize, bytes: Vec<u8>) {
        if self.recent_direct.len() == MAX_DIRECT {
            self.recent_direct.pop_front();
        }
        self.recent_direct.push_back((Instant::now(), to, bytes));
    }

    pub(super) fn answered(&mut self, id: u64, answer: &Answer) {
        self.exchanges.answered(Instant::now(), id, answer);
        self.open.remove(&id);
        let own = self.end_reports.iter_mut().find(|report| report.id == id);
        if let Some(report) = own {
            report.is_answered = true;
        }
        for open in self.open_once.values_mut() {
            open.remove(&id);
        }
    }

    /// Returns the head of a request of this kind that is sent now.
    fn current_head(
        &mut self,
        once: Option<OnceKind>,
        is_repeated: bool,
        inbox: &Inbox,
    ) -> RequestHead {
        let kinds = [OnceKind::StoreChange].into_iter().chain(once);
        let first = kinds.filter_map(|kind| {
            let open = self.open_once.get_mut(&kind)?;
            while let Some(&id) = open.first() {
                if inbox.is_waited_for(id) {
                    return Some(id);
                }
                open.pop_first();
            }
            None
        });
        RequestHead {
            is_repeated,
            settled: first.min().unwrap_or(0),
        }
    }

    /// Returns the requests to repeat to the same coordinator, which may have lost them.
    pub(super) fn requests_to_repeat(&mut self, inbox: &Inbox) -> Vec<Arc<[u8]>> {
        self.open.retain(|id, _| inbox.is_waited_for(*id));
        let follow = self.follow(inbox.follow_again(), true);
        let exchanges = self.exchanges.requests(Instant::now(), inbox);
        let open = std::mem::take(&mut self.open);
        let mut requests: Vec<_> = follow.into_iter().collect();
        let repeated = |bytes: &Arc<[u8]>| with_head(bytes, RequestHead::repeated());
        requests.extend(self.phase.iter().map(repeated));
        requests.extend(exchanges);
        requests.extend(self.leave_world.iter().map(repeated));
        let end_reports = self.end_reports.iter();
        let unanswered =
            end_reports.filter(|report| !report.is_answered && !open.contains_key(&report.id));
        requests.extend(unanswered.map(|report| repeated(&report.bytes)));
        requests.extend(open.values().map(|request| {
            let head = self.current_head(request.once, true, inbox);
            with_head(&request.bytes, head)
        }));
        // Those that are kept, and those with an awaited answer, are among the requests above.
        let deferred = std::mem::take(&mut self.deferred).into_iter();
        let deferred =
            deferred.filter(|deferred| !deferred.is_kept && !open.contains_key(&deferred.id));
        // Their own heads are outdated: when the heads were made, requests with lower numbers may not have been here.
        requests.extend(deferred.map(|deferred| {
            let head = self.current_head(deferred.once, false, inbox);
            with_head(&deferred.bytes, head)
        }));
        self.open = open;
        requests
    }

    /// Returns the requests to send to another coordinator than `before`.
    pub(super) fn requests_to_resend(
        &mut self,
        inbox: &Inbox,
        before: FollowedBefore,
    ) -> Vec<Arc<[u8]>> {
        if let FollowedBefore::Other(_) = before {
            inbox.follow_another();
        }
        // A coordinator that takes over learns which outcomes this rank has, even if there are none.
        let it_asks = before != FollowedBefore::None;
        let follow = self.follow(before, it_asks);
        let exchanges = self.exchanges.requests(Instant::now(), inbox);
        // A coordinator of the last generation also serves earlier generations, and already has these reports.
        let end_reports = self.end_reports.iter();
        let end_reports =
            end_reports.map(|report| with_head(&report.bytes, RequestHead::repeated()));
        let deferred = std::mem::take(&mut self.deferred).into_iter();
        let deferred = deferred.filter(|deferred| !deferred.is_kept);
        // This rank leaves its world after the exchanges that it has entered.
        let requests = self.phase.iter().cloned();
        let requests = requests.chain(follow).chain(exchanges);
        let requests = requests.chain(self.leave_world.clone()).chain(end_reports);
        requests
            .chain(deferred.map(|deferred| deferred.bytes))
            .collect()
    }

    /// Returns the request that reports which exchanges this rank has the outcomes of, if there are any or `it_asks`, and
    /// which coordinator it has followed before.
    fn follow(&mut self, before: FollowedBefore, it_asks: bool) -> Option<Arc<[u8]>> {
        let outcomes = self.exchanges.outcomes(Instant::now());
        let is_told = it_asks || !outcomes.is_empty();
        is_told.then(|| self.unnumbered(Request::Follow { outcomes, before }))
    }

    /// Returns the request that reports the outcome of an exchange, if this rank has it.
    pub(super) fn outcome(&self, round: Round) -> Option<Arc<[u8]>> {
        let answer = self.exchanges.outcome(&round)?;
        Some(self.unnumbered(Request::Outcome { round, answer }))
    }

    fn unnumbered(&self, request: Request) -> Arc<[u8]> {
        let numbered = NumberedRequest {
            generation: self.generation,
            id: NO_ANSWER,
            request,
        };
        numbered.encode(RequestHead::default())
    }

    /// Stops reporting outcomes to coordinators, as a planted mistake.
    #[cfg(any(test, feature = "simulator"))]
    pub(super) fn tell_no_outcomes(&mut self) {
        self.exchanges.tells_nothing = true;
    }

    /// Returns the messages to single ranks that were sent within [`DIRECT_KEPT_FOR`].
    pub(super) fn recent_direct(&mut self) -> Vec<(usize, Vec<u8>)> {
        self.recent_direct
            .retain(|(at, ..)| at.elapsed() < DIRECT_KEPT_FOR);
        let recent_direct = self.recent_direct.iter();
        recent_direct
            .map(|(_, to, bytes)| (*to, bytes.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::round::END_TOPIC;

    fn decode(requests: &[Arc<[u8]>]) -> Vec<(bool, u64, Request)> {
        let decoded = requests.iter().map(|bytes| {
            let (head, numbered) = NumberedRequest::decode(bytes).unwrap();
            (head.is_repeated, numbered.id, numbered.request)
        });
        decoded.collect()
    }

    #[test]
    fn what_needs_no_answer_is_repeated_to_a_coordinator_that_may_have_lost_it() {
        let inbox = Inbox::default();
        let mut outbox = Outbox::new(0, 1);
        let phase = Request::Phase {
            name: String::from("load"),
        };
        let leave = Request::LeaveWorld { why: None };
        let end = |name: &str| Request::Exchange {
            round: Round {
                topic: format!("{END_TOPIC}{name}"),
                number: 0,
                members: None,
            },
            waited: Duration::ZERO,
            timeout: Duration::from_secs(60),
            part: Vec::new(),
        };
        let ids = [inbox.unawaited_number(), inbox.unawaited_number()];
        let (awaited, _slot) = inbox.register_request();
        let requests = [
            (NO_ANSWER, phase.clone()),
            (ids[0], end("a")),
            (ids[1], end("b")),
            (awaited, end("c")),
            (NO_ANSWER, leave.clone()),
        ];
        for (id, request) in requests {
            let generation = 0;
            let numbered = NumberedRequest {
                generation,
                id,
                request,
            };
            outbox.add(&numbered, &inbox);
        }
        outbox.answered(ids[0], &Answer::Done);
        for number in 1..3 {
            let follow = Request::Follow {
                outcomes: Vec::new(),
                before: FollowedBefore::Same {
                    number,
                    received: Vec::new(),
                },
            };
            let repeated = decode(&outbox.requests_to_repeat(&inbox));
            let expected = [
                (false, NO_ANSWER, follow),
                (true, NO_ANSWER, phase.clone()),
                (true, NO_ANSWER, leave.clone()),
                (true, ids[1], end("b")),
                (true, awaited, end("c")),
            ];
            assert_eq!(repeated, expected);
        }
    }
}

//! The services of this process while it coordinates: a [`Service`] for each of the last generations, because their
//! sessions may still make requests.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_base::clock;

use super::answers::Answers;
use crate::coordinator_message::{Answer, Push, RankRecord};
use crate::departure::Departure;
use crate::driver_message::RequestHead;
use crate::proto::{MemberId, SharedMembership};
#[cfg(test)]
use crate::request::{FollowedBefore, OnceKind};
use crate::request::{NO_ANSWER, Request};
use crate::round::RequestError;
#[cfg(test)]
use crate::round::Round;
use crate::service::{self, LONGEST_NAME, Recipients, Service};

/// The number of generations that keep a service: programs may still end communicators of generations before the last.
const MAX_GENERATIONS: usize = 8;

#[derive(Default)]
pub(super) struct Services {
    /// The number of ranks of the first generation.
    pub(super) size: usize,
    /// By the number of the generation.
    services: BTreeMap<u64, GenerationService>,
    /// The connections that were refused before there was a service.
    notes: Vec<String>,
    /// Outputs that were not made by a service.
    direct_outputs: VecDeque<(u64, Output)>,
}

struct GenerationService {
    service: Service,
    membership: SharedMembership,
    /// Whether this process has taken over, and the former content of the store is therefore lost.
    is_successor: bool,
    /// The answers of requests that must be carried out only once, and of others as long as there is room for them.
    answers: Answers,
    /// The member that departed first.
    first_departure: Option<(usize, Departure)>,
}

/// An output of a service, addressed to members.
pub(super) enum Output {
    Answer {
        to: Vec<(MemberId, u64)>,
        answer: Answer,
    },
    Push {
        to: Vec<MemberId>,
        push: Push,
    },
    /// For all observers.
    Observe(Push),
}

impl GenerationService {
    fn record_departure(
        &mut self,
        member: MemberId,
        departure: &Departure,
        keeps_communicators: bool,
    ) {
        if let Some(rank) = self.membership.rank_of(member) {
            self.first_departure
                .get_or_insert_with(|| (rank, departure.clone()));
            self.service.record_departure(
                Instant::now(),
                rank,
                departure.clone(),
                keeps_communicators,
            );
            if !keeps_communicators {
                self.answers.forget(rank);
            }
        }
    }
}

impl Services {
    /// Opens the service of a generation that this process coordinates and from which `departed` have departed.
    /// `former` is the previous coordinator of the generation.
    pub(super) fn open(
        &mut self,
        generation: u64,
        membership: &SharedMembership,
        departed: &[(MemberId, Departure)],
        former: Option<MemberId>,
    ) {
        if self.services.contains_key(&generation) {
            return;
        }
        let now = Instant::now();
        let mut service = Service::new(membership.members.len());
        if let Some(former) = former {
            // Every coordinator is a member that has a rank.
            service.takes_over(now, membership.rank_of(former).unwrap_or_default());
        }
        for (rank, process) in membership.members.iter().enumerate() {
            service.arrive(now, rank, &process.host, process.pid.into());
        }
        for text in std::mem::take(&mut self.notes) {
            service.note_for_errors(text);
        }
        let mut generation_service = GenerationService {
            service,
            membership: Arc::clone(membership),
            is_successor: former.is_some(),
            answers: Answers::new(membership.members.len()),
            first_departure: None,
        };
        for (member, departure) in departed {
            if let Some(rank) = membership.rank_of(*member) {
                generation_service
                    .first_departure
                    .get_or_insert_with(|| (rank, departure.clone()));
                generation_service
                    .service
                    .departed_before(rank, departure.clone());
                generation_service.service.disconnect(rank);
            }
        }
        if let Some(push) = generation_service.service.closed_channels() {
            let to = membership
                .members
                .iter()
                .map(|process| process.id)
                .collect();
            self.direct_outputs
                .push_back((generation, Output::Push { to, push }));
        }
        self.services.insert(generation, generation_service);
        while self.services.len() > MAX_GENERATIONS {
            self.end_oldest();
        }
    }

    /// Ends the service of the oldest generation; requests that still wait in it fail.
    fn end_oldest(&mut self) {
        let Some((generation, mut generation_service)) = self.services.pop_first() else {
            return;
        };
        let members = &generation_service.membership.members;
        let to = members.iter().map(|process| process.id).collect();
        let push = Push::NotServed;
        self.direct_outputs
            .push_back((generation, Output::Push { to, push }));
        // As for a request that arrives from now on.
        let why = RequestError::OldGeneration;
        generation_service.service.refuse_waiting(|_, _| true, &why);
        while let Some(output) = generation_service.service.poll() {
            if let service::Output::Answer { to, answer } = output {
                let to = to.into_iter().map(|(rank, id)| (members[rank].id, id));
                let to = to.collect();
                let output = Output::Answer { to, answer };
                self.direct_outputs.push_back((generation, output));
            }
        }
    }

    /// Forgets the carried-out changes of the store, as a planted mistake.
    #[cfg(any(test, feature = "simulator"))]
    pub(super) fn forget_changes(&mut self) {
        for generation_service in self.services.values_mut() {
            generation_service.answers.forget_changes();
        }
    }

    /// Whether the last generation waits for the end of the former coordinator.
    #[cfg(any(test, feature = "simulator"))]
    pub(super) fn awaits_former(&self) -> bool {
        let last = self.services.values().next_back();
        last.is_some_and(|last| last.service.next_former_deadline().is_some())
    }

    /// Continues the channels of an earlier coordinator, as a planted mistake.
    #[cfg(any(test, feature = "simulator"))]
    pub(super) fn continue_channels(&mut self) {
        for generation_service in self.services.values_mut() {
            generation_service.service.continue_channels();
        }
        self.direct_outputs.clear();
    }

    /// Returns how many requests of this kind by a rank are remembered.
    #[cfg(test)]
    pub(super) fn kept_requests(&self, generation: u64, rank: usize, kind: OnceKind) -> usize {
        self.services[&generation].answers.count(rank, kind)
    }

    /// Closes all services, because another process coordinates.
    pub(super) fn close(&mut self) {
        self.services.clear();
        self.direct_outputs.clear();
    }

    /// Records a note for errors: in the latest service, or here until there is one.
    pub(super) fn note_for_errors(&mut self, text: String) {
        match self.services.values_mut().next_back() {
            Some(generation_service) => generation_service.service.note_for_errors(text),
            None if self.notes.len() < 8 => self.notes.push(text),
            None => {}
        }
    }

    /// Returns the notes about connections that were refused while the first generation was formed.
    pub(super) fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    /// Handles a request of a session.
    pub(super) fn handle(
        &mut self,
        from: MemberId,
        generation: u64,
        id: u64,
        request: Request,
        head: RequestHead,
    ) {
        let now = Instant::now();
        let answer = |answer| {
            let to = vec![(from, id)];
            (generation, Output::Answer { to, answer })
        };
        let Some(generation_service) = self.services.get_mut(&generation) else {
            // The request belongs to a generation of which this process was no member, or no coordinator.
            let why = Answer::Failed(Arc::new(RequestError::OldGeneration));
            if id != NO_ANSWER {
                self.direct_outputs.push_back(answer(why));
            } else if let Request::Follow { .. } = request {
                let (to, push) = (vec![from], Push::NotServed);
                let output = Output::Push { to, push };
                self.direct_outputs.push_back((generation, output));
            }
            return;
        };
        let Some(rank) = generation_service.membership.rank_of(from) else {
            return;
        };
        let once = request.once().filter(|_| id != NO_ANSWER);
        let answers = &mut generation_service.answers;
        answers.settle(rank, once, head.settled);
        if once.is_some() || (head.is_repeated && id != NO_ANSWER) {
            if let Some(given) = answers.get(rank, id) {
                return self.direct_outputs.push_back(answer(given));
            }
            // A rank that has departed does not wait any more, and may repeat its requests.
            let is_known = head.is_repeated || answers.is_open(rank, id);
            if is_known && generation_service.service.is_waiting(rank, id) {
                return;
            }
        }
        match request {
            Request::Clock => {
                let now = clock::clock().to_le_bytes();
                let value = Answer::Value(now.as_slice().into());
                self.direct_outputs.push_back(answer(value));
            }
            Request::ProcessProbed { rank, mut state }
                if rank < generation_service.membership.members.len() =>
            {
                state.cut(LONGEST_NAME);
                let silence = Some(Duration::ZERO);
                let to = generation_service
                    .membership
                    .members
                    .iter()
                    .map(|process| process.id)
                    .collect();
                let push = Push::Suspected {
                    rank,
                    silence,
                    state: Some(state),
                };
                self.direct_outputs
                    .push_back((generation, Output::Push { to, push }));
            }
            Request::Missing { ranks, waited } => {
                let size = generation_service.membership.members.len();
                let ranks = ranks.into_iter().filter(|rank| *rank < size);
                let missing = ranks.map(|rank| generation_service.service.missing(rank, now));
                let why = RequestError::TimedOut {
                    missing: missing.collect(),
                    waited,
                    notes: Vec::new(),
                };
                self.direct_outputs
                    .push_back(answer(Answer::Failed(Arc::new(why))));
            }
            Request::LeaveWorld { why } => {
                let departure = why.map_or(Departure::Left, Departure::Failed);
                generation_service.record_departure(from, &departure, true);
            }
            // This coordinator may have received it before.
            Request::Phase { name }
                if head.is_repeated
                    && generation_service.service.is_in_phase(rank, name.clone()) => {}
            // The store was lost with the previous coordinator.
            request if generation_service.is_successor && request.uses_store() => {
                let departed = generation_service.first_departure.clone();
                let why = departed.map_or(RequestError::StoreLost, |(rank, departure)| {
                    RequestError::Departed { rank, departure }
                });
                self.direct_outputs
                    .push_back(answer(Answer::Failed(Arc::new(why))));
            }
            request => {
                if let Some(kind) = once {
                    generation_service.answers.begin(rank, id, kind);
                }
                generation_service.service.handle(now, rank, id, request);
            }
        }
    }

    /// Records that a member has departed.
    pub(super) fn record_departure(
        &mut self,
        member: MemberId,
        departure: &Departure,
        keeps_communicators: bool,
    ) {
        for generation_service in self.services.values_mut() {
            generation_service.record_departure(member, departure, keeps_communicators);
        }
    }

    /// Records that a member fails, and keeps its communicators until their ends.
    pub(super) fn record_failure_in(
        &mut self,
        generation: u64,
        member: MemberId,
        departure: &Departure,
    ) {
        if let Some(generation_service) = self.services.get_mut(&generation) {
            generation_service.record_departure(member, departure, true);
        }
    }

    pub(super) fn poll(&mut self) -> Option<(u64, Output)> {
        if let Some(output) = self.direct_outputs.pop_front() {
            return Some(output);
        }
        for (&generation, generation_service) in &mut self.services {
            if let Some(output) = generation_service.service.poll() {
                if let service::Output::Answer { to, answer } = &output {
                    generation_service.answers.remember(to, answer);
                }
                let id = |rank: usize| generation_service.membership.members[rank].id;
                let output = match output {
                    service::Output::Answer { to, answer } => Output::Answer {
                        to: to.into_iter().map(|(rank, n)| (id(rank), n)).collect(),
                        answer,
                    },
                    service::Output::Push {
                        to: Recipients::Observers,
                        push,
                    } => Output::Observe(push),
                    service::Output::Push { to, push } => {
                        let to = match to {
                            Recipients::All => (0..generation_service.membership.members.len())
                                .map(id)
                                .collect(),
                            Recipients::Rank(rank) => vec![id(rank)],
                            Recipients::Ranks(ranks) => ranks.into_iter().map(id).collect(),
                            Recipients::Observers => Vec::new(),
                        };
                        Output::Push { to, push }
                    }
                };
                return Some((generation, output));
            }
        }
        None
    }

    /// Sets whether a majority of the last generation answers. Services of earlier generations end with their sessions.
    pub(super) fn set_majority(&mut self, answers: bool) {
        for generation_service in self.services.values_mut() {
            generation_service
                .service
                .set_majority(Instant::now(), answers);
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let all = self.services.values();
        all.filter_map(|generation_service| generation_service.service.next_timeout())
            .min()
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        for generation_service in self.services.values_mut() {
            generation_service.service.handle_timeout(now);
        }
    }

    /// Returns the known state of each rank of a generation.
    pub(super) fn known(&self, generation: u64) -> Vec<RankRecord> {
        let generation_service = self.services.get(&generation);
        let size = generation_service.map_or(0, |generation_service| {
            generation_service.membership.members.len()
        });
        let all = 0..size;
        all.filter_map(|rank| self.known_of(generation, rank))
            .collect()
    }

    /// Returns the known state of one rank.
    pub(super) fn known_of(&self, generation: u64, rank: usize) -> Option<RankRecord> {
        let generation_service = self.services.get(&generation)?;
        let membership = &generation_service.membership;
        let process = membership.members.get(rank)?;
        let known = generation_service.service.rank(rank);
        let (now, phase) = (Instant::now(), known.phase.as_ref());
        Some(RankRecord {
            phase: phase.map(|(name, at)| (name.clone(), now.saturating_duration_since(*at))),
            // A member whose communicators outlive its world leaves later.
            departure: known
                .departure
                .clone()
                .filter(|departure| *departure != Departure::Left || known.is_closed()),
            ..RankRecord::of(rank, membership.slot(rank), process)
        })
    }

    #[cfg(test)]
    pub(super) fn has_round_for_a_test(&self, wanted: impl Fn(&Round) -> bool) -> bool {
        let mut rounds = self
            .services
            .values()
            .flat_map(|generation_service| generation_service.service.rounds());
        rounds.any(wanted)
    }

    /// Returns the due log lines about waiting requests.
    pub(super) fn reports(&mut self, now: Instant) -> Vec<String> {
        let all = self.services.values_mut();
        all.flat_map(|generation_service| generation_service.service.reports(now))
            .collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::proto::{Generation, Membership, ProcessInfo};

    fn id(slot: u32) -> MemberId {
        MemberId {
            slot,
            incarnation: 1,
        }
    }

    /// The members of a generation, on one host.
    pub(in crate::node) fn membership(number: u64, members: u32) -> SharedMembership {
        let process = |slot| ProcessInfo {
            id: id(slot),
            host: String::from("node"),
            pid: 70 + slot,
            start_time: 0,
            kernel: 0,
            at: String::new(),
            launcher_rank: None,
            observed: false,
            tolerates_unreachable: true,
        };
        let generation = Generation {
            number,
            proposer: id(0),
        };
        let members = (0..members).map(process).collect();
        Arc::new(Membership::new(generation, members, Vec::new()))
    }

    #[test]
    fn the_last_generations_alone_have_a_service_and_what_waits_in_others_fails() {
        let mut services = Services::default();
        for number in 0..50 {
            let membership = membership(number, 2);
            services.open(number, &membership, &[], None);
            let get = Request::Get {
                key: String::from("k"),
                timeout: Duration::from_secs(3600),
            };
            services.handle(id(1), number, 7 + number, get, RequestHead::default());
        }
        assert_eq!(services.services.len(), MAX_GENERATIONS);
        let mut failed = Vec::new();
        while let Some((generation, output)) = services.poll() {
            if let Output::Answer { to, answer } = output {
                assert!(matches!(answer, Answer::Failed(_)), "{answer:?}");
                assert_eq!(to, [(id(1), 7 + generation)]);
                failed.push(generation);
            }
        }
        assert!(failed.into_iter().eq(0..50 - MAX_GENERATIONS as u64));
        let get = Request::TryGet {
            key: String::from("k"),
        };
        services.handle(id(1), 3, 99, get, RequestHead::default());
        let answer = services.poll();
        assert!(matches!(
            answer,
            Some((
                3,
                Output::Answer {
                    answer: Answer::Failed(_),
                    ..
                }
            ))
        ));
    }

    #[test]
    fn a_rank_learns_that_the_channels_of_an_earlier_generation_are_not_served_any_more() {
        let told = |services: &mut Services| {
            let outputs = std::iter::from_fn(|| services.poll());
            let told = outputs.filter_map(|(generation, output)| match output {
                Output::Push {
                    to,
                    push: Push::NotServed,
                } => Some((generation, to)),
                _ => None,
            });
            told.collect::<Vec<_>>()
        };
        let mut services = Services::default();
        for number in 0..=MAX_GENERATIONS as u64 {
            services.open(number, &membership(number, 2), &[], None);
        }
        assert_eq!(told(&mut services), [(0, vec![id(0), id(1)])]);
        for (number, expected) in [(0, vec![(0, vec![id(1)])]), (1, Vec::new())] {
            let follow = Request::Follow {
                outcomes: Vec::new(),
                before: FollowedBefore::Other(0),
            };
            services.handle(id(1), number, NO_ANSWER, follow, RequestHead::default());
            assert_eq!(told(&mut services), expected);
        }
    }

    #[test]
    fn every_request_that_waits_in_an_ended_service_is_answered() {
        let mut services = Services::default();
        services.open(0, &membership(0, 3), &[], None);
        let timeout = Duration::from_secs(3600);
        for rank in 0..2 {
            let get = Request::Get {
                key: String::from("k"),
                timeout,
            };
            let keys = Request::AwaitKeys {
                keys: vec![String::from("k"), String::from("l")],
                timeout,
            };
            let requests = [get, keys, exchange("x"), exchange("end/x")];
            for (number, request) in (1..).zip(requests) {
                services.handle(id(rank), 0, number, request, RequestHead::default());
            }
        }
        for number in 1..=MAX_GENERATIONS as u64 {
            services.open(number, &membership(number, 3), &[], None);
        }
        let mut failed = Vec::new();
        while let Some((_, output)) = services.poll() {
            if let Output::Answer { to, answer } = output {
                assert!(matches!(answer, Answer::Failed(_)), "{answer:?}");
                failed.extend(to);
            }
        }
        failed.sort_unstable();
        let all = (0..2).flat_map(|rank| (1..5).map(move |number| (id(rank), number)));
        assert!(all.eq(failed.iter().copied()), "{failed:?}");
    }

    const REPEATED: RequestHead = RequestHead {
        is_repeated: true,
        settled: 0,
    };

    fn exchange(topic: &str) -> Request {
        Request::Exchange {
            round: Round {
                topic: topic.to_owned(),
                number: 0,
                members: None,
            },
            waited: Duration::ZERO,
            timeout: Duration::from_secs(3600),
            part: vec![7],
        }
    }

    /// Returns the answers to one request, and the number of messages of channels.
    fn outputs(services: &mut Services, of: (u32, u64)) -> (Vec<Answer>, usize) {
        let (mut answers, mut messages) = (Vec::new(), 0);
        while let Some((_, output)) = services.poll() {
            match output {
                Output::Answer { to, answer } if to.contains(&(id(of.0), of.1)) => {
                    answers.push(answer);
                }
                Output::Push {
                    push: Push::Message { .. },
                    ..
                } => messages += 1,
                _ => {}
            }
        }
        (answers, messages)
    }

    /// Lets rank 0 make many requests, which are answered.
    fn many_answers(services: &mut Services) {
        for n in 1000..2000 {
            let get = Request::TryGet {
                key: String::from("k"),
            };
            services.handle(id(0), 0, n, get, RequestHead::default());
            assert_eq!(outputs(services, (0, n)).0, [Answer::Absent]);
        }
    }

    #[test]
    fn a_repeated_phase_has_begun_before() {
        let mut services = Services::default();
        services.open(0, &membership(0, 2), &[], None);
        let phase = |name: &str| Request::Phase {
            name: name.to_owned(),
        };
        let since = |services: &Services| services.known_of(0, 1).unwrap().phase.unwrap();
        services.handle(id(1), 0, NO_ANSWER, phase("load"), RequestHead::default());
        std::thread::sleep(Duration::from_millis(20));
        services.handle(id(1), 0, NO_ANSWER, phase("load"), REPEATED);
        let (phase_now, lasts) = since(&services);
        assert_eq!(phase_now.name(), "load");
        assert!(lasts >= Duration::from_millis(20), "{lasts:?}");
        services.handle(id(1), 0, NO_ANSWER, phase("run"), REPEATED);
        assert_eq!(since(&services).0.name(), "run");
    }

    #[test]
    fn an_exchange_or_message_whose_answer_is_lost_is_not_carried_out_again_after_many_others() {
        let mut services = Services::default();
        services.open(0, &membership(0, 4), &[], None);
        for topic in ["x", "end/x"] {
            let request = 7 + topic.len() as u64;
            for rank in 0..4 {
                let part = exchange(topic);
                services.handle(id(rank), 0, request, part, RequestHead::default());
            }
            let (answered, _) = outputs(&mut services, (3, request));
            assert!(matches!(&answered[..], [Answer::Parts(_)]), "{answered:?}");
            many_answers(&mut services);
            services.handle(id(3), 0, request, exchange(topic), REPEATED);
            assert_eq!(outputs(&mut services, (3, request)).0, answered);
            assert!(!services.has_round_for_a_test(|_| true));
        }
        let send = || Request::Send {
            channel: String::from("steps"),
            to: None,
            timeout: Duration::from_secs(3600),
            bytes: vec![1],
        };
        services.handle(id(3), 0, 20, send(), RequestHead::default());
        assert_eq!(outputs(&mut services, (3, 20)), (vec![Answer::Done], 1));
        many_answers(&mut services);
        services.handle(id(3), 0, 20, send(), REPEATED);
        assert_eq!(outputs(&mut services, (3, 20)), (vec![Answer::Done], 0));
        // A later message states that the answer has arrived.
        let head = RequestHead {
            settled: 21,
            ..RequestHead::default()
        };
        services.handle(id(3), 0, 21, send(), head);
        assert_eq!(services.kept_requests(0, 3, OnceKind::Message), 1);
        assert_eq!(services.kept_requests(0, 3, OnceKind::Exchange), 1);
    }

    #[test]
    fn a_request_that_is_repeated_before_its_answer_is_sent_is_answered_once() {
        let mut services = Services::default();
        services.open(0, &membership(0, 1), &[], None);
        services.handle(id(0), 0, 7, exchange("x"), RequestHead::default());
        services.handle(id(0), 0, 7, exchange("x"), REPEATED);
        let (answered, _) = outputs(&mut services, (0, 7));
        assert!(matches!(&answered[..], [Answer::Parts(_)]), "{answered:?}");
    }
}

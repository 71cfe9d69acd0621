//! The services of this process while it coordinates: a [`Service`] for each generation whose sessions still make requests.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_base::clock;

use crate::coordinator_message::{Answer, Push, RankRecord};
use crate::departure::Departure;
use crate::proto::{MemberId, SharedMembership};
use crate::request::Request;
use crate::round::Incomplete;
#[cfg(test)]
use crate::round::Round;
use crate::service::{self, LONGEST_NAME, Recipients, Service};

#[derive(Default)]
pub(super) struct Services {
    /// The number of ranks of the first generation.
    pub(super) size: usize,
    served: BTreeMap<u64, GenerationService>,
    /// The connections that were refused before there was a service.
    remarks: Vec<String>,
    /// Outputs that no service has made.
    own: VecDeque<(u64, Output)>,
}

struct GenerationService {
    service: Service,
    membership: SharedMembership,
    /// Whether this process has taken over: the former content of the store is lost.
    is_successor: bool,
    /// The last answers, for ranks that they may not have reached.
    answered: VecDeque<(usize, u64, Answer)>,
    /// The member that has gone first.
    first_gone: Option<(usize, Departure)>,
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
    fn remember(&mut self, to: &[(usize, u64)], answer: &Answer) {
        let most = 4 * self.membership.members.len() + 64;
        for (rank, id) in to {
            if self.answered.len() >= most {
                self.answered.pop_front();
            }
            self.answered.push_back((*rank, *id, answer.clone()));
        }
    }

    fn leave(&mut self, member: MemberId, departure: &Departure, stays: bool) {
        if let Some(rank) = self.membership.rank_of(member) {
            self.first_gone
                .get_or_insert_with(|| (rank, departure.clone()));
            self.service.leave(rank, departure.clone(), stays);
        }
    }
}

impl Services {
    /// Opens the service of a generation that this process coordinates, of which `gone` have left; `is_first`: it is the first coordinator.
    pub(super) fn open(
        &mut self,
        generation: u64,
        membership: &SharedMembership,
        gone: &[(MemberId, Departure)],
        is_first: bool,
    ) {
        if self.served.contains_key(&generation) {
            return;
        }
        let now = Instant::now();
        let mut service = Service::new(membership.members.len());
        for (rank, peer) in membership.members.iter().enumerate() {
            service.arrive(now, rank, &peer.host, peer.pid.into());
        }
        for text in std::mem::take(&mut self.remarks) {
            service.remark(text);
        }
        let mut served = GenerationService {
            service,
            membership: Arc::clone(membership),
            is_successor: !is_first,
            answered: VecDeque::new(),
            first_gone: None,
        };
        for (member, departure) in gone {
            if let Some(rank) = membership.rank_of(*member) {
                served
                    .first_gone
                    .get_or_insert_with(|| (rank, departure.clone()));
                served.service.departed_before(rank, departure.clone());
                served.service.disconnect(rank);
            }
        }
        if let Some((rank, departure)) = served.service.over().cloned() {
            let to = membership.members.iter().map(|peer| peer.id).collect();
            let push = Push::ChannelsClosed { rank, departure };
            self.own.push_back((generation, Output::Push { to, push }));
        }
        self.served.insert(generation, served);
    }

    /// Closes all services: another process coordinates.
    pub(super) fn close(&mut self) {
        self.served.clear();
        self.own.clear();
    }

    /// Records a remark for errors: in the latest service, or until there is one.
    pub(super) fn remark(&mut self, text: String) {
        match self.served.values_mut().next_back() {
            Some(served) => served.service.remark(text),
            None if self.remarks.len() < 8 => self.remarks.push(text),
            None => {}
        }
    }

    /// Returns the remarks about connections that were refused while the ranks met.
    pub(super) fn remarks(&self) -> Vec<String> {
        self.remarks.clone()
    }

    /// Handles a request of a session; `is_repeated` when it may be a repetition.
    pub(super) fn handle(
        &mut self,
        from: MemberId,
        generation: u64,
        id: u64,
        request: Request,
        is_repeated: bool,
    ) {
        let now = Instant::now();
        let answer = |answer| {
            let to = vec![(from, id)];
            (generation, Output::Answer { to, answer })
        };
        let Some(served) = self.served.get_mut(&generation) else {
            // The request is of a generation that this process was not in.
            let why = Answer::Incomplete(Arc::new(Incomplete::Interrupted));
            if id != u64::MAX {
                self.own.push_back(answer(why));
            }
            return;
        };
        let Some(rank) = served.membership.rank_of(from) else {
            return;
        };
        if is_repeated {
            if served.service.is_waiting(rank, id) {
                return;
            }
            let mut answered = served.answered.iter();
            if let Some((.., given)) = answered.find(|(to, n, _)| (*to, *n) == (rank, id)) {
                return self.own.push_back(answer(given.clone()));
            }
        }
        match request {
            Request::Clock => {
                let now = clock::clock().to_le_bytes();
                let value = Answer::Value(now.as_slice().into());
                self.own.push_back(answer(value));
            }
            Request::ProcessProbed { rank, mut state }
                if rank < served.membership.members.len() =>
            {
                state.cut(LONGEST_NAME);
                let silent = Some(Duration::ZERO);
                let to = served
                    .membership
                    .members
                    .iter()
                    .map(|peer| peer.id)
                    .collect();
                let push = Push::Suspected {
                    rank,
                    silent,
                    state: Some(state),
                };
                self.own.push_back((generation, Output::Push { to, push }));
            }
            Request::Missing { ranks, waited } => {
                let size = served.membership.members.len();
                let ranks = ranks.into_iter().filter(|rank| *rank < size);
                let missing = ranks.map(|rank| served.service.missing(rank, now));
                let why = Incomplete::TimedOut {
                    missing: missing.collect(),
                    waited,
                    remarks: Vec::new(),
                };
                self.own
                    .push_back(answer(Answer::Incomplete(Arc::new(why))));
            }
            Request::Linger { why } => {
                let departure = why.map_or(Departure::Left, Departure::Failed);
                served.leave(from, &departure, true);
            }
            // The store was lost with the previous coordinator.
            Request::Set { .. } | Request::Get { .. }
                if served.is_successor && served.first_gone.is_some() =>
            {
                if let Some((rank, departure)) = served.first_gone.clone() {
                    let why = Incomplete::Gone { rank, departure };
                    self.own
                        .push_back(answer(Answer::Incomplete(Arc::new(why))));
                }
            }
            request => served.service.handle(now, rank, id, request),
        }
    }

    /// Records that a member is gone.
    pub(super) fn leave(&mut self, member: MemberId, departure: &Departure, stays: bool) {
        for served in self.served.values_mut() {
            served.leave(member, departure, stays);
        }
    }

    /// Records that a member fails, and stays for the ends of its communicators.
    pub(super) fn leave_in(&mut self, generation: u64, member: MemberId, departure: &Departure) {
        if let Some(served) = self.served.get_mut(&generation) {
            served.leave(member, departure, true);
        }
    }

    pub(super) fn poll(&mut self) -> Option<(u64, Output)> {
        if let Some(own) = self.own.pop_front() {
            return Some(own);
        }
        for (&generation, served) in &mut self.served {
            if let Some(output) = served.service.poll() {
                if let service::Output::Answer { to, answer } = &output {
                    served.remember(to, answer);
                }
                let id = |rank: usize| served.membership.members[rank].id;
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
                            Recipients::All => {
                                (0..served.membership.members.len()).map(id).collect()
                            }
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

    /// Sets whether a majority of the last generation answers. Earlier generations end with their sessions.
    pub(super) fn set_majority(&mut self, answers: bool) {
        for served in self.served.values_mut() {
            served.service.set_majority(answers);
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let services = self.served.values();
        services
            .filter_map(|served| served.service.next_timeout())
            .min()
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        for served in self.served.values_mut() {
            served.service.handle_timeout(now);
        }
    }

    /// Returns what is known of each rank of a generation.
    pub(super) fn known(&self, generation: u64) -> Vec<RankRecord> {
        let served = self.served.get(&generation);
        let size = served.map_or(0, |served| served.membership.members.len());
        let all = 0..size;
        all.filter_map(|rank| self.known_of(generation, rank))
            .collect()
    }

    /// Returns what is known of one rank.
    pub(super) fn known_of(&self, generation: u64, rank: usize) -> Option<RankRecord> {
        let served = self.served.get(&generation)?;
        let peer = served.membership.members.get(rank)?;
        let known = served.service.rank(rank);
        let (now, phase) = (Instant::now(), known.phase.as_ref());
        Some(RankRecord {
            phase: phase.map(|(name, at)| (name.clone(), now.saturating_duration_since(*at))),
            // A member whose communicators outlive its world leaves later.
            departure: known
                .departure
                .clone()
                .filter(|departure| *departure != Departure::Left || known.is_closed()),
            ..RankRecord::of(rank, peer)
        })
    }

    #[cfg(test)]
    pub(super) fn has_round_for_a_test(&self, wanted: impl Fn(&Round) -> bool) -> bool {
        let mut rounds = self
            .served
            .values()
            .flat_map(|served| served.service.rounds());
        rounds.any(wanted)
    }

    /// Returns the log lines that are due about waiting requests.
    pub(super) fn reports(&mut self, now: Instant) -> Vec<String> {
        let services = self.served.values_mut();
        services
            .flat_map(|served| served.service.reports(now))
            .collect()
    }
}

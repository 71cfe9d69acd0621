//! The state of a member in every role: its generation, its log, its vote, the ends that it knows, and the requests of
//! its driver.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::id::{Generation, MemberId, ProcessInfo, Term, Time};
use super::link::Links;
use super::log::{Broadcast, Entry, Log, OperatorDecision};
use super::membership::SharedMembership;
use super::message::{Ended, Exclusion, Heartbeat, Message, Proof, ReconfigureRequest, VoteReport};
use super::mistake::{Mistake, Mistakes};
use super::timing::Timing;
use crate::departure::{Departure, LossKind, Lost, UnreachableEvidence};

/// An event for the driver of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// This generation is active, and this process is part of it or observes it.
    Active(SharedMembership),
    /// The next entry of the generation's log.
    Entry(Arc<Entry>),
    /// To an observer: no process of the job can be reached any more. The listed members are not known to have ended.
    JobUnreachable(Vec<MemberId>),
    /// A message from a member to this one alone.
    Direct(MemberId, Vec<u8>),
    /// The current coordinator. Emitted for each generation, after [`Active`](Self::Active), and for each term in which
    /// this process follows or coordinates. The driver must then repeat its requests that have no reply.
    Coordinator(MemberId),
    /// To the coordinator, or to the initial coordinator: a request from a process's driver, which may be this
    /// process's own.
    Request(MemberId, Arc<[u8]>),
    /// A reply of the coordinator's driver.
    Reply(Arc<[u8]>),
    /// To the initial coordinator: another process has joined the first generation, or has received the reason why
    /// there is none.
    Joined(MemberId),
    /// To the initial coordinator: the process that had joined with this slot has ended, and the slot is free again.
    JoinRevoked(u32, Departure),
    /// There will be no first generation, for the reason in these bytes. This process no longer takes part.
    FormationAborted(Arc<[u8]>),
    /// To an observer: the first generation, which has this number, is being formed. The driver of the initial
    /// coordinator accepts requests; those without a reply must be repeated when this event is emitted again.
    Forming(u64),
    /// A member is a suspect: it has not answered for this many nanoseconds. Nothing ends because of that.
    Suspected(MemberId, u64),
    /// A suspect answers again, after a silence of this many nanoseconds.
    Heard(MemberId, u64),
    /// The link to a member is ready again; its connection was lost for this many nanoseconds.
    Resumed(MemberId, u64),
    /// The request for the next generation has failed: these members made no request in time.
    ReconfigureFailed(Vec<MemberId>),
    /// This process no longer takes part.
    Excluded(Exclusion),
    /// This process has left, and the other members know it.
    Left,
    /// Asks the job's `Discovery` whether this side, exactly half of the voters, may continue in this generation.
    Claim(Generation, BTreeSet<MemberId>),
    /// The number of processes that wait to be admitted to the next generation.
    Joiners(usize),
}

/// The end of a process, as known to this one.
#[derive(Clone, Debug)]
pub(super) struct KnownEnd {
    pub(super) proof: Proof,
    pub(super) reduces_electorate: bool,
    /// Whether a launcher will report how the process ended, so that the end is not sent to other members yet.
    awaits_report: bool,
    at: Time,
}

/// The period in which this member knows that no generation exists without it.
///
/// The coordinator confirms heartbeat `k` when a majority has answered it, so no other member coordinated at the time
/// at which `k` was sent. Heartbeat `k` itself states which of this member's answers had arrived by then. The lease
/// therefore starts at the time at which that answer was sent, and this member learns of it from a later heartbeat.
#[derive(Debug, Default)]
pub(super) struct Lease {
    start: Time,
    term: Option<Term>,
    /// The numbers of the answers that were sent, and the times at which they were sent.
    answers: VecDeque<(u64, Time)>,
    /// For each heartbeat, the time at which the latest answer that had arrived before it was sent.
    acknowledged_replies: VecDeque<(u64, Time)>,
}

/// The maximum number of heartbeats remembered.
const MAX_REMEMBERED: usize = 8;

impl Lease {
    fn handle_heartbeat(&mut self, heartbeat: &Heartbeat) {
        if self.term != Some(heartbeat.term) {
            let start = self.start;
            *self = Self {
                start,
                term: Some(heartbeat.term),
                ..Self::default()
            };
        }
        let answered = self
            .answers
            .iter()
            .find(|(number, _)| *number == heartbeat.answered);
        if let Some(&(_, at)) = answered {
            self.acknowledged_replies.push_back((heartbeat.number, at));
        }
        let confirmed = self
            .acknowledged_replies
            .iter()
            .rev()
            .find(|(number, _)| *number <= heartbeat.confirmed);
        if let Some(&(_, at)) = confirmed {
            self.start = self.start.max(at);
        }
        if self.acknowledged_replies.len() > MAX_REMEMBERED {
            self.acknowledged_replies.pop_front();
        }
    }

    /// Renews the lease of a coordinator, which grants the lease to itself.
    pub(super) fn renew(&mut self, start: Time) {
        self.start = self.start.max(start);
    }

    fn record_reply(&mut self, number: u64, now: Time) {
        self.answers.push_back((number, now));
        if self.answers.len() > MAX_REMEMBERED {
            self.answers.pop_front();
        }
    }
}

/// The state of a member; see the module.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) me: ProcessInfo,
    pub(super) timing: Timing,
    pub(super) mistakes: Mistakes,
    pub(super) now: Time,
    pub(super) links: Links,
    pub(super) events: VecDeque<Event>,
    pub(super) membership: SharedMembership,
    /// The highest term that this member follows, or in which it has promised its vote.
    pub(super) term: Term,
    /// The term in which its log was the coordinator's.
    pub(super) synced: Term,
    pub(super) log: Log,
    pub(super) accepted: Option<(Term, SharedMembership)>,
    pub(super) ended: BTreeMap<MemberId, KnownEnd>,
    /// The number of voters by which `ended` reduces the electorate.
    removed_voters: usize,
    pub(super) lease: Lease,
    /// The voter for which the claim was won. A half of the voters that includes this voter decides like a majority,
    /// whichever of its members coordinates: two such halves have this voter in common, and a majority has a voter in
    /// common with any half.
    pub(super) claimed: Option<MemberId>,
    /// The operator's decision for this generation, and whether all members have received it.
    pub(super) operator: Option<Arc<OperatorDecision>>,
    pub(super) operator_decision_logged: bool,
    /// Set on the initial coordinator after it has given up the first generation: the reason, for all that join.
    pub(super) formation_aborted: Option<Arc<[u8]>>,
    broadcasts_sent: u64,
    pub(super) unlogged: VecDeque<Arc<Broadcast>>,
    pub(super) reconfigure_request: Option<(ReconfigureRequest, Time)>,
    reconfigure_requests: u64,
    /// Processes that wait to be admitted to the next generation, and observers.
    pub(super) joiners: BTreeMap<MemberId, ProcessInfo>,
    pub(super) observers: BTreeMap<MemberId, ProcessInfo>,
    /// Replies to members that do not follow yet, or that are held while it is open whether this member coordinates.
    pub(super) held_replies: BTreeMap<MemberId, Vec<Arc<[u8]>>>,
    /// The departure of this process, until it is acknowledged.
    pub(super) leaving: Option<Departure>,
    /// When this process asked to join, or accepted the proposal that it knows.
    pub(super) consented: Time,
    /// Whether the lease was running at `consented`, so that the proposal cannot have been active without this member.
    pub(super) consents_in_time: bool,
    /// The time since which there is no coordinator.
    pub(super) without_coordinator_since: Option<Time>,
    /// When NCCL last made progress.
    pub(super) progress: Option<Time>,
    /// Whether NCCL made progress after the last heartbeat reply.
    pub(super) has_progressed: bool,
    /// The number of ranks that have departed according to the log.
    pub(super) departed: usize,
    /// The driver's evidence about unreachable peers, with its time.
    pub(super) evidence: BTreeMap<MemberId, (Time, Lost)>,
    /// The last calls of the members' programs, as reported to the coordinator's driver, with their times.
    pub(super) calls: BTreeMap<MemberId, (Time, String)>,
    /// Whether this process will take part in no later generation.
    pub(super) abstains: bool,
    /// Whether this process has reported to another process that it abstains or leaves.
    renounced_lease: bool,
    /// Whether this process has sent its leave message to a coordinator. It then no longer votes, and accepts no
    /// proposal.
    pub(super) sent_leave: bool,
    /// The active generation because of which this process no longer takes part.
    pub(super) ahead: Option<SharedMembership>,
}

impl Core {
    pub(super) fn new(
        me: ProcessInfo,
        membership: SharedMembership,
        timing: Timing,
        mistakes: Mistakes,
    ) -> Self {
        let term = membership.generation.first_term();
        Self {
            links: Links::new(me.id, timing, mistakes),
            me,
            timing,
            mistakes,
            now: Time::default(),
            events: VecDeque::new(),
            log: Log::new(membership.members.len()),
            membership,
            term,
            synced: term,
            accepted: None,
            ended: BTreeMap::new(),
            removed_voters: 0,
            lease: Lease::default(),
            claimed: None,
            operator: None,
            operator_decision_logged: false,
            formation_aborted: None,
            broadcasts_sent: 0,
            unlogged: VecDeque::new(),
            reconfigure_request: None,
            reconfigure_requests: 0,
            joiners: BTreeMap::new(),
            held_replies: BTreeMap::new(),
            observers: BTreeMap::new(),
            leaving: None,
            consented: Time::default(),
            consents_in_time: false,
            without_coordinator_since: None,
            progress: None,
            has_progressed: false,
            departed: 0,
            evidence: BTreeMap::new(),
            calls: BTreeMap::new(),
            abstains: false,
            renounced_lease: false,
            sent_leave: false,
            ahead: None,
        }
    }

    pub(super) fn id(&self) -> MemberId {
        self.me.id
    }

    pub(super) fn generation(&self) -> u64 {
        self.membership.generation.number
    }

    pub(super) fn send(&mut self, to: MemberId, message: Message) {
        let generation = self.generation();
        self.links.send(to, generation, message);
    }

    /// Holds a reply until its receiver follows. Like other messages, the reply is lost with the link.
    pub(super) fn hold_reply(&mut self, to: MemberId, bytes: Arc<[u8]>) {
        if self.links.has_link(to) && self.membership.votes(to) && !self.is_departed(to) {
            self.held_replies.entry(to).or_default().push(bytes);
        }
    }

    /// Sends the held replies to a member that now follows.
    pub(super) fn send_held_replies(&mut self, to: MemberId) {
        for bytes in self.held_replies.remove(&to).unwrap_or_default() {
            self.send(to, Message::Reply(bytes));
        }
    }

    /// Sends to a voter; opens a link if there is none.
    pub(super) fn reach(&mut self, to: MemberId, message: Message) {
        let membership = Arc::clone(&self.membership);
        self.reach_in(&membership, to, message);
    }

    /// As [`reach`](Self::reach), for a member of another generation.
    pub(super) fn reach_in(
        &mut self,
        membership: &SharedMembership,
        to: MemberId,
        message: Message,
    ) {
        if let Some(process) = membership.process(to) {
            self.links.open(self.now, to, &process.at);
        }
        self.send(to, message);
    }

    /// Returns the voters except this one.
    pub(super) fn others(&self) -> Vec<MemberId> {
        let voters = self.membership.voters().map(|process| process.id);
        voters.filter(|id| *id != self.id()).collect()
    }

    /// Begins an active generation. Since `certain_since`, it is certain that no generation exists without this member.
    pub(super) fn enter(&mut self, membership: SharedMembership, certain_since: Time) {
        // The generation was not active before this member accepted it.
        let accepted = self.accepted.as_ref();
        let is_accepted =
            accepted.is_some_and(|(_, known)| known.generation == membership.generation);
        let certain_since = match is_accepted && self.consents_in_time {
            true => certain_since.max(self.consented),
            false => certain_since,
        };
        self.term = membership.generation.first_term();
        self.synced = self.term;
        self.log = Log::new(membership.members.len());
        self.accepted = None;
        self.held_replies.clear();
        self.ended.retain(|id, _| membership.votes(*id));
        for known in self.ended.values_mut() {
            known.reduces_electorate = false;
        }
        self.removed_voters = 0;
        self.lease = Lease {
            start: certain_since,
            ..Lease::default()
        };
        self.claimed = None;
        (self.operator, self.operator_decision_logged) = (None, false);
        self.without_coordinator_since = None;
        self.departed = 0;
        (self.renounced_lease, self.sent_leave) = (false, false);
        self.evidence.retain(|id, _| membership.votes(*id));
        self.calls.retain(|id, _| membership.votes(*id));
        self.unlogged.clear();
        self.reconfigure_request = None;
        self.joiners.retain(|id, _| !membership.votes(*id));
        self.membership = Arc::clone(&membership);
        self.events.push_back(Event::Active(membership));
        self.remove_voters_ended_before(certain_since);
    }

    /// Returns the number of votes of which a majority is required.
    pub(super) fn electorate(&self) -> usize {
        let removed = self.removed_voters + usize::from(self.sent_leave);
        self.membership.electorate().saturating_sub(removed)
    }

    /// Whether `votes` is more than half of the electorate.
    pub(super) fn is_more_than_half(&self, votes: usize) -> bool {
        let of = self.electorate();
        // If all living members have left, none of them makes another decision.
        2 * votes > of || of == 0
    }

    /// Whether `votes` suffice for a decision: more than half of the electorate, or a substitute for that.
    pub(super) fn is_majority(&self, votes: usize, has: impl Fn(MemberId) -> bool) -> bool {
        let votes_here = |id: MemberId| {
            let has_left = id == self.id() && self.sent_leave;
            has(id) && !self.has_ended(id) && !has_left
        };
        let has_claimed = self.is_half(votes) && self.claimed.is_some_and(votes_here);
        if self.is_more_than_half(votes) || has_claimed {
            return true;
        }
        self.operator.as_ref().is_some_and(|decision| {
            let ended = |id: &MemberId| self.ended.contains_key(id);
            decision.generation == self.generation()
                && decision
                    .members
                    .iter()
                    .filter(|id| !ended(id))
                    .all(|id| has(*id))
        })
    }

    /// Whether `votes` are exactly half of the electorate, so that a claim decides.
    pub(super) fn is_half(&self, votes: usize) -> bool {
        2 * votes == self.electorate()
    }

    pub(super) fn has_ended(&self, id: MemberId) -> bool {
        self.ended.contains_key(&id)
    }

    /// Whether an unreachable voter may be on another side: a voter whose end was seen too late to count may have
    /// continued there before.
    pub(super) fn may_be_on_other_side(&self, id: MemberId) -> bool {
        let reduces_electorate = self
            .ended
            .get(&id)
            .is_some_and(|known| known.reduces_electorate);
        !reduces_electorate && self.log.departure_proven(id).is_none()
    }

    /// Whether nothing more is expected from a voter.
    pub(super) fn is_departed(&self, id: MemberId) -> bool {
        self.has_ended(id) || self.log.departure_proven(id).is_some()
    }

    /// Whether the lease runs.
    ///
    /// A member that abstains or leaves has no lease from the moment at which it reports that, and gets none again in
    /// this generation. A coordinator may therefore leave it out at once:
    ///
    /// - Until then it was a member like any other, which no coordinator leaves out until it has not answered for
    ///   longer than a lease. A coordinator learns of the ends that the member has counted before it learns of the
    ///   abstention: they precede it on the same link, or are in the same report. The votes of the ended processes do
    ///   not count for the successor.
    /// - From then on, no other member counts an end because this member has seen it. Ends that other members have
    ///   counted count for it, too, based on their leases.
    ///
    /// So no counted end removes a voter here that voted for the successor, and a majority of this generation still
    /// includes a member of the successor's majority. An abstaining member that coordinates, and has not reported that
    /// it abstains, keeps its lease: then no member leaves it out at once.
    pub(super) fn holds_lease(&self) -> bool {
        self.holds_lease_at(self.now)
    }

    /// As [`holds_lease`](Self::holds_lease), at a time later than the last input.
    pub(super) fn holds_lease_at(&self, now: Time) -> bool {
        self.may_hold_lease() && now <= self.lease.start.after(self.timing.lease)
    }

    pub(super) fn has_had_lease(&self) -> bool {
        self.lease.start != Time::default()
    }

    fn may_hold_lease(&self) -> bool {
        !self.renounced_lease || self.mistakes.makes(Mistake::AbstainerCounts)
    }

    /// Records that this member reports its abstention to another process, if it abstains. Returns whether it does.
    pub(super) fn renounce_lease(&mut self) -> bool {
        self.renounced_lease |= self.abstains;
        self.abstains
    }

    /// Sends the leave message to a coordinator, if this member leaves. The other members then remove it from the
    /// voters, so it does not vote from then on. A member that has accepted a successor is bound to it, and waits until
    /// the successor is active.
    pub(super) fn send_leave(&mut self, to: MemberId) {
        if let Some(departure) = self.leaving.clone().filter(|_| self.accepted.is_none()) {
            if !self.mistakes.makes(Mistake::LeaverVotes) {
                (self.renounced_lease, self.sent_leave) = (true, true);
            }
            self.send(to, Message::Leave(departure));
        }
    }

    /// Returns the number of its own votes.
    pub(super) fn own_vote(&self) -> usize {
        self.own_voter().iter().len()
    }

    /// Returns the id of this process, unless it has left.
    pub(super) fn own_voter(&self) -> Option<MemberId> {
        (!self.sent_leave).then(|| self.id())
    }

    /// Asks whether `side` may continue, if `side` is exactly half of the voters and differs from `claimed`. Returns
    /// whether it has asked.
    pub(super) fn claim(
        &mut self,
        side: BTreeSet<MemberId>,
        claimed: &mut BTreeSet<MemberId>,
    ) -> bool {
        let asks = self.is_half(side.len()) && side != *claimed;
        if asks {
            claimed.clone_from(&side);
            let generation = self.membership.generation;
            self.events.push_back(Event::Claim(generation, side));
        }
        asks
    }

    /// Reports to another process that this one no longer takes part. This process will not vote, but the successor
    /// that it has voted for may be active, so processes that do not know that successor must not remove this process
    /// from the voters.
    pub(super) fn send_exclusion(&mut self, to: MemberId, generation: u64) {
        if !self.links.is_flushed(to) {
            return;
        }
        let own = self.generation();
        let (generation, message) = self.exclusion_message(generation > own, generation);
        self.links.send(to, generation, message);
    }

    /// Returns the exclusion message for processes that know of a later generation, or for those that do not.
    pub(super) fn exclusion_message(&self, is_later: bool, generation: u64) -> (u64, Message) {
        let (member, departure) = (self.id(), Departure::lost(LossKind::Superseded));
        let bound = self.accepted.is_some() && !self.mistakes.makes(Mistake::BoundLeaves);
        match &self.ahead {
            _ if is_later => (generation, Message::Leave(departure)),
            Some(ahead) if !self.mistakes.makes(Mistake::BoundLeaves) => (
                ahead.generation.number,
                Message::NewerGeneration(Arc::clone(ahead)),
            ),
            None if bound => {
                let (proof, reduces_electorate) = (Proof::Leave(departure), false);
                let ended = Ended {
                    member,
                    proof,
                    reduces_electorate,
                };
                (self.generation(), Message::ReportEnd(ended))
            }
            _ => (self.generation(), Message::Leave(departure)),
        }
    }

    /// Whether this process votes without a rank. Such a process never coordinates.
    pub(super) fn is_witness(&self) -> bool {
        let ranks = self.membership.rank_of(self.id()).is_some();
        !ranks
            && self.membership.votes(self.id())
            && !self.mistakes.makes(Mistake::WitnessCoordinates)
    }

    /// Records an end. Returns whether it is new.
    pub(super) fn learn_end(&mut self, ended: &Ended) -> bool {
        let id = ended.member;
        if id == self.id() || !self.membership.votes(id) {
            return false;
        }
        let reduces_electorate =
            ended.reduces_electorate || self.mistakes.makes(Mistake::LeaseIgnored);
        let at = self.now;
        let mut is_new = false;
        let known = self.ended.entry(id).or_insert_with(|| {
            is_new = true;
            let (proof, reduces_electorate) = (ended.proof.clone(), false);
            KnownEnd {
                proof,
                reduces_electorate,
                awaits_report: false,
                at,
            }
        });
        is_new |= std::mem::take(&mut known.awaits_report);
        // A launcher's report is more specific.
        if ended.proof < known.proof {
            known.proof = ended.proof.clone();
        }
        if reduces_electorate && !std::mem::replace(&mut known.reduces_electorate, true) {
            self.removed_voters += 1;
        }
        is_new
    }

    /// Records the end of a process whose launcher will report how it ended. Returns whether the end is new.
    pub(super) fn learn_exit(&mut self, member: MemberId) -> bool {
        if self.has_ended(member) {
            return false;
        }
        let is_new = self.learn_end(&Ended {
            member,
            proof: Proof::Kernel,
            reduces_electorate: self.holds_lease(),
        });
        if let Some(known) = self.ended.get_mut(&member) {
            known.awaits_report = true;
        }
        is_new
    }

    /// Whether a process is known to have ended, and its launcher will report how.
    pub(super) fn awaits_report(&self, id: MemberId) -> bool {
        let known = self.ended.get(&id);
        known.is_some_and(|known| known.awaits_report)
    }

    /// Counts the ends that were known while the lease from `start` was running, because no generation existed without
    /// this member during that time.
    pub(super) fn remove_voters_ended_before(&mut self, start: Time) {
        if start == Time::default() || !self.may_hold_lease() {
            return;
        }
        let until = start.after(self.timing.lease);
        for known in self.ended.values_mut() {
            if known.at <= until && !std::mem::replace(&mut known.reduces_electorate, true) {
                self.removed_voters += 1;
            }
        }
    }

    /// Returns all known ends, for other processes.
    pub(super) fn known_ends(&self) -> Vec<Ended> {
        let all = self.ended.keys();
        all.filter_map(|member| self.end_of(*member)).collect()
    }

    /// Returns the known end of a member, for other processes.
    pub(super) fn end_of(&self, member: MemberId) -> Option<Ended> {
        let known = self.ended.get(&member)?;
        (!known.awaits_report).then(|| self.end_for_others(member, known))
    }

    /// Returns the members that have ended and whose launchers have not reported how.
    pub(super) fn unreported_exits(&self) -> Vec<MemberId> {
        let all = self.ended.iter();
        all.filter_map(|(id, known)| known.awaits_report.then_some(*id))
            .collect()
    }

    /// A member that has accepted a successor is bound to it, and may count the ends that it sees afterwards. Other
    /// members must not count these ends on its report: they may be left out of that successor, which may already be
    /// active.
    fn end_for_others(&self, member: MemberId, known: &KnownEnd) -> Ended {
        let is_bound = self.accepted.is_some() && known.at >= self.consented;
        let reduces_electorate = known.reduces_electorate
            && (!is_bound || self.mistakes.makes(Mistake::BoundReportsEnd));
        let proof = known.proof.clone();
        Ended {
            member,
            proof,
            reduces_electorate,
        }
    }

    /// Handles a heartbeat of the coordinator that this member follows.
    pub(super) fn handle_heartbeat(&mut self, heartbeat: &Heartbeat) {
        self.lease.handle_heartbeat(heartbeat);
        self.lease.record_reply(heartbeat.number, self.now);
        self.remove_voters_ended_before(self.lease.start);
    }

    /// Returns the departure of an unreachable member that was last heard at `heard`, which was `unheard` nanoseconds
    /// ago.
    pub(super) fn unreachable(&self, id: MemberId, heard: Time, unheard: u64) -> Departure {
        let evidence = self.evidence.get(&id).filter(|(at, _)| *at > heard);
        let lost = evidence.map(|(_, lost)| lost.clone());
        Departure::Lost(lost.unwrap_or_else(|| {
            let unheard = Duration::from_nanos(unheard);
            Lost::from(UnreachableEvidence::Unheard {
                unheard,
                unacknowledged: unheard,
            })
        }))
    }

    /// Appends an entry to the log, and emits it for the driver.
    pub(super) fn deliver(&mut self, entry: Arc<Entry>) {
        if let Entry::Departed { member, .. } = &*entry
            && self.log.departure_proven(*member).is_none()
            && self.membership.rank_of(*member).is_some()
        {
            self.departed += 1;
        }
        match &*entry {
            Entry::Departed {
                member,
                departure,
                proven: true,
            } => {
                let ended = Ended {
                    member: *member,
                    proof: Proof::Leave(departure.clone()),
                    reduces_electorate: true,
                };
                self.learn_end(&ended);
            }
            Entry::Departed { .. } if self.mistakes.makes(Mistake::UnreachableRemovesVoter) => {
                self.removed_voters += 1
            }
            Entry::Broadcast(broadcast) if broadcast.from == self.id() => {
                self.unlogged.retain(|own| own.number > broadcast.number);
            }
            Entry::OperatorDecision(decision) => {
                self.operator = Some(Arc::clone(decision));
                self.operator_decision_logged = true;
            }
            Entry::Departed { .. } | Entry::Broadcast(_) => {}
        }
        self.log.push(Arc::clone(&entry));
        self.events.push_back(Event::Entry(entry));
    }

    /// Makes a message of the driver to all members.
    pub(super) fn make_broadcast(&mut self, topic: String, bytes: Vec<u8>) -> Arc<Broadcast> {
        self.broadcasts_sent += 1;
        let broadcast = Arc::new(Broadcast {
            from: self.id(),
            number: self.broadcasts_sent,
            topic,
            bytes,
        });
        self.unlogged.push_back(Arc::clone(&broadcast));
        broadcast
    }

    /// Records a request of the driver for the next generation.
    pub(super) fn request_reconfigure(
        &mut self,
        timeout: u64,
        leaves_behind: bool,
    ) -> ReconfigureRequest {
        self.reconfigure_requests += 1;
        let reconfigure_request = ReconfigureRequest {
            number: self.reconfigure_requests,
            timeout,
            leaves_behind,
        };
        self.reconfigure_request = Some((reconfigure_request, self.now));
        reconfigure_request
    }

    pub(super) fn report(&mut self) -> VoteReport {
        let accepted = self.accepted.clone();
        VoteReport {
            abstains: self.renounce_lease(),
            leaves: self.leaving.clone().filter(|_| self.sent_leave),
            synced: self.synced,
            promised: self.term,
            log: self.log.part(),
            unlogged: self.unlogged.iter().cloned().collect(),
            ended: self.known_ends(),
            accepted,
        }
    }

    /// Binds this member to a proposal. Returns whether it is bound.
    pub(super) fn accept(&mut self, term: Term, proposal: &SharedMembership) -> bool {
        if term < self.term
            || self.sent_leave
            || proposal.generation.number != self.generation() + 1
        {
            return false;
        }
        self.term = term;
        let is_known = |known: &(Term, SharedMembership)| known.1.generation == proposal.generation;
        if !self.accepted.as_ref().is_some_and(is_known) {
            self.consented = self.now;
            self.consents_in_time = self.holds_lease();
        }
        self.accepted = Some((term, Arc::clone(proposal)));
        true
    }

    /// Whether `one` precedes `other` if both are candidates.
    pub(super) fn is_before(&self, one: MemberId, other: MemberId) -> bool {
        let position = |id| self.membership.rank_of(id).unwrap_or(usize::MAX);
        position(one) < position(other)
    }

    /// Whether this member waits for the coordinator.
    pub(super) fn awaits_coordinator(&self) -> bool {
        !self.unlogged.is_empty() || self.reconfigure_request.is_some() || self.leaving.is_some()
    }

    /// Returns the time from which the absence of a coordinator counts as final.
    pub(super) fn majority_deadline(&self) -> Option<Time> {
        Some(
            self.without_coordinator_since?
                .after(self.timing.majority_timeout),
        )
    }

    /// Whether [`majority_deadline`](Self::majority_deadline) has passed, and NCCL makes no progress.
    pub(super) fn has_no_majority(&self) -> bool {
        let is_late = self.majority_deadline().is_some_and(|at| self.now >= at);
        is_late && !self.progresses()
    }

    /// Returns approximately how many bytes this value occupies on the heap.
    pub(super) fn size(&self) -> usize {
        let ended = self.ended.len() * size_of::<(MemberId, KnownEnd)>();
        self.links.size() + self.log.size() + ended
    }

    /// Whether NCCL has made progress recently, so that unreachable members are tolerated.
    pub(super) fn progresses(&self) -> bool {
        let is_recent = |at| self.now.since(at) < self.timing.progress;
        self.progress.is_some_and(is_recent) && self.membership.tolerates_unreachable()
    }
}

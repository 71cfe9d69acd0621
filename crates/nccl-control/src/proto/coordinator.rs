//! Coordinating a term of a generation: ordering the log entries for all members, detecting unreachable members, and
//! forming the next generation.
//!
//! Each entry waits for one of two conditions:
//!
//! - A majority has answered a heartbeat within the last [`Timing::lease`]. This suffices for proven facts.
//! - A majority has answered a heartbeat that was sent after the loss was noticed. This is required for a member that
//!   is merely unreachable, because this side may be the one that is cut off.
//!
//! The next generation is one decision of the members of this generation: it is proposed once, each member accepts it
//! once, and it is active when a majority has accepted it. A later coordinator that finds an accepted proposal proposes
//! the same generation again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::core::{Core, Event};
use super::id::{Generation, MemberId, ProcessInfo, Term, Time};
use super::log::{Broadcast, Entry};
use super::membership::SharedMembership;
use super::message::{
    Ended, Exclusion, Frame, Heartbeat, HeartbeatReply, JoinRole, Message, Proof,
    ReconfigureRequest, VoteReport, VoteRequest,
};
use super::mistake::Mistake;
#[cfg(doc)]
use super::timing::Timing;
use crate::departure::{Departure, LastCall, LossKind};

/// The next role of the coordinator's member.
#[derive(Debug)]
pub(super) enum Transition {
    /// The next generation is active. Since that time, it is certain that no generation exists without this member.
    Enter(SharedMembership, Time),
    /// This member no longer takes part.
    Exclude(Exclusion),
    /// Another member coordinates in this term.
    Follow(Term),
    /// This member must coordinate in a later term than that one, because a vote was promised for it.
    CoordinateLaterTerm(Term),
    /// This process has left.
    Left,
}

#[derive(Debug)]
struct Follower {
    last_heard: Time,
    /// The number of heartbeats that had been due at `last_heard`.
    tick: u64,
    /// The last heartbeat that the follower has answered.
    answered: u64,
    /// Whether the member follows; until then, its vote may still arrive.
    admitted: bool,
    suspected: bool,
    /// The time at which its link was lost.
    link_lost_at: Option<Time>,
    /// Its request for the next generation, and until when the request is valid.
    reconfigure_request: Option<(ReconfigureRequest, Time)>,
    /// Whether the member has been sent the message that the others form the next generation without it.
    was_told_left_behind: bool,
}

impl Follower {
    fn new(last_heard: Time, tick: u64, admitted: bool) -> Self {
        Self {
            last_heard,
            tick,
            answered: 0,
            admitted,
            suspected: false,
            link_lost_at: None,
            reconfigure_request: None,
            was_told_left_behind: false,
        }
    }
}

#[derive(Debug)]
struct SentHeartbeat {
    number: u64,
    at: Time,
    tick: u64,
    answers: usize,
}

/// An entry that waits to be sent to all members.
#[derive(Debug)]
struct PendingEntry {
    entry: Entry,
    since: Time,
    /// The heartbeat that a majority must answer; `None` if the lease suffices.
    needs: Option<u64>,
}

#[derive(Debug)]
struct Proposal {
    membership: SharedMembership,
    /// Whether an earlier coordinator may already have made the proposal active.
    adopted: bool,
    since: Time,
    accepted: BTreeSet<MemberId>,
}

/// The state of a coordinator; see the module.
#[derive(Debug)]
pub(super) struct Coordinator {
    term: Term,
    followers: BTreeMap<MemberId, Follower>,
    /// The members that departed without proof, and how many heartbeats had been due when each was last heard.
    unproven: BTreeMap<MemberId, u64>,
    heartbeat: u64,
    /// The number of heartbeats that have been due, not counting those sent in between.
    ticks: u64,
    next_heartbeat: Time,
    heartbeats: VecDeque<SentHeartbeat>,
    /// The last heartbeat that a majority has answered, and the time at which it was sent.
    confirmed: (u64, Time),
    /// As `confirmed`, but by more than half of the votes: a claim lets this side continue, but does not show what
    /// others have decided.
    confirmed_by_majority: (u64, Time),
    /// The tick since which every heartbeat has been confirmed. Before it, another member may have coordinated for a
    /// while, and granted leases that this coordinator does not know of.
    confirmed_since_tick: u64,
    /// The number of heartbeats that had been due when the last confirmed one was sent.
    confirmed_tick: u64,
    /// The number of heartbeats to send immediately, so that members get their leases.
    immediate_heartbeats: u32,
    pending_entries: VecDeque<PendingEntry>,
    /// Reports of launchers about members whose leave message may be on its way, and until when each report waits for
    /// it.
    deferred_exit_reports: Vec<(Time, Ended)>,
    reconfigure_requests: usize,
    /// The members that will take part in no later generation, and how many of them have not departed.
    abstaining: BTreeSet<MemberId>,
    abstainers: usize,
    /// The state in which the next generation was found to wait for leases: the tick, the number of members that are
    /// accounted for, the number of known ends, and this member's own request and abstention.
    waits_for_leases: Option<(u64, usize, usize, (bool, bool))>,
    proposal: Option<Proposal>,
    /// A proposal that an earlier coordinator may have made active.
    adopted: Option<SharedMembership>,
    /// Set if there was such a proposal, so that a generation may exist without this member or its followers: none of them gets a lease.
    inherits: bool,
    /// The half for which it has made a claim.
    claimed: BTreeSet<MemberId>,
    leaving: Option<Time>,
}

/// The maximum number of ticks between two confirmed heartbeats, and between the last one and a decision.
const MAX_HEARTBEAT_GAP: u64 = 2;

/// The maximum number of heartbeats remembered.
const MAX_REMEMBERED: usize = 8;

/// How long a leaving coordinator waits until the other members know, in nanoseconds.
const COORDINATOR_LEAVE_WAIT_NS: u64 = 1_000_000_000;

impl Coordinator {
    /// Creates the coordinator of a generation that has just become active.
    pub(super) fn of_generation(core: &mut Core) -> Self {
        let now = core.now;
        let mut this = Self::new(core, now, usize::MAX / 2);
        for id in core.others() {
            this.followers.insert(id, Follower::new(now, 0, true));
            if let Some(process) = core.membership.process(id) {
                core.links.open(now, id, &process.at);
            }
            core.links.keep(id, true);
        }
        for ended in core.known_ends() {
            this.handle_end(core, &ended);
        }
        this.start(core);
        if !core.joiners.is_empty() {
            core.events.push_back(Event::Joiners(core.joiners.len()));
        }
        this
    }

    /// Creates the coordinator of a later term, with the votes of these members, which were requested at `since`.
    pub(super) fn elected(
        core: &mut Core,
        since: Time,
        reports: BTreeMap<MemberId, VoteReport>,
    ) -> Self {
        let now = core.now;
        let living = reports.keys().filter(|id| !core.has_ended(**id)).count();
        let mut this = Self::new(core, since, core.own_vote() + living);
        for id in core.others() {
            if core.log.departure_proven(id).is_some() {
                this.unproven.insert(id, 0);
                continue;
            }
            this.followers.insert(id, Follower::new(now, 0, false));
        }
        core.synced = core.term;
        let mut accepted = core.accepted.clone();
        let mut unlogged = BTreeSet::new();
        unlogged.extend(core.unlogged.iter().cloned());
        for report in reports.values() {
            if let Some(other) = &report.accepted
                && accepted.as_ref().is_none_or(|(term, _)| *term < other.0)
            {
                accepted = Some(other.clone());
            }
            unlogged.extend(report.unlogged.iter().cloned());
        }
        if !core.mistakes.makes(Mistake::DecisionForgotten) {
            this.adopted = accepted.map(|(_, membership)| membership);
        }
        this.inherits = this.adopted.is_some() && !core.mistakes.makes(Mistake::BoundReportsEnd);
        for ended in core.known_ends() {
            this.handle_end(core, &ended);
        }
        for (id, report) in &reports {
            this.admit(core, *id, report);
        }
        if core.mistakes.makes(Mistake::AbstentionForgotten) {
            (this.abstaining, this.abstainers) = (BTreeSet::new(), 0);
        }
        this.request_missing_votes(core);
        if core.mistakes.makes(Mistake::UnloggedForgotten) {
            unlogged.clear();
        }
        for broadcast in unlogged {
            this.enqueue_broadcast(core, broadcast);
        }
        this.enqueue_operator_decision(core);
        this.start(core);
        this
    }

    /// Enqueues the operator's decision for all members, once.
    fn enqueue_operator_decision(&mut self, core: &Core) {
        let is_decision =
            |pending: &PendingEntry| matches!(pending.entry, Entry::OperatorDecision(_));
        if let Some(decision) = core.operator.clone()
            && !core.operator_decision_logged
            && !self.pending_entries.iter().any(is_decision)
        {
            self.enqueue_entry(core, Entry::OperatorDecision(decision), None);
        }
    }

    /// Creates a coordinator that is confirmed by `votes` votes, including its own, which were requested at `since`.
    fn new(core: &Core, since: Time, votes: usize) -> Self {
        let by_majority = match core.is_more_than_half(votes) {
            true => since,
            false => Time::default(),
        };
        Self {
            term: core.term,
            followers: BTreeMap::new(),
            unproven: BTreeMap::new(),
            heartbeat: 0,
            ticks: 0,
            next_heartbeat: core.now,
            heartbeats: VecDeque::new(),
            confirmed: (0, since),
            confirmed_by_majority: (0, by_majority),
            confirmed_since_tick: 0,
            confirmed_tick: 0,
            immediate_heartbeats: 3,
            pending_entries: VecDeque::new(),
            deferred_exit_reports: Vec::new(),
            reconfigure_requests: 0,
            abstaining: BTreeSet::new(),
            abstainers: 0,
            proposal: None,
            adopted: None,
            inherits: false,
            claimed: BTreeSet::new(),
            waits_for_leases: None,
            leaving: None,
        }
    }

    fn start(&mut self, core: &mut Core) {
        self.renew(core);
        core.without_coordinator_since = None;
        core.events.push_back(Event::Coordinator(core.id()));
        let observers: Vec<_> = core.observers.keys().copied().collect();
        for id in observers {
            self.inform(core, id);
        }
        self.send_heartbeat(core);
    }

    /// Returns for how many nanoseconds each follower has not been heard.
    pub(super) fn heartbeat_ages(&self, now: Time) -> Vec<(MemberId, u64)> {
        let followers = self.followers.iter();
        let admitted = followers.filter(|(_, follower)| follower.admitted);
        admitted
            .map(|(id, follower)| (*id, now.since(follower.last_heard)))
            .collect()
    }

    /// Renews its own lease.
    fn renew(&self, core: &mut Core) {
        if !self.inherits {
            core.lease.renew(self.confirmed_by_majority.1);
            core.remove_voters_ended_before(self.confirmed_by_majority.1);
        }
    }

    /// Returns approximately how many bytes this value occupies on the heap.
    pub(super) fn size(&self) -> usize {
        self.followers.len() * size_of::<(MemberId, Follower)>()
    }

    /// Whether a majority has answered within the lease.
    pub(super) fn has_recent_majority(&self, core: &Core) -> bool {
        core.now <= self.confirmed.1.after(core.timing.lease)
    }

    // --- heartbeats ---

    fn send_heartbeat(&mut self, core: &mut Core) {
        self.heartbeat += 1;
        let late = core.now.since(self.next_heartbeat) > core.timing.heartbeat_interval;
        self.next_heartbeat = core.now.after(core.timing.heartbeat_interval);
        self.heartbeats.push_back(SentHeartbeat {
            number: self.heartbeat,
            at: core.now,
            tick: self.ticks,
            answers: 0,
        });
        if self.heartbeats.len() > MAX_REMEMBERED {
            self.heartbeats.pop_front();
        }
        let (generation, term) = (core.generation(), self.term);
        let confirmed = if self.inherits {
            0
        } else {
            self.confirmed_by_majority.0
        };
        for (&id, follower) in &mut self.followers {
            if !follower.admitted {
                continue;
            }
            let heartbeat = Heartbeat {
                generation,
                term,
                number: self.heartbeat,
                answered: follower.answered,
                confirmed,
            };
            core.links.send_now(id, Frame::Heartbeat(heartbeat));
            let silence = core.now.since(follower.last_heard);
            if silence >= core.timing.suspect_after
                && !late
                && !std::mem::replace(&mut follower.suspected, true)
            {
                core.events.push_back(Event::Suspected(id, silence));
            }
        }
        for id in core.observers.keys() {
            let heartbeat = Heartbeat {
                generation,
                term,
                number: self.heartbeat,
                answered: 0,
                confirmed,
            };
            core.links.send_now(*id, Frame::Heartbeat(heartbeat));
        }
        self.confirm(core);
    }

    /// Finds the last heartbeat that a majority has answered.
    fn confirm(&mut self, core: &mut Core) {
        let unresponsive = match core.mistakes.makes(Mistake::UnresponsiveVotes) {
            true => self
                .followers
                .keys()
                .filter(|id| core.links.is_ready(**id))
                .count(),
            false => 0,
        };
        let me = core.id();
        let answered = |number: u64| {
            let followers = &self.followers;
            move |id: MemberId| {
                id == me
                    || followers
                        .get(&id)
                        .is_some_and(|follower| follower.answered >= number)
            }
        };
        let own = core.own_vote();
        let votes = |heartbeat: &SentHeartbeat| own + heartbeat.answers.max(unresponsive);
        // The answer to a heartbeat counts for all earlier ones, so none is confirmed after one that is not.
        let after = |number: u64| {
            let heartbeats = self.heartbeats.iter();
            heartbeats.skip_while(move |heartbeat| heartbeat.number <= number)
        };
        let confirmed_by_majority = after(self.confirmed_by_majority.0)
            .take_while(|heartbeat| core.is_more_than_half(votes(heartbeat)))
            .last();
        if let Some(heartbeat) = confirmed_by_majority {
            self.confirmed_by_majority = (
                heartbeat.number,
                heartbeat.at.max(self.confirmed_by_majority.1),
            );
            self.renew(core);
        }
        let confirmed = after(self.confirmed.0)
            .take_while(|heartbeat| core.is_majority(votes(heartbeat), answered(heartbeat.number)))
            .last();
        if let Some(heartbeat) = confirmed {
            self.confirmed = (heartbeat.number, heartbeat.at.max(self.confirmed.1));
            let previous = std::mem::replace(&mut self.confirmed_tick, heartbeat.tick);
            if heartbeat.tick - previous > MAX_HEARTBEAT_GAP
                && !core.mistakes.makes(Mistake::GapForgotten)
            {
                self.confirmed_since_tick = self.ticks;
            }
            if self.immediate_heartbeats > 0 {
                self.immediate_heartbeats -= 1;
                self.send_heartbeat(core);
            }
        }
    }

    pub(super) fn heartbeat_reply(
        &mut self,
        core: &mut Core,
        from: MemberId,
        heartbeat_reply: HeartbeatReply,
    ) -> Option<Transition> {
        if heartbeat_reply.term != self.term || heartbeat_reply.generation != core.generation() {
            return None;
        }
        if heartbeat_reply.progress {
            core.progress = Some(core.now);
        }
        self.record_heard(core, from);
        // A member that has left no longer has a vote.
        let is_vote = !core.has_ended(from);
        let follower = self.followers.get_mut(&from).filter(|_| is_vote)?;
        for heartbeat in &mut self.heartbeats {
            if heartbeat.number <= heartbeat_reply.number && heartbeat.number > follower.answered {
                heartbeat.answers += 1;
            }
        }
        follower.answered = follower.answered.max(heartbeat_reply.number);
        self.confirm(core);
        self.advance(core)
    }

    fn record_heard(&mut self, core: &mut Core, from: MemberId) {
        if let Some(follower) = self.followers.get_mut(&from) {
            let silence = core.now.since(follower.last_heard);
            (follower.last_heard, follower.tick) = (core.now, self.ticks);
            if std::mem::take(&mut follower.suspected) {
                core.events.push_back(Event::Heard(from, silence));
            }
        }
    }

    /// Whether a member has not answered for so long that its lease has run out.
    ///
    /// The lease may have been granted by another coordinator, to which the member promised its vote after its last
    /// answer here. That coordinator had a majority for a moment, so this one had none during that time, which is at
    /// most [`MAX_HEARTBEAT_GAP`] if the heartbeats have been confirmed since.
    fn lease_has_expired(&self, core: &Core, id: MemberId) -> bool {
        if core.mistakes.makes(Mistake::LeftOutEarly) {
            return true;
        }
        let follower = self.followers.get(&id).map(|follower| follower.tick);
        let last_tick = follower.or_else(|| self.unproven.get(&id).copied());
        last_tick.is_none_or(|tick| {
            self.ticks - tick.max(self.confirmed_since_tick) > core.timing.max_unanswered_heartbeats
        })
    }

    /// Asks the members that do not follow yet for their votes. A member that cannot be reached counts as unreachable
    /// once its link is lost.
    fn request_missing_votes(&mut self, core: &mut Core) {
        let ended = core.known_ends();
        let all = self.followers.iter();
        let absent = all.filter(|(id, follower)| !follower.admitted && !core.is_departed(**id));
        let absent: Vec<_> = absent.map(|(id, _)| *id).collect();
        for id in absent {
            if core.links.is_ready(id) || !core.links.has_link(id) {
                self.request_vote(core, id, ended.clone());
            }
        }
    }

    fn request_vote(&self, core: &mut Core, id: MemberId, ended: Vec<Ended>) {
        let (unresponsive, already_coordinates) = (false, true);
        let vote_request = VoteRequest {
            term: self.term,
            ended,
            unresponsive,
            already_coordinates,
        };
        core.reach(id, Message::RequestVote(vote_request));
        core.links.keep(id, true);
    }

    // --- received messages ---

    pub(super) fn message(
        &mut self,
        core: &mut Core,
        from: MemberId,
        message: Message,
    ) -> Option<Transition> {
        self.record_heard(core, from);
        if self.leaving.is_some() {
            return self.advance(core);
        }
        match message {
            Message::Vote { report, .. } => {
                if report.promised > self.term && core.log.departure_proven(from).is_none() {
                    return Some(self.coordinate_later_term(core, report.promised));
                }
                let is_gone =
                    core.log.departure_proven(from).is_some() || !core.membership.votes(from);
                if report.promised < self.term && !is_gone {
                    self.learn_ends(core, &report);
                    // The voter may have accepted the proposal of an earlier coordinator since.
                    let ended = core.known_ends();
                    self.request_vote(core, from, ended);
                } else {
                    self.admit(core, from, &report);
                }
            }
            Message::Broadcast(broadcast) => self.enqueue_broadcast(core, broadcast),
            Message::Direct { from, to, bytes } if to == core.id() => {
                core.events.push_back(Event::Direct(from, bytes));
            }
            Message::Direct { from, to, bytes } => {
                core.send(to, Message::Direct { from, to, bytes })
            }
            Message::ReportEnd(ended) if self.may_have_left(core, &ended) => {
                self.deferred_exit_reports
                    .push((core.now.after(core.timing.exit_report_wait), ended));
            }
            Message::ReportEnd(mut ended) => {
                ended.reduces_electorate |= core.holds_lease();
                self.handle_end(core, &ended);
            }
            Message::Request(bytes) => {
                let follower = self.followers.get(&from);
                if follower.is_some_and(|follower| follower.admitted)
                    || core.observers.contains_key(&from)
                {
                    core.events.push_back(Event::Request(from, bytes));
                }
            }
            Message::Abstain => self.record_abstention(core, from),
            Message::Reconfigure(reconfigure_request)
                if core.membership.rank_of(from).is_some() =>
            {
                if let Some(follower) = self.followers.get_mut(&from)
                    && !self.abstaining.contains(&from)
                {
                    // After a failover, the requests of the other members are still on their way.
                    let until = core
                        .now
                        .after(reconfigure_request.timeout.max(core.timing.suspect_after));
                    if follower
                        .reconfigure_request
                        .replace((reconfigure_request, until))
                        .is_none()
                    {
                        self.reconfigure_requests += 1;
                    }
                }
            }
            Message::CancelReconfigure(number) => {
                if let Some(follower) = self.followers.get_mut(&from)
                    && follower
                        .reconfigure_request
                        .take_if(|(reconfigure_request, _)| reconfigure_request.number == number)
                        .is_some()
                {
                    self.reconfigure_requests -= 1;
                }
            }
            Message::Leave(_) if !core.membership.votes(from) => {
                forget_joiner(core, from);
                core.observers.remove(&from);
                core.links.acknowledge(from);
                core.links.keep(from, false);
            }
            Message::Leave(departure) => self.handle_leave(core, from, departure),
            Message::Released => {
                let after = self.waited(core);
                self.handle_leave(core, from, Departure::lost(LossKind::LeftBehind { after }));
            }
            Message::Join {
                process,
                role: JoinRole::Joiner,
            } => {
                core.links.keep(from, true);
                if core.membership.votes(from) && core.log.departure_proven(from).is_none() {
                    // The process is already a member, and may not have received that.
                    let membership = Arc::clone(&core.membership);
                    core.send(from, Message::NewerGeneration(membership));
                } else {
                    core.joiners.insert(from, process);
                    core.events.push_back(Event::Joiners(core.joiners.len()));
                }
            }
            Message::Observe(process) => self.observe(core, from, process),
            Message::Accepted { term, generation } => {
                if let Some(proposal) = &mut self.proposal
                    && term == self.term
                    && proposal.membership.generation == generation
                {
                    proposal.accepted.insert(from);
                }
            }
            Message::Follows {
                term,
                already_coordinates,
            } if term > self.term => {
                return Some(match already_coordinates {
                    true => Transition::Follow(term),
                    false => self.coordinate_later_term(core, term),
                });
            }
            Message::OperatorDecision(decision) if decision.generation == core.generation() => {
                // The decision counts before it is in the log: without the decision, no entry can be sent.
                core.operator.get_or_insert_with(|| Arc::new(decision));
                self.enqueue_operator_decision(core);
            }
            _ => {}
        }
        self.advance(core)
    }

    /// Handles that a member does not know this generation.
    pub(super) fn handle_outdated_member(&mut self, core: &mut Core, from: MemberId) {
        if !core.membership.votes(from) {
            return;
        }
        let membership = Arc::clone(&core.membership);
        core.send(from, Message::NewerGeneration(membership));
        let (term, start) = (self.term, 0);
        let entries = core.log.since(0);
        let message = match entries.filter(|_| self.followers.contains_key(&from)) {
            Some(entries) => Message::SyncLog {
                term,
                start,
                entries,
            },
            None => Message::Reject(Exclusion::Superseded(core.id())),
        };
        core.send(from, message);
    }

    /// Handles a vote promised for a later term. A coordinator that has a majority coordinates in a still later term.
    pub(super) fn coordinate_later_term(&self, core: &Core, term: Term) -> Transition {
        match self.has_recent_majority(core) && !core.sent_leave {
            true => Transition::CoordinateLaterTerm(term),
            false => Transition::Follow(term),
        }
    }

    /// Records that a member will take part in no later generation: it counts as a member that agrees to be left out.
    /// It no longer has a lease.
    fn record_abstention(&mut self, core: &Core, id: MemberId) {
        if core.membership.rank_of(id).is_none() || !self.abstaining.insert(id) {
            return;
        }
        self.abstainers += usize::from(core.log.departure_proven(id).is_none());
        if let Some(follower) = self.followers.get_mut(&id) {
            self.reconfigure_requests -= usize::from(follower.reconfigure_request.take().is_some());
        }
    }

    /// Returns how long the members that have requested the next generation have waited for the others.
    fn waited(&self, core: &Core) -> Duration {
        let shortest = core.timing.suspect_after;
        let reconfigure_requests = self
            .followers
            .values()
            .filter_map(|follower| follower.reconfigure_request);
        let reconfigure_requests = reconfigure_requests.map(|(reconfigure_request, until)| {
            Time(until.0 - reconfigure_request.timeout.max(shortest))
        });
        let first = reconfigure_requests
            .chain(core.reconfigure_request.map(|(_, since)| since))
            .min();
        Duration::from_nanos(core.now.since(first.unwrap_or(core.now)))
    }

    fn handle_leave(&mut self, core: &mut Core, from: MemberId, departure: Departure) {
        if from != core.id() {
            let (member, proof, reduces_electorate) = (from, Proof::Leave(departure), true);
            let ended = Ended {
                member,
                proof,
                reduces_electorate,
            };
            return self.handle_end(core, &ended);
        }
        let entry = Entry::Departed {
            member: from,
            departure,
            proven: true,
        };
        self.enqueue_entry(core, entry, None);
    }

    /// Whether this coordinator has sent its departure to all members.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    fn observe(&mut self, core: &mut Core, from: MemberId, process: ProcessInfo) {
        core.links.keep(from, true);
        core.observers.insert(from, process);
        self.inform(core, from);
    }

    /// Reports to an observer that this member coordinates, and sends it the log.
    fn inform(&self, core: &mut Core, to: MemberId) {
        let (term, membership) = (self.term, Arc::clone(&core.membership));
        core.send(to, Message::Coordinating { term, membership });
        let (start, entries) = (core.log.first(), core.log.part().entries);
        let sync_log = Message::SyncLog {
            term,
            start,
            entries,
        };
        core.send(to, sync_log);
    }

    pub(super) fn enqueue_broadcast(&mut self, core: &mut Core, broadcast: Arc<Broadcast>) {
        let is_waiting = |pending: &PendingEntry| matches!(&pending.entry, Entry::Broadcast(other) if *other == broadcast);
        if !core.log.has(&broadcast) && !self.pending_entries.iter().any(is_waiting) {
            self.enqueue_entry(core, Entry::Broadcast(broadcast), None);
        }
    }

    /// Whether a launcher's report may have overtaken a leave message.
    fn may_have_left(&self, core: &Core, ended: &Ended) -> bool {
        let id = ended.member;
        let is_exit_report = matches!(ended.proof, Proof::Launcher(_));
        is_exit_report
            && self.followers.contains_key(&id)
            && core.links.is_ready(id)
            && (!core.is_departed(id) || core.awaits_report(id))
    }

    /// Applies the launchers' reports that have waited long enough.
    fn apply_deferred_exit_reports(&mut self, core: &mut Core) {
        let is_due = |(until, ended): &mut (Time, Ended)| {
            *until <= core.now || !core.links.is_ready(ended.member)
        };
        let due: Vec<_> = self.deferred_exit_reports.extract_if(.., is_due).collect();
        for (_, mut ended) in due {
            ended.reduces_electorate |= core.holds_lease();
            self.handle_end(core, &ended);
        }
    }

    /// Handles the end of a process whose launcher will report how it ended.
    pub(super) fn handle_exit(&mut self, core: &mut Core, id: MemberId) {
        if self.leaving.is_none() && core.learn_exit(id) {
            self.forget_answers(id);
            self.forget_unproven_loss(id);
        }
    }

    /// Forgets a loss that waits for a majority, because the end of the process is proven now.
    fn forget_unproven_loss(&mut self, id: MemberId) {
        self.pending_entries.retain(|pending| {
            !(pending.needs.is_some() && departing_member(&pending.entry) == Some(id))
        });
    }

    /// Forgets a member's answers, which no longer count as votes.
    fn forget_answers(&mut self, id: MemberId) {
        if let Some(follower) = self.followers.get_mut(&id) {
            let answered = std::mem::take(&mut follower.answered);
            for heartbeat in self
                .heartbeats
                .iter_mut()
                .filter(|heartbeat| heartbeat.number <= answered)
            {
                heartbeat.answers -= 1;
            }
        }
    }

    /// Handles the proven end of a process.
    pub(super) fn handle_end(&mut self, core: &mut Core, ended: &Ended) {
        // The other members may have formed the next generation as soon as they learned that this member leaves.
        if self.leaving.is_some() {
            return;
        }
        let id = ended.member;
        let known = self
            .deferred_exit_reports
            .iter()
            .position(|(_, report)| report.member == id);
        let known = known.map(|at| self.deferred_exit_reports.swap_remove(at).1);
        let ended = match known {
            // A launcher's report is more specific.
            Some(report) if ended.proof == Proof::Kernel => {
                let reduces_electorate = ended.reduces_electorate | report.reduces_electorate;
                &Ended {
                    reduces_electorate,
                    ..report
                }
            }
            _ => ended,
        };
        core.learn_end(ended);
        self.forget_answers(id);
        if id == core.id() || !core.membership.votes(id) || core.log.departure_proven(id).is_some()
        {
            return;
        }
        self.forget_unproven_loss(id);
        let pid = core.membership.process(id).map_or(0, |process| process.pid);
        let departure = ended.proof.departure(pid);
        let proven = true;
        self.enqueue_entry(
            core,
            Entry::Departed {
                member: id,
                departure,
                proven,
            },
            None,
        );
    }

    /// Handles that this process leaves.
    pub(super) fn leave(&mut self, core: &mut Core, departure: Departure) -> Option<Transition> {
        let me = core.id();
        self.handle_leave(core, me, departure);
        self.advance(core)
    }

    /// Handles a lost link.
    pub(super) fn handle_link_lost(&mut self, core: &mut Core, id: MemberId) -> Option<Transition> {
        forget_joiner(core, id);
        core.observers.remove(&id);
        if let Some(follower) = self.followers.get_mut(&id) {
            // Messages on their way in both directions are lost with the link.
            (follower.link_lost_at, follower.admitted) = (Some(core.now), false);
            self.reconfigure_requests -= usize::from(follower.reconfigure_request.take().is_some());
            if core.mistakes.makes(Mistake::ClosedIsDead) {
                let (member, proof, reduces_electorate) = (id, Proof::Kernel, true);
                self.handle_end(
                    core,
                    &Ended {
                        member,
                        proof,
                        reduces_electorate,
                    },
                );
            } else {
                self.depart_lost_members(core);
            }
        }
        self.advance(core)
    }

    /// Handles that the peer has begun another link: the peer follows again once it has been asked again.
    pub(super) fn handle_link_renewed(
        &mut self,
        core: &mut Core,
        id: MemberId,
    ) -> Option<Transition> {
        if let Some(follower) = self.followers.get_mut(&id) {
            follower.admitted = false;
            core.held_replies.remove(&id);
            self.reconfigure_requests -= usize::from(follower.reconfigure_request.take().is_some());
            core.links.keep(id, true);
        }
        self.advance(core)
    }

    /// Requires a majority without the unreachable members, unless NCCL reaches them.
    fn depart_lost_members(&mut self, core: &mut Core) {
        if core.progresses() {
            return;
        }
        let waits = |id: MemberId| {
            self.pending_entries
                .iter()
                .any(|pending| departing_member(&pending.entry) == Some(id))
        };
        let lost = self.followers.iter().filter(|(id, follower)| {
            follower.link_lost_at.is_some() && !core.is_departed(**id) && !waits(**id)
        });
        let lost: Vec<_> = lost
            .map(|(id, follower)| (*id, follower.last_heard))
            .collect();
        if lost.is_empty() {
            return;
        }
        let needs = Some(self.heartbeat + 1);
        for (member, heard) in lost {
            // A link is lost after it could not be resumed for some time, which holds even if the generation is younger
            // than that.
            let unheard = core.now.since(heard).max(core.timing.resume);
            let departure = core.unreachable(member, heard, unheard);
            let proven = false;
            self.enqueue_entry(
                core,
                Entry::Departed {
                    member,
                    departure,
                    proven,
                },
                needs,
            );
        }
        self.send_heartbeat(core);
    }

    /// Continues with the proposal that a late voter has accepted, if there is no other proposal.
    ///
    /// None of the votes for this term contains an acceptance of that proposal. But its proposer may count the ends of
    /// the members that gave these votes, and make the proposal active with this voter's acceptance: then only this
    /// voter may know of it. This voter can only leave when the proposal is active.
    fn adopt_late(&mut self, core: &Core, report: &VoteReport) {
        let accepted = report.accepted.as_ref();
        let accepted = accepted.filter(|_| self.proposal.is_none() && self.adopted.is_none());
        if let Some((_, membership)) = accepted
            && !core.mistakes.makes(Mistake::DecisionForgotten)
        {
            self.adopted = Some(Arc::clone(membership));
            self.inherits = !core.mistakes.makes(Mistake::BoundReportsEnd);
        }
    }

    /// Sends a reply once its receiver has the entries that the reply depends on.
    pub(super) fn reply(&mut self, core: &mut Core, to: MemberId, bytes: Arc<[u8]>) {
        match self.followers.get_mut(&to) {
            Some(follower) if !follower.admitted => core.hold_reply(to, bytes),
            _ => core.send(to, Message::Reply(bytes)),
        }
    }

    fn learn_ends(&mut self, core: &mut Core, report: &VoteReport) {
        for ended in &report.ended {
            if core.learn_end(ended) {
                self.handle_end(core, ended);
            }
        }
    }

    /// Lets the voter follow if the log here continues the log in its report.
    fn admit(&mut self, core: &mut Core, from: MemberId, report: &VoteReport) {
        self.learn_ends(core, report);
        let is_gone = core.log.departure_proven(from).is_some() || !core.membership.votes(from);
        let continues =
            core.log.continues(&report.log) || core.mistakes.makes(Mistake::DivergentFollows);
        if report.abstains {
            self.record_abstention(core, from);
        }
        let start = report.log.end().min(core.log.end());
        let entries = core.log.since(start).filter(|_| continues && !is_gone);
        let Some(entries) = entries else {
            // A member that was asked twice votes twice, and may have received more entries since then than are kept.
            let follower = self.followers.get(&from);
            let is_old =
                follower.is_some_and(|follower| follower.admitted) && continues && !is_gone;
            if !is_old {
                core.send(from, Message::Reject(Exclusion::Superseded(core.id())));
            }
            return;
        };
        let now = core.now;
        let follower = self
            .followers
            .entry(from)
            .or_insert_with(|| Follower::new(now, self.ticks, false));
        (follower.last_heard, follower.tick) = (now, self.ticks);
        (
            follower.link_lost_at,
            follower.admitted,
            follower.was_told_left_behind,
        ) = (None, true, false);
        // A member that was unreachable is reachable again.
        self.pending_entries.retain(|pending| {
            !(pending.needs.is_some() && departing_member(&pending.entry) == Some(from))
        });
        let term = self.term;
        let sync_log = Message::SyncLog {
            term,
            start,
            entries,
        };
        core.reach(from, sync_log);
        core.links.keep(from, true);
        core.send_held_replies(from);
        self.adopt_late(core, report);
        for broadcast in &report.unlogged {
            self.enqueue_broadcast(core, Arc::clone(broadcast));
        }
        if let Some(proposal) = &self.proposal {
            let membership = Arc::clone(&proposal.membership);
            core.send(from, Message::Propose { term, membership });
        }
    }

    // --- entries for all members ---

    fn enqueue_entry(&mut self, core: &Core, mut entry: Entry, needs: Option<u64>) {
        let since = core.now;
        if let Entry::Departed {
            member,
            departure: Departure::Lost(lost),
            ..
        } = &mut entry
            && let Some((at, call)) = core.calls.get(member)
        {
            let before = Duration::from_nanos(since.since(*at));
            let call = call.clone();
            lost.last_call.get_or_insert(LastCall { call, before });
        }
        self.pending_entries.push_back(PendingEntry {
            entry,
            since,
            needs,
        });
    }

    /// Sends the entries that may be sent. Sends none while a successor is proposed: all its members must have received
    /// the same entries.
    fn send_pending_entries(&mut self, core: &mut Core) {
        if self.proposal.is_some() || self.adopted.is_some() || self.leaving.is_some() {
            return;
        }
        let mut at = 0;
        while let Some(pending) = self.pending_entries.get(at) {
            let is_ready = match pending.needs {
                None => self.has_recent_majority(core),
                Some(number) => self.confirmed.0 >= number,
            };
            if !is_ready && !core.mistakes.makes(Mistake::UnconfirmedCoordinatorAppends) {
                at += 1;
                continue;
            }
            let Some(pending) = self.pending_entries.remove(at) else {
                return;
            };
            if departing_member(&pending.entry)
                .is_some_and(|id| core.log.departure_proven(id).is_some())
            {
                continue;
            }
            self.append(core, pending.entry);
            if self.leaving.is_some() {
                return;
            }
        }
    }

    fn append(&mut self, core: &mut Core, entry: Entry) {
        let entry = Arc::new(entry);
        let at = core.log.end();
        core.deliver(Arc::clone(&entry));
        let (generation, term) = (core.generation(), self.term);
        let admitted = self
            .followers
            .iter()
            .filter(|(_, follower)| follower.admitted);
        for &id in admitted.map(|(id, _)| id).chain(core.observers.keys()) {
            let entry = Arc::clone(&entry);
            let append = Message::Append { term, at, entry };
            core.links.send(id, generation, append);
        }
        if let Entry::Departed { member, proven, .. } = &*entry {
            if *member == core.id() {
                self.leaving = Some(core.now);
            }
            core.held_replies.remove(member);
            self.abstainers -= usize::from(self.abstaining.contains(member));
            if let Some(follower) = self.followers.remove(member) {
                core.links.keep(*member, false);
                self.reconfigure_requests -= usize::from(follower.reconfigure_request.is_some());
                if !proven {
                    self.unproven.insert(*member, follower.tick);
                }
            }
        }
    }

    /// Makes all progress that has become possible.
    pub(super) fn advance(&mut self, core: &mut Core) -> Option<Transition> {
        self.apply_deferred_exit_reports(core);
        self.confirm(core);
        self.send_pending_entries(core);
        if let Some(since) = self.leaving {
            let all = self.followers.keys().all(|id| core.links.is_flushed(*id));
            let next = match core.leaving {
                Some(_) => Transition::Left,
                // The other members form the next generation without this one. Which member proposes it is not known.
                None => Transition::Exclude(Exclusion::LeftBehind(Generation {
                    number: core.generation() + 1,
                    proposer: core.id(),
                })),
            };
            return (all || core.now.since(since) >= COORDINATOR_LEAVE_WAIT_NS).then_some(next);
        }
        self.try_reconfigure(core)
            .or_else(|| self.give_up_without_majority(core))
    }

    /// Gives up if no majority has answered for too long.
    fn give_up_without_majority(&mut self, core: &mut Core) -> Option<Transition> {
        let pending_entries = self.pending_entries.front().map(|pending| pending.since);
        let proposal = self.proposal.as_ref().map(|proposal| proposal.since);
        let since = pending_entries.into_iter().chain(proposal).min()?;
        if core.now.since(since) < core.timing.confirm || core.progresses() {
            return None;
        }
        let me = core.id();
        let answers = |id: &MemberId| {
            let follower = &self.followers[id];
            follower.admitted && core.now.since(follower.last_heard) < core.timing.suspect_after
        };
        let reached: BTreeSet<_> = self.followers.keys().copied().filter(answers).collect();
        if self.claim(core) {
            return None;
        }
        let timeout = match &self.proposal {
            // A majority answers: the wait is for the members that have not accepted to stay silent for long enough.
            Some(_) if self.has_recent_majority(core) => {
                let silence = core.timing.max_unanswered_heartbeats + MAX_HEARTBEAT_GAP;
                let silence = silence * core.timing.heartbeat_interval;
                core.timing.majority_timeout.max(silence)
            }
            _ => (2 * core.timing.confirm).max(core.timing.majority_timeout / 2),
        };
        if core.now.since(since) < timeout {
            return None;
        }
        let all = core.others();
        let unreached = all
            .into_iter()
            .filter(|id| !reached.contains(id) && core.may_be_on_other_side(*id));
        let why = Exclusion::NoMajority {
            reached: 1 + reached.len() as u32,
            of: core.electorate() as u32,
            unreached: unreached.filter(|id| *id != me).collect(),
        };
        let (generation, term) = (core.generation(), self.term);
        for id in self.followers.keys().chain(core.observers.keys()) {
            let why = why.clone();
            let cut_off = Message::CutOff { term, why };
            core.links.send(*id, generation, cut_off);
        }
        Some(Transition::Exclude(why))
    }

    // --- the next generation ---

    /// Handles a new or withdrawn request of this member's driver for the next generation.
    pub(super) fn own_reconfigure_request(&mut self, core: &mut Core) -> Option<Transition> {
        self.advance(core)
    }

    fn try_reconfigure(&mut self, core: &mut Core) -> Option<Transition> {
        if self.proposal.is_some() {
            let is_accepted = self.is_accepted(core) || core.mistakes.makes(Mistake::ActiveAlone);
            return is_accepted.then(|| self.activate(core)).flatten();
        }
        if let Some(membership) = self.adopted.take() {
            return self.propose(core, membership, true);
        }
        let own = core
            .reconfigure_request
            .map(|(reconfigure_request, since)| {
                (
                    reconfigure_request,
                    since.after(reconfigure_request.timeout),
                )
            });
        if self.reconfigure_requests == 0 && own.is_none() {
            return None;
        }
        // A proposal without a majority would bind members to it to no purpose.
        if !self.has_recent_majority(core) {
            self.wait_for_majority(core);
            return None;
        }
        let all = core.membership.members.len();
        let deadline = self
            .followers
            .values()
            .filter_map(|follower| follower.reconfigure_request.map(|(_, until)| until));
        let complete = self.reconfigure_requests + self.abstainers + core.departed;
        let is_complete = complete + usize::from(own.is_some() || core.abstains) >= all;
        if !is_complete {
            let deadline = deadline.chain(own.map(|(_, until)| until)).min()?;
            if core.now < deadline {
                return None;
            }
        }
        // The members of the next generation learn first why other members are not in it, if necessary without the
        // launchers' reports.
        for member in core.unreported_exits() {
            let (proof, reduces_electorate) = (Proof::Kernel, false);
            let ended = Ended {
                member,
                proof,
                reduces_electorate,
            };
            self.handle_end(core, &ended);
        }
        self.send_pending_entries(core);
        // Leases expire at ticks. Without this check, each of very many answers would trigger an examination of very
        // many members.
        let state = (
            self.ticks,
            complete,
            core.ended.len(),
            (own.is_some(), core.abstains),
        );
        if self.waits_for_leases == Some(state) {
            return None;
        }
        let me = core.id();
        let requesting = self
            .followers
            .iter()
            .filter(|(_, follower)| follower.reconfigure_request.is_some());
        let mut requesting: BTreeSet<_> = requesting.map(|(id, _)| *id).collect();
        requesting.extend(own.map(|_| me));
        let before = Arc::clone(&core.membership);
        let members = before.members.iter().map(|process| process.id);
        let missing: Vec<_> = members
            .filter(|id| !requesting.contains(id) && !core.is_departed(*id))
            .filter(|id| !self.abstaining.contains(id) && (*id != me || !core.abstains))
            .collect();
        if !missing.is_empty() {
            let reconfigure_requests = self
                .followers
                .values()
                .filter_map(|follower| follower.reconfigure_request);
            let mut reconfigure_requests = reconfigure_requests.chain(own);
            if !reconfigure_requests
                .all(|(reconfigure_request, _)| reconfigure_request.leaves_behind)
            {
                self.refuse_reconfigure(core, &missing);
                return None;
            }
            if missing.contains(&me) {
                return self.step_aside(core);
            }
            for id in &missing {
                if let Some(follower) = self.followers.get_mut(id)
                    && !std::mem::replace(&mut follower.was_told_left_behind, true)
                {
                    core.send(*id, Message::LeaveBehind);
                }
            }
        }
        if core.abstains {
            return self.step_aside(core);
        }
        let unproven = before.voters().map(|process| process.id);
        let unproven = unproven
            .filter(|id| core.log.departure_proven(*id) == Some(false) && !core.has_ended(*id));
        // A witness that does not follow may have received other entries.
        let follows = |id: &MemberId| {
            let follower = self.followers.get(id);
            follower.is_some_and(|follower| follower.admitted)
        };
        let witnesses = before.witnesses.iter().map(|process| process.id);
        let not_following = witnesses.filter(|id| !follows(id) && !core.has_ended(*id));
        if !unproven
            .chain(missing.iter().copied())
            .chain(not_following)
            .all(|id| self.abstaining.contains(&id) || self.lease_has_expired(core, id))
        {
            self.waits_for_leases = Some(state);
            return None;
        }
        let kept = before
            .members
            .iter()
            .filter(|process| requesting.contains(&process.id) && !core.is_departed(process.id));
        let mut kept: Vec<_> = kept.cloned().collect();
        let ready = core
            .joiners
            .iter()
            .filter(|(id, _)| core.links.is_ready(**id));
        for (_, joiner) in ready {
            kept.push(joiner.clone());
        }
        let generation = Generation {
            number: core.generation() + 1,
            proposer: me,
        };
        let witnesses = before.witnesses.iter();
        let witnesses =
            witnesses.filter(|process| follows(&process.id) && !core.is_departed(process.id));
        let membership = before.successor(generation, kept, witnesses.cloned().collect());
        self.propose(core, Arc::new(membership), false)
    }

    /// Leaves, because the other members form the next generation without this member, which therefore cannot
    /// coordinate them.
    fn step_aside(&mut self, core: &mut Core) -> Option<Transition> {
        let (me, after) = (core.id(), self.waited(core));
        self.handle_leave(core, me, Departure::lost(LossKind::LeftBehind { after }));
        self.send_pending_entries(core);
        None
    }

    /// Whether the proposal may become active.
    ///
    /// A member that has not accepted the proposal may count the ends of members that have, as long as its lease runs.
    /// So all members of the proposed generation must have accepted, have ended, or not have answered for longer than a
    /// lease; and only members heard since then count as votes.
    fn is_accepted(&self, core: &Core) -> bool {
        let Some(proposal) = &self.proposal else {
            return false;
        };
        let me = core.id();
        let lately = MAX_HEARTBEAT_GAP * core.timing.heartbeat_interval;
        let is_confirmed = self.ticks - self.confirmed_tick <= MAX_HEARTBEAT_GAP
            && core.now.since(self.confirmed.1) <= lately;
        if !is_confirmed && !core.mistakes.makes(Mistake::GapForgotten) {
            return false;
        }
        let is_vote = |id: &MemberId| {
            let follower = self.followers.get(id);
            let is_heard =
                follower.is_some_and(|follower| core.now.since(follower.last_heard) < lately);
            let is_own = *id == me && core.own_vote() == 1;
            is_own || (*id != me && is_heard && core.membership.votes(*id) && !core.has_ended(*id))
        };
        let votes: BTreeSet<_> = proposal.accepted.iter().filter(|id| is_vote(id)).collect();
        let mut others = proposal.membership.voters().map(|process| process.id);
        let all = others.all(|id| {
            // A new member needs its lease as well, and gets some time to obtain it.
            let is_new = !core.membership.votes(id);
            let waited = core.now.since(proposal.since) >= core.timing.grace;
            (is_new && (waited || !core.links.is_ready(id)))
                || proposal.accepted.contains(&id)
                || core.has_ended(id)
                || (!is_new && self.lease_has_expired(core, id))
        });
        // The proposer has waited until the leases of the members that it leaves out had run out. They may have
        // obtained others since.
        let mut left_out = core.membership.voters().map(|process| process.id);
        let none_counts = !proposal.adopted
            || left_out.all(|id| {
                id == me
                    || proposal.membership.votes(id)
                    || proposal.accepted.contains(&id)
                    || self.abstaining.contains(&id)
                    || core.has_ended(id)
                    || self.lease_has_expired(core, id)
            });
        all && none_counts && core.is_majority(votes.len(), |id| votes.contains(&id))
    }

    /// Handles the absence of a majority: a claim may replace it, and the requests for the next generation do not wait
    /// forever.
    fn wait_for_majority(&mut self, core: &mut Core) {
        let reconfigure_requests = self.followers.values();
        let reconfigure_requests = reconfigure_requests
            .filter_map(|follower| follower.reconfigure_request.map(|(_, until)| until));
        let own = core
            .reconfigure_request
            .map(|(reconfigure_request, since)| since.after(reconfigure_request.timeout));
        let Some(deadline) = reconfigure_requests.chain(own).min() else {
            return;
        };
        let late = core.now.since(deadline);
        if late >= core.timing.confirm {
            let mut missing = core.others();
            missing.retain(|id| !core.is_departed(*id) && !self.abstaining.contains(id));
            self.refuse_reconfigure(core, &missing);
        } else if core.now >= deadline {
            self.claim(core);
        }
    }

    /// Requests a claim between two halves, once for each half. Returns whether it has requested one now.
    fn claim(&mut self, core: &mut Core) -> bool {
        let answers = |(id, follower): &(&MemberId, &Follower)| {
            let is_heard = core.now.since(follower.last_heard) < core.timing.suspect_after;
            follower.admitted && is_heard && core.membership.votes(**id) && !core.has_ended(**id)
        };
        let reached = self.followers.iter().filter(answers);
        let side = reached.map(|(id, _)| *id).chain(core.own_voter()).collect();
        core.claim(side, &mut self.claimed)
    }

    fn refuse_reconfigure(&mut self, core: &mut Core, missing: &[MemberId]) {
        for (id, follower) in &mut self.followers {
            follower.was_told_left_behind = false;
            if let Some((reconfigure_request, _)) = follower.reconfigure_request.take() {
                let (reconfigure_request, missing) = (reconfigure_request.number, missing.to_vec());
                core.send(
                    *id,
                    Message::ReconfigureFailed {
                        reconfigure_request,
                        missing,
                    },
                );
            }
        }
        self.reconfigure_requests = 0;
        if core.reconfigure_request.take().is_some() {
            core.events
                .push_back(Event::ReconfigureFailed(missing.to_vec()));
        }
    }

    fn propose(
        &mut self,
        core: &mut Core,
        membership: SharedMembership,
        adopted: bool,
    ) -> Option<Transition> {
        let me = core.id();
        core.accept(self.term, &membership);
        let others = core
            .membership
            .voters()
            .chain(&membership.members)
            .map(|process| process.id);
        let others: BTreeSet<_> = others.filter(|id| *id != me).collect();
        for id in others {
            let (term, membership) = (self.term, Arc::clone(&membership));
            core.send(id, Message::Propose { term, membership });
        }
        self.proposal = Some(Proposal {
            membership,
            adopted,
            since: core.now,
            accepted: BTreeSet::from([me]),
        });
        self.try_reconfigure(core)
    }

    fn activate(&mut self, core: &mut Core) -> Option<Transition> {
        let Proposal {
            membership,
            adopted,
            accepted,
            ..
        } = self.proposal.take()?;
        let me = core.id();
        for id in membership
            .voters()
            .map(|process| process.id)
            .filter(|id| *id != me)
        {
            let activate = Message::Activate {
                membership: Arc::clone(&membership),
                accepted: accepted.contains(&id),
            };
            core.reach_in(&membership, id, activate);
        }
        for id in core
            .others()
            .into_iter()
            .filter(|id| !membership.votes(*id))
        {
            core.send(id, Message::NewerGeneration(Arc::clone(&membership)));
        }
        let certain_since = match adopted {
            false => core.now,
            true if core.consents_in_time => core.consented,
            true => Time::default(),
        };
        Some(Transition::Enter(membership, certain_since))
    }

    // --- time ---

    pub(super) fn next_timeout(&self, core: &Core) -> Time {
        let own = core
            .reconfigure_request
            .map(|(reconfigure_request, since)| since.after(reconfigure_request.timeout));
        let reconfigure_requests = match self.reconfigure_requests {
            0 => None,
            _ => self
                .followers
                .values()
                .filter_map(|follower| follower.reconfigure_request.map(|(_, until)| until))
                .min(),
        };
        let deferred_exit_reports = self.deferred_exit_reports.iter().map(|(until, _)| *until);
        let due = own
            .into_iter()
            .chain(reconfigure_requests)
            .chain(deferred_exit_reports)
            .filter(|until| *until > core.now);
        due.chain([self.next_heartbeat])
            .min()
            .unwrap_or(self.next_heartbeat)
    }

    pub(super) fn timeout(&mut self, core: &mut Core) -> Option<Transition> {
        if self.next_heartbeat <= core.now {
            self.ticks += 1;
            if self.leaving.is_some() {
                self.next_heartbeat = core.now.after(core.timing.heartbeat_interval);
                return self.advance(core);
            }
            self.send_heartbeat(core);
            self.depart_lost_members(core);
            self.request_missing_votes(core);
        }
        self.advance(core)
    }
}

fn forget_joiner(core: &mut Core, id: MemberId) {
    if core.joiners.remove(&id).is_some() {
        core.events.push_back(Event::Joiners(core.joiners.len()));
    }
}

/// Returns the member that departs with an entry.
fn departing_member(entry: &Entry) -> Option<MemberId> {
    match entry {
        Entry::Departed { member, .. } => Some(*member),
        Entry::Broadcast(_) | Entry::OperatorDecision(_) => None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::proto::{MILLI, Membership, Mistakes, Timing};

    pub(in crate::proto) fn id(slot: u32) -> MemberId {
        MemberId {
            slot,
            incarnation: 1,
        }
    }

    /// The core of one of the members of a generation of `size` ranks.
    pub(in crate::proto) fn core(me: u32, size: u32) -> Core {
        let process = |slot| ProcessInfo {
            id: id(slot),
            host: String::from("host"),
            pid: 1,
            start_time: 1,
            kernel: 0,
            at: format!("unix:@{slot}"),
            launcher_rank: None,
            observed: false,
            tolerates_unreachable: true,
        };
        let generation = Generation {
            number: 0,
            proposer: id(0),
        };
        let members = (0..size).map(process).collect();
        let membership = Membership::new(generation, members, Vec::new());
        let timing = Timing::default();
        Core::new(
            process(me),
            Arc::new(membership),
            timing,
            Mistakes::default(),
        )
    }

    fn answer(coordinator: &mut Coordinator, core: &mut Core, from: u32) -> Option<Transition> {
        let reply = HeartbeatReply {
            generation: core.generation(),
            term: coordinator.term,
            number: coordinator.heartbeat,
            progress: false,
        };
        coordinator.heartbeat_reply(core, id(from), reply)
    }

    /// Returns the tick at which the coordinator changes its role, and how. At each tick, the members that `answers`
    /// names answer.
    fn run(
        coordinator: &mut Coordinator,
        core: &mut Core,
        answers: impl Fn(u64) -> Vec<u32>,
    ) -> (u64, Transition) {
        for tick in 1..100 {
            core.now = core.now.after(core.timing.heartbeat_interval);
            let mut next = coordinator.timeout(core);
            for from in answers(tick) {
                next = next.or_else(|| answer(coordinator, core, from));
            }
            if let Some(next) = next {
                return (tick, next);
            }
        }
        panic!("the coordinator stays the coordinator");
    }

    #[test]
    fn a_member_that_answers_again_is_reported_with_the_length_of_its_silence() {
        let (suspect, mut core) = (id(1), core(0, 2));
        let mut coordinator = Coordinator::of_generation(&mut core);
        while core.now < Time(2500 * MILLI) {
            core.now = core.now.after(core.timing.heartbeat_interval);
            coordinator.timeout(&mut core);
        }
        core.now = core.now.after(100 * MILLI);
        answer(&mut coordinator, &mut core, 1);
        let changes = core
            .events
            .iter()
            .filter(|event| matches!(event, Event::Suspected(..) | Event::Heard(..)));
        let expected = [
            Event::Suspected(suspect, 2000 * MILLI),
            Event::Heard(suspect, 2600 * MILLI),
        ];
        assert!(changes.eq(&expected), "{:?}", core.events);
    }

    #[test]
    fn an_adopted_proposal_waits_for_the_leases_of_those_that_it_leaves_out() {
        for last_answer in [0, 5] {
            let mut core = core(1, 4);
            let [proposer, follower, left_out] = [0, 2, 3].map(id);
            core.learn_end(&Ended {
                member: proposer,
                proof: Proof::Kernel,
                reduces_electorate: true,
            });
            let number = core.generation() + 1;
            let generation = Generation { number, proposer };
            let members = core.membership.members[1..3].to_vec();
            let proposal = Arc::new(Membership::new(generation, members, Vec::new()));
            let mut voter = self::core(2, 4);
            let first_term = voter.term;
            assert!(voter.accept(first_term, &proposal));
            let reports = [
                (follower, voter.report()),
                (left_out, self::core(3, 4).report()),
            ];
            let (round, coordinator) = (1, core.id());
            let term = Term { round, coordinator };
            core.term = term;
            let since = core.now;
            let mut coordinator = Coordinator::elected(&mut core, since, reports.into());
            assert!(coordinator.advance(&mut core).is_none());
            let accepted = Message::Accepted { term, generation };
            assert!(coordinator.message(&mut core, follower, accepted).is_none());
            let (tick, next) = run(&mut coordinator, &mut core, |tick| match tick {
                tick if tick <= last_answer => vec![3, 2],
                _ => vec![2],
            });
            let unanswered = tick - last_answer;
            assert_eq!(unanswered, core.timing.max_unanswered_heartbeats + 1);
            assert!(unanswered * core.timing.heartbeat_interval > core.timing.lease);
            let Transition::Enter(membership, _) = next else {
                panic!("{next:?}");
            };
            assert_eq!(membership, proposal);
        }
    }

    #[test]
    fn a_proposal_waits_for_a_silent_members_lease_also_if_the_majority_timeout_is_shorter() {
        let mut core = core(0, 3);
        core.timing.majority_timeout = 6000 * MILLI;
        let mut coordinator = Coordinator::of_generation(&mut core);
        let request = core.request_reconfigure(1000 * MILLI, false);
        for from in [1, 2] {
            let request = Message::Reconfigure(request);
            assert!(coordinator.message(&mut core, id(from), request).is_none());
        }
        let proposal = coordinator.proposal.as_ref().unwrap();
        let (term, generation) = (coordinator.term, proposal.membership.generation);
        let accepted = Message::Accepted { term, generation };
        assert!(coordinator.message(&mut core, id(1), accepted).is_none());
        let (tick, next) = run(&mut coordinator, &mut core, |_| vec![1]);
        assert!(matches!(next, Transition::Enter(..)), "{next:?}");
        assert!(tick * core.timing.heartbeat_interval > core.timing.majority_timeout);
    }

    #[test]
    fn a_coordinator_gives_up_without_a_majority_after_6_s_however_short_the_majority_timeout() {
        let mut core = core(0, 3);
        core.timing.majority_timeout = 6000 * MILLI;
        let mut coordinator = Coordinator::of_generation(&mut core);
        for lost in [1, 2] {
            assert!(coordinator.handle_link_lost(&mut core, id(lost)).is_none());
        }
        let (tick, next) = run(&mut coordinator, &mut core, |_| Vec::new());
        assert!(
            matches!(next, Transition::Exclude(Exclusion::NoMajority { .. })),
            "{next:?}"
        );
        assert_eq!(
            tick * core.timing.heartbeat_interval,
            2 * core.timing.confirm
        );
    }

    #[test]
    fn a_vote_from_before_this_term_does_not_hide_a_proposal_that_its_voter_has_accepted_since() {
        let [mut core, mut voter] = [core(1, 5), core(2, 5)];
        let (voter_id, old) = (voter.id(), voter.report());
        let (first_term, number) = (voter.term, voter.generation() + 1);
        let proposer = id(0);
        let generation = Generation { number, proposer };
        let members = core.membership.members.clone();
        let proposal = Arc::new(Membership::new(generation, members, Vec::new()));
        let (round, coordinator) = (1, core.id());
        core.term = Term { round, coordinator };
        let reports = [3, 4].map(|slot| (id(slot), self::core(slot, 5).report()));
        let since = core.now;
        let mut coordinator = Coordinator::elected(&mut core, since, reports.into());
        let vote = |term, report| Message::Vote {
            term,
            report: Box::new(report),
        };
        let before = core.links.pending(voter_id);
        coordinator.message(&mut core, voter.id(), vote(first_term, old));
        assert!(!coordinator.followers[&voter.id()].admitted);
        assert_eq!(
            core.links.pending(voter_id),
            before + 1,
            "it is asked again"
        );
        assert!(voter.accept(first_term, &proposal));
        voter.term = core.term;
        let asked = vote(voter.term, voter.report());
        coordinator.message(&mut core, voter.id(), asked);
        assert!(coordinator.followers[&voter.id()].admitted);
        let adopted = coordinator.proposal.unwrap();
        assert_eq!(adopted.membership, proposal);
    }
}

//! The machine of one process of a job.
//!
//! ```text
//! Joining ──active──▶ Following ──coordinator lost──▶ Waiting ──its turn──▶ Candidate ──a majority──▶ Leading
//!    Forming ──all are there──▶ Leading   ▲                │ ▲                  │                        │
//!                                         └──lead──────────┘ └────a later term──┴────────────────────────┘
//! any ──no majority, left behind, passed over──▶ Out          any ──leave──▶ Left
//! ```
//!
//! A coordinator is lost when its end is proven, its link is lost, it has left, or it leaves a request unanswered for
//! [`Timing::unresponsive`]. The first in line asks for votes at once, each further one [`Timing::stagger`] later.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::candidate::{Candidate, Outcome, no_majority};
use super::coordinator::{Coordinator, Transition};
use super::core::{Core, Event};
use super::forming::Forming;
use super::id::{Generation, MemberId, Membership, Peer, SharedMembership, Term, Time};
use super::link::{Connection, ConnectionRequest, LinkEvent, Links};
use super::log::{Entry, OperatorDecision};
use super::message::{
    Ended, Exclusion, Frame, Heartbeat, HeartbeatReply, JoinRole, Message, Proof, VoteRequest,
};
use super::mistake::{Mistake, Mistakes};
use super::timing::Timing;
use crate::departure::{Departure, Lost};

/// An input of a machine.
#[derive(Clone, Debug)]
pub enum Input {
    /// The driver has made the connection that it was asked for.
    Connected(MemberId, Connection),
    /// The driver could not connect.
    DialFailed(MemberId),
    /// A frame has arrived over a connection, made by either side.
    Frame(Connection, Frame),
    /// A connection has ended.
    Closed(Connection),
    /// A process has ended, as reported by its parent or the kernel.
    Ended(MemberId, Proof),
    /// The driver's evidence about an unreachable peer. Where the end of that peer is not proven, the coordinator reports
    /// the latest evidence that is newer than the peer's last message. Texts in it are clean already, as after a way over the wire.
    Evidence(MemberId, Lost),
    /// An operation of NCCL with the other members has made progress.
    Progress,
    /// A command of the program.
    Command(Command),
}

/// A command of the program.
#[derive(Clone, Debug)]
pub enum Command {
    /// Sends a message to all members, in one order.
    Broadcast {
        /// The topic.
        topic: String,
        /// The content.
        bytes: Vec<u8>,
    },
    /// Sends a message to one member.
    SendDirect {
        /// The receiver.
        to: MemberId,
        /// The content.
        bytes: Vec<u8>,
    },
    /// Sends a request to the coordinator's program, which may be this process's. Lost with the coordinator, and dropped while there is
    /// none: the program has to repeat it at [`Event::Coordinator`].
    Request(Arc<[u8]>),
    /// Replies from the coordinator's program to one process. Dropped if this one neither coordinates nor forms the first generation.
    Reply {
        /// The receiver.
        to: MemberId,
        /// The content.
        bytes: Arc<[u8]>,
    },
    /// The last call of a member's program, as reported to the coordinator's: included in the report of its loss.
    Called(MemberId, String),
    /// Gives up the first generation: all that have joined and that join later receive this, and take part no more.
    AbortFormation(Arc<[u8]>),
    /// Asks to go on to the next generation.
    Reconfigure {
        /// How long this is valid, in nanoseconds.
        timeout: u64,
        /// Whether to go on without the members that do not come in time, if all agree.
        leaves_behind: bool,
    },
    /// Withdraws the request to go on to go on.
    CancelReconfigure,
    /// Goes on into no successor, for good. Others need not wait for this member, which stays a voter until they have gone
    /// on without it. A later request to go on fails at once.
    Abstain,
    /// Leaves, or fails.
    Leave(Departure),
    /// The operator's decision.
    OperatorDecision(OperatorDecision),
    /// The claim for this generation was won.
    Claimed(Generation),
}

/// An output of a machine for its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// A request of the links.
    Connection(ConnectionRequest),
    /// An event for the program.
    Event(Event),
}

/// The role in which a process joins a job.
#[derive(Clone, Debug)]
pub enum StartRole {
    /// It coordinates the first generation, which has this number and so many members.
    First {
        /// The generation.
        number: u64,
        /// The number of ranks. Their slots are below that.
        size: u32,
        /// The number of witnesses. Their slots are not below `size`.
        witnesses: u32,
    },
    /// It is a member of the first generation, whose coordinator listens at `at`.
    Rank {
        /// The generation.
        number: u64,
        /// The coordinator's address.
        at: String,
    },
    /// It votes in the first generation and has no rank. Its slot is not below the number of ranks.
    Witness {
        /// The generation.
        number: u64,
        /// The coordinator's address.
        at: String,
    },
    /// It tells the ranks of the first generation that it will not come, and why, and leaves.
    Absent {
        /// The generation.
        number: u64,
        /// The coordinator's address.
        at: String,
        /// The reason.
        why: Departure,
    },
    /// It asks to join the next generation, at one of these addresses.
    Joiner {
        /// The addresses at which to look for the coordinator.
        at: Vec<String>,
    },
}

#[derive(Debug)]
enum Role {
    Joining(Joining),
    Forming(Forming),
    /// When the coordinator was last heard, and when it was last asked whether it still coordinates.
    Following {
        heard: Time,
        asked: Time,
    },
    Waiting(Waiting),
    Candidate(Candidate),
    Leading(Box<Coordinator>),
    Excluded,
    Left,
}

#[derive(Debug)]
struct Joining {
    at: Vec<String>,
    role: JoinRole,
    tries: u32,
    /// The process that was asked.
    asked: MemberId,
    /// Since when it gives up, and waits until the processes that it has asked know that.
    gives_up: Option<Time>,
}

/// For how long a process that gives up joining waits until that is known, in nanoseconds.
const LEAVE_TIMEOUT: u64 = 1_000_000_000;

/// The state without a coordinator.
#[derive(Debug)]
struct Waiting {
    turn: Time,
    /// Whether the coordinator left requests unanswered.
    unresponsive: bool,
    /// Until when its vote binds.
    bound: Time,
}

/// The machine of a process; see the module.
#[derive(Debug)]
pub struct Member {
    core: Core,
    role: Role,
}

impl Member {
    /// Makes a machine; `me` is its identity for the others.
    #[must_use]
    pub fn new(me: Peer, role: StartRole, timing: Timing, mistakes: Mistakes, now: Time) -> Self {
        let number = match &role {
            StartRole::First { number, .. }
            | StartRole::Rank { number, .. }
            | StartRole::Witness { number, .. }
            | StartRole::Absent { number, .. } => *number,
            StartRole::Joiner { .. } => 0,
        };
        let proposer = me.id;
        let nobody = Membership::new(Generation { number, proposer }, Vec::new(), Vec::new());
        let mut core = Core::new(me, Arc::new(nobody), timing, mistakes);
        core.now = now;
        let joining = |at, role| {
            Role::Joining(Joining {
                at,
                role,
                tries: 0,
                asked: Links::placeholder_id(0),
                gives_up: None,
            })
        };
        let absent = match &role {
            StartRole::Absent { why, .. } => Some(why.clone()),
            _ => None,
        };
        let role = match role {
            StartRole::First {
                size, witnesses, ..
            } => Role::Forming(Forming::new(&core.me, size, witnesses)),
            StartRole::Rank { at, .. } => joining(vec![at], JoinRole::Rank),
            StartRole::Witness { at, .. } => joining(vec![at], JoinRole::Witness),
            StartRole::Joiner { at } => joining(at, JoinRole::Joiner),
            StartRole::Absent { at, .. } => joining(vec![at], JoinRole::Absent),
        };
        let mut this = Self { core, role };
        match &mut this.role {
            Role::Joining(joining) => joining.ask(&mut this.core),
            _ => this.form(),
        }
        if let Some(why) = absent {
            this.command(Command::Leave(why));
        }
        this
    }

    /// Returns the next output.
    pub fn poll(&mut self) -> Option<Output> {
        let event = self.core.events.pop_front().map(Output::Event);
        event.or_else(|| self.core.links.poll().map(Output::Connection))
    }

    /// Returns the membership of this process's generation.
    #[must_use]
    pub fn membership(&self) -> &SharedMembership {
        &self.core.membership
    }

    /// Returns the coordinator, as far as this process knows.
    #[must_use]
    pub fn coordinator(&self) -> MemberId {
        self.core.term.leader
    }

    /// Whether this process coordinates.
    #[must_use]
    pub fn leads(&self) -> bool {
        matches!(self.role, Role::Leading(_))
    }

    /// Returns the connection that carries the link with a process, if there is one.
    #[must_use]
    pub fn connection_of(&self, id: MemberId) -> Option<Connection> {
        self.core.links.connection_of(id)
    }

    /// Returns the observers, as far as this process knows.
    #[must_use]
    pub fn observers(&self) -> Vec<MemberId> {
        self.core.observers.keys().copied().collect()
    }

    /// Returns the process whose link a connection carries, if any.
    #[must_use]
    pub fn peer_of(&self, connection: Connection) -> Option<MemberId> {
        self.core.links.peer_of(connection)
    }

    /// Whether it coordinates or follows a coordinator: requests of its program are not dropped.
    #[must_use]
    pub fn is_led(&self) -> bool {
        matches!(self.role, Role::Following { .. } | Role::Leading(_))
    }

    /// Returns for how many nanoseconds each of the other members has not been heard, if this process coordinates.
    #[must_use]
    pub fn ages(&self, now: Time) -> Vec<(MemberId, u64)> {
        match &self.role {
            Role::Leading(coordinator) => coordinator.ages(now),
            _ => Vec::new(),
        }
    }

    /// Returns the process that has joined with that slot, while this process forms the first generation.
    #[must_use]
    pub fn joined(&self, slot: u32) -> Option<&Peer> {
        match &self.role {
            Role::Forming(forming) => forming.joined(slot),
            _ => None,
        }
    }

    /// Whether no generation exists without this process, as far as it can know: a majority has answered within
    /// [`Timing::lease`].
    #[must_use]
    pub fn holds_lease(&self, now: Time) -> bool {
        self.core.is_current_at(now)
    }

    /// Whether all its messages to others have arrived.
    #[must_use]
    pub fn is_flushed(&self) -> bool {
        self.core.links.all_flushed()
    }

    /// Whether a large message is still on its way.
    #[must_use]
    pub fn sends_large(&self) -> bool {
        self.core.links.sends_large()
    }

    /// Whether it removes an ended process from the voters of its generation.
    #[must_use]
    pub fn counts_end_of(&self, member: MemberId) -> bool {
        let known = self.core.ended.get(&member);
        known.is_some_and(|known| known.counts)
    }

    /// Whether it is neither looking for a coordinator nor waiting for an answer.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        match &self.role {
            Role::Excluded | Role::Left => true,
            Role::Following { .. } | Role::Leading(_) => !self.core.awaits_coordinator(),
            Role::Joining(_) | Role::Forming(_) | Role::Waiting(_) | Role::Candidate(_) => false,
        }
    }

    /// Returns about how many bytes it has of its own, without the memberships that it shares.
    #[must_use]
    pub fn size(&self) -> usize {
        let followers = match &self.role {
            Role::Leading(coordinator) => coordinator.size(),
            _ => 0,
        };
        size_of::<Self>() + self.core.size() + followers
    }

    /// Returns how many entries it has received in this generation.
    #[must_use]
    pub fn heard(&self) -> u64 {
        self.core.log.end()
    }

    /// Whether it is not yet a member.
    #[must_use]
    pub fn is_joining(&self) -> bool {
        matches!(self.role, Role::Joining(_) | Role::Forming(_))
    }

    /// Whether it takes part.
    #[must_use]
    pub fn is_in(&self) -> bool {
        !matches!(self.role, Role::Excluded | Role::Left)
    }

    /// Handles one input with all its consequences.
    pub fn handle(&mut self, now: Time, input: Input) {
        self.core.now = now;
        match input {
            Input::Connected(peer, connection) => self.core.links.connected(now, peer, connection),
            Input::DialFailed(peer) => {
                self.core.links.dial_failed(now, peer);
                self.settle();
            }
            Input::Frame(connection, frame) => self.core.links.received(now, connection, frame),
            Input::Closed(connection) => {
                self.core.links.closed(now, connection);
                self.settle();
            }
            Input::Ended(member, proof) if self.is_in() => self.ended(member, proof),
            Input::Ended(..) => {}
            Input::Evidence(member, lost) => {
                if !self.core.has_ended(member) {
                    self.core.evidence.insert(member, (now, lost));
                }
            }
            Input::Progress => {
                self.core.progress = Some(now);
                self.core.has_progressed = true;
            }
            Input::Command(command) => self.command(command),
        }
        self.drain();
        self.finish_joining();
    }

    /// Ends a process that gives up joining, once that is known.
    fn finish_joining(&mut self) {
        if let Role::Joining(joining) = &self.role
            && let Some(since) = joining.gives_up
        {
            let links = &self.core.links;
            let is_vain = !matches!(joining.role, JoinRole::Absent) && !links.any_ready();
            let is_known = links.all_flushed() || is_vain;
            if is_known || self.core.now.since(since) >= LEAVE_TIMEOUT {
                self.transition(Some(Transition::Left));
            }
        }
    }

    /// Returns when to call [`handle_timeout`](Self::handle_timeout) at the latest.
    #[must_use]
    pub fn next_timeout(&self) -> Time {
        let core = &self.core;
        let role = match &self.role {
            Role::Joining(joining) => match joining.gives_up {
                Some(since) => since.after(LEAVE_TIMEOUT),
                None => Time::NEVER,
            },
            Role::Forming(_) | Role::Excluded => Time::NEVER,
            Role::Left => return Time::NEVER,
            Role::Following { heard, asked } => (*heard.max(asked)).after(core.timing.unresponsive),
            Role::Waiting(waiting) => match core.gives_up_at() {
                Some(at) if at > core.now => waiting.turn.min(at),
                _ => waiting.turn,
            },
            Role::Candidate(candidate) => candidate.next_timeout(core),
            Role::Leading(coordinator) => coordinator.next_timeout(core),
        };
        role.min(core.links.next_timeout())
    }

    /// Handles what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        self.core.now = now;
        self.core.links.handle_timeout(now);
        self.drain();
        match &mut self.role {
            Role::Following { heard, asked } => {
                let due = (*heard.max(asked)).after(self.core.timing.unresponsive);
                let is_unresponsive = now >= due;
                if is_unresponsive && now.since(due) > self.core.timing.heartbeat_interval {
                    // This process itself was delayed.
                    *asked = now;
                } else if is_unresponsive && self.core.awaits_coordinator() {
                    self.coordinator_lost(true);
                } else if is_unresponsive {
                    // The coordinator may follow another by now.
                    *asked = now;
                    self.follow_leader(self.core.synced);
                }
            }
            Role::Waiting(waiting) if now >= waiting.turn || self.core.gives_up() => {
                let unresponsive = waiting.unresponsive;
                if self.core.gives_up() {
                    let why = no_majority(&self.core, &BTreeSet::new());
                    self.exclude(why);
                } else if self.core.is_witness() {
                    self.look_for_coordinator();
                } else {
                    self.role =
                        Role::Candidate(Candidate::start(&mut self.core, unresponsive, false));
                    self.settle();
                }
            }
            Role::Leading(coordinator) => {
                let next = coordinator.timeout(&mut self.core);
                self.transition(next);
            }
            Role::Candidate(_) => self.settle(),
            _ => {}
        }
        self.drain();
        self.finish_joining();
    }

    fn drain(&mut self) {
        while let Some(event) = self.core.links.next_event() {
            match event {
                LinkEvent::Up => self.settle(),
                LinkEvent::Resumed(peer, outage) => {
                    self.core.events.push_back(Event::Resumed(peer, outage));
                    self.settle();
                }
                LinkEvent::Lost(peer) => self.lost(peer),
                LinkEvent::Renewed(peer) => self.renewed(peer),
                LinkEvent::Received {
                    from,
                    generation,
                    message,
                } => self.message(from, generation, message),
                LinkEvent::Heartbeat(from, heartbeat) => self.heartbeat(from, &heartbeat),
                LinkEvent::HeartbeatReply(from, heartbeat_reply) => {
                    if let Role::Leading(coordinator) = &mut self.role {
                        let next =
                            coordinator.heartbeat_reply(&mut self.core, from, heartbeat_reply);
                        self.transition(next);
                    }
                }
            }
        }
    }

    /// Does what has become possible in this role.
    fn settle(&mut self) {
        match &mut self.role {
            Role::Candidate(candidate) => match candidate.settle(&mut self.core) {
                Some(Outcome::Leads(mut coordinator)) => {
                    let next = match self.core.leaving.clone() {
                        Some(departure) => coordinator.leave(&mut self.core, departure),
                        None => coordinator.settle(&mut self.core),
                    };
                    self.role = Role::Leading(coordinator);
                    self.transition(next);
                }
                Some(Outcome::Stops(next)) => self.transition(Some(next)),
                Some(Outcome::Waits) => self.wait_for_others(),
                None => {}
            },
            Role::Leading(coordinator) => {
                let next = coordinator.settle(&mut self.core);
                self.transition(next);
            }
            _ => {}
        }
    }

    fn transition(&mut self, next: Option<Transition>) {
        match next {
            None => {}
            Some(Transition::Enter(membership, lease)) => self.enter(membership, lease, None),
            Some(Transition::Exclude(why)) => self.exclude(why),
            Some(Transition::Follow(term)) => self.follow(term),
            Some(Transition::LeadLaterTerm(term)) => {
                self.core.term = self.core.term.max(term);
                self.role = Role::Candidate(Candidate::start(&mut self.core, false, true));
                self.settle();
            }
            Some(Transition::Left) => {
                self.role = Role::Left;
                self.core.links.close_all();
                self.core.events.push_back(Event::Left);
            }
        }
    }

    fn exclude(&mut self, why: Exclusion) {
        if self.is_in() {
            self.role = Role::Excluded;
            let (generation, message) = self.core.exclusion_message(false, 0);
            self.core.links.send_all(generation, &message);
            // Others have named this process in the generation to which it does not come.
            let (me, ahead) = (self.core.id(), self.core.ahead.as_ref());
            if let Some(ahead) = ahead.filter(|ahead| ahead.votes(me)) {
                let (generation, message) =
                    self.core.exclusion_message(true, ahead.generation.number);
                self.core.links.send_all(generation, &message);
            }
            self.core.links.close_all();
            self.core.events.push_back(Event::Excluded(why));
        }
    }

    /// Enters an active generation, active since `lease` at the earliest, as reported by `by`.
    fn enter(&mut self, membership: SharedMembership, lease: Time, by: Option<MemberId>) {
        // A member that abstains may have wished to go on before, and been named.
        if !membership.votes(self.core.id()) || self.core.abstains {
            let generation = membership.generation;
            self.core.ahead = Some(membership);
            return self.exclude(Exclusion::LeftBehind(generation));
        }
        self.core.enter(membership, lease);
        let proposer = self.core.membership.generation.proposer;
        if proposer == self.core.id() {
            let mut coordinator = Coordinator::of_generation(&mut self.core);
            let next = match self.core.leaving.clone() {
                Some(departure) => coordinator.leave(&mut self.core, departure),
                None => coordinator.settle(&mut self.core),
            };
            self.role = Role::Leading(Box::new(coordinator));
            return self.transition(next);
        }
        self.core.events.push_back(Event::Coordinator(proposer));
        self.core.links.keep(proposer, true);
        self.redirect_observers();
        for ended in self.core.ends() {
            self.core.send(proposer, Message::ReportEnd(ended));
        }
        self.core.send_leave(proposer);
        self.role = Role::Following {
            heard: self.core.now,
            asked: self.core.now,
        };
        if self.core.has_ended(proposer) {
            self.coordinator_lost(false);
        } else if by != Some(proposer) {
            // The new coordinator's first messages may have come before this.
            self.follow(self.core.term);
        }
    }

    /// Asks to follow another member, which coordinates in a later term.
    fn follow(&mut self, term: Term) {
        if term.leader == self.core.id() {
            return;
        }
        self.core.term = self.core.term.max(term);
        self.wait_for_others();
        let report = Box::new(self.core.report());
        self.core.reach(term.leader, Message::Vote { term, report });
    }

    /// Handles the loss of the coordinator.
    fn coordinator_lost(&mut self, unresponsive: bool) {
        let leader = self.core.synced.leader;
        // A leaving coordinator waits for that.
        self.core.links.acknowledge(leader);
        self.core.links.keep(leader, false);
        self.wait(unresponsive);
        if let Role::Waiting(waiting) = &self.role
            && waiting.turn <= self.core.now
            && !self.core.is_witness()
        {
            self.role = Role::Candidate(Candidate::start(&mut self.core, unresponsive, false));
            self.settle();
        } else if let Some(ended) = self.core.end_of(leader) {
            // The first in line may be on a host where that is not known.
            if let Some(first) = self.failover_order().first().copied() {
                self.core.reach(first, Message::ReportEnd(ended));
            }
        }
    }

    /// Waits for its turn in a failover.
    fn wait(&mut self, unresponsive: bool) {
        let me = self.core.id();
        let line = self.failover_order();
        let place = match line.iter().position(|id| *id == me) {
            Some(_) if self.core.abstains || self.core.sent_leave => line.len(),
            Some(place) => place,
            // A witness asks the coordinator that the others have by then.
            None => usize::from(self.core.is_witness()),
        };
        let turn = self.core.now.after(place as u64 * self.core.timing.stagger);
        let bound = Time::default();
        self.core.lost.get_or_insert(self.core.now);
        self.role = Role::Waiting(Waiting {
            turn,
            unresponsive,
            bound,
        });
    }

    /// Looks for the coordinator of a witness, which does not coordinate itself: it asks one member after the other, beginning with the
    /// one that it has voted for.
    fn look_for_coordinator(&mut self) {
        let core = &self.core;
        let waited = core.lost.map_or(0, |since| core.now.since(since)) / core.timing.stagger;
        let promised = Some(core.term.leader).filter(|id| !core.is_departed(*id));
        let line: Vec<_> = promised.into_iter().chain(self.failover_order()).collect();
        if let Some(asked) = line.get(waited as usize % line.len().max(1)).copied() {
            let (term, report) = (self.core.term, Box::new(self.core.report()));
            self.core.reach(asked, Message::Vote { term, report });
        }
        let turn = self.core.now.after(self.core.timing.stagger);
        if let Role::Waiting(waiting) = &mut self.role {
            waiting.turn = turn;
        }
    }

    /// As [`wait`](Self::wait), and longer than a vote binds.
    fn wait_for_others(&mut self) {
        self.wait(false);
        let hold = self.core.timing.hold;
        if let Role::Waiting(waiting) = &mut self.role {
            waiting.turn = waiting.turn.after(hold);
        }
    }

    /// Returns the members that may take over, in their order. If the coordinator's host is out of reach, the members of that host
    /// are last for the others.
    fn failover_order(&self) -> Vec<MemberId> {
        let core = &self.core;
        let lost = core.synced.leader;
        let kernel = core.membership.peer(lost).map_or(0, |peer| peer.kernel);
        let is_beside = |peer: &Peer| {
            kernel != 0
                && peer.kernel == kernel
                && core.me.kernel != kernel
                && !core.has_ended(lost)
        };
        let members = core.membership.members.iter();
        let mut line: Vec<_> = members
            .filter(|peer| peer.id != lost && !core.is_departed(peer.id))
            .collect();
        line.sort_by_key(|peer| is_beside(peer));
        line.into_iter().map(|peer| peer.id).collect()
    }

    fn ended(&mut self, member: MemberId, proof: Proof) {
        if matches!(self.role, Role::Forming(_)) {
            self.core.links.close(member);
            return self.join_revoked(member, |_, peer| proof.departure(peer.pid));
        }
        let counts = self.core.is_current();
        self.handle_proven_end(Ended {
            member,
            proof,
            counts,
        });
    }

    fn handle_proven_end(&mut self, ended: Ended) {
        let member = ended.member;
        if let Role::Leading(coordinator) = &mut self.role {
            coordinator.end_is_known(&mut self.core, &ended);
            return self.settle();
        }
        let is_new = self.core.learn_end(&ended);
        match &self.role {
            Role::Following { .. } if self.core.synced.leader == member => {
                self.coordinator_lost(false)
            }
            Role::Following { .. } if is_new => {
                let leader = self.core.synced.leader;
                self.core.send(leader, Message::ReportEnd(ended));
            }
            Role::Waiting(_) if is_new && !self.is_bound() => self.wait(false),
            Role::Waiting(_) => {}
            _ => self.settle(),
        }
    }

    /// Whether its vote still binds.
    fn is_bound(&self) -> bool {
        let Role::Waiting(waiting) = &self.role else {
            return false;
        };
        self.core.now < waiting.bound && !self.core.has_ended(self.core.term.leader)
    }

    fn lost(&mut self, peer: MemberId) {
        self.core.observers.remove(&peer);
        match &mut self.role {
            Role::Leading(coordinator) => {
                let next = coordinator.lost(&mut self.core, peer);
                self.transition(next);
            }
            Role::Following { .. } if peer == self.core.synced.leader => {
                if self.core.mistakes.makes(Mistake::ClosedIsDead) {
                    let (member, proof, counts) = (peer, Proof::Kernel, true);
                    self.core.learn_end(&Ended {
                        member,
                        proof,
                        counts,
                    });
                }
                self.coordinator_lost(false);
            }
            Role::Joining(joining) if joining.gives_up.is_none() => joining.ask(&mut self.core),
            Role::Forming(_) => {
                let resume = self.core.timing.resume;
                let heard = Time(self.core.now.0.saturating_sub(2 * resume));
                self.join_revoked(peer, |core, _| core.unreachable(peer, heard, resume));
            }
            _ => self.settle(),
        }
    }

    /// Handles the end of a process that may have joined, before the first generation is active.
    fn join_revoked(&mut self, id: MemberId, why: impl FnOnce(&Core, &Peer) -> Departure) {
        if let Role::Forming(forming) = &mut self.role
            && let Some(peer) = forming.remove(id)
        {
            let departure = why(&self.core, &peer);
            self.core
                .events
                .push_back(Event::JoinRevoked(id.slot, departure));
        }
    }

    fn renewed(&mut self, peer: MemberId) {
        match &mut self.role {
            Role::Leading(coordinator) => {
                let next = coordinator.renewed(&mut self.core, peer);
                self.transition(next);
            }
            Role::Following { .. } if peer == self.core.synced.leader => {
                self.follow(self.core.synced);
            }
            _ => self.settle(),
        }
    }

    fn heartbeat(&mut self, from: MemberId, heartbeat: &Heartbeat) {
        let own = self.core.generation();
        if self.is_joining() {
            // The message overtakes the one that makes this process a member.
            return;
        }
        if !self.is_in() {
            return self.core.send_exclusion(from, heartbeat.generation);
        }
        if heartbeat.generation != own {
            if heartbeat.generation < own {
                self.send_ahead(from);
            }
            return;
        }
        if heartbeat.term != self.core.term || self.core.synced != heartbeat.term {
            if heartbeat.term < self.core.term {
                let (term, leads) = (self.core.term, self.core.synced == self.core.term);
                self.core.send(from, Message::Follows { term, leads });
            }
            return;
        }
        if let Role::Following { heard, .. } = &mut self.role {
            *heard = self.core.now;
            self.core.handle_heartbeat(heartbeat);
            let heartbeat_reply = HeartbeatReply {
                generation: own,
                term: heartbeat.term,
                number: heartbeat.number,
                progress: std::mem::take(&mut self.core.has_progressed),
            };
            self.core
                .links
                .send_now(from, Frame::HeartbeatReply(heartbeat_reply));
        }
    }

    fn send_ahead(&mut self, to: MemberId) {
        let membership = Arc::clone(&self.core.membership);
        self.core.send(to, Message::NewerGeneration(membership));
    }

    fn message(&mut self, from: MemberId, generation: u64, message: Message) {
        match message {
            Message::Activate {
                membership,
                accepted,
            } if self.is_in() => return self.activated(from, membership, accepted),
            Message::NewerGeneration(membership) => return self.ahead(membership),
            Message::Redirect(peer) => {
                if let Role::Joining(joining) = &mut self.role {
                    joining.redirect(&mut self.core, &peer);
                }
                return;
            }
            Message::Join { .. } | Message::Observe(_) if self.core.dismissed.is_some() => {
                let bytes = self.core.dismissed.clone().unwrap_or_default();
                self.core.events.push_back(Event::Joined(from));
                return self.core.send(from, Message::FormationAborted(bytes));
            }
            Message::Join { peer, role } => return self.join(from, peer, role),
            Message::Observe(peer) => return self.observe(from, peer),
            Message::FormationAborted(bytes) => {
                if matches!(self.role, Role::Joining(_)) {
                    self.role = Role::Excluded;
                    self.core.links.acknowledge(from);
                    self.core.links.close_all();
                    self.core.events.push_back(Event::FormationAborted(bytes));
                }
                return;
            }
            Message::UnknownGeneration if self.is_in() => {
                if let Role::Leading(coordinator) = &mut self.role {
                    coordinator.is_behind(&mut self.core, from);
                } else {
                    self.send_ahead(from);
                }
                return;
            }
            Message::Propose { term, membership } if matches!(self.role, Role::Joining(_)) => {
                if self.core.leaving.is_some() {
                    return;
                }
                let generation = membership.generation;
                self.core.consented = self.core.now;
                return self.core.send(from, Message::Accepted { term, generation });
            }
            _ => {}
        }
        if !self.is_in() {
            if matches!(
                message,
                Message::RequestVote(_)
                    | Message::Append { .. }
                    | Message::Activate { .. }
                    | Message::Propose { .. }
            ) {
                self.core.send_exclusion(from, generation);
            }
            return;
        }
        let own = self.core.generation();
        // A process that takes part no more does not come to a later generation either, and a joiner has none yet.
        let is_of_any = matches!(message, Message::Leave(_) | Message::Accepted { .. });
        if generation < own && !is_of_any {
            return self.send_ahead(from);
        }
        if generation > own {
            if !matches!(message, Message::Reject(_) | Message::Leave(_)) {
                self.core.send(from, Message::UnknownGeneration);
            }
            return;
        }
        match message {
            Message::RequestVote(request_votes) => self.handle_vote_request(from, request_votes),
            Message::ReportEnd(ended) if !matches!(self.role, Role::Leading(_)) => {
                self.handle_proven_end(ended)
            }
            message => self.message_in_role(from, message),
        }
    }

    #[expect(
        clippy::collapsible_match,
        reason = "guards that change something would be overlooked"
    )]
    fn message_in_role(&mut self, from: MemberId, message: Message) {
        match (&mut self.role, message) {
            (
                Role::Leading(_),
                Message::SyncLog {
                    term,
                    start,
                    entries,
                },
            ) if term > self.core.term => {
                self.sync_log(from, term, start, entries);
            }
            (Role::Leading(coordinator), message) => {
                let next = coordinator.message(&mut self.core, from, message);
                self.transition(next);
            }
            (Role::Candidate(candidate), Message::Vote { term, report }) => {
                candidate.vote(&mut self.core, from, term, *report);
                self.settle();
            }
            (Role::Forming(_), Message::Leave(departure)) => {
                self.core.links.acknowledge(from);
                self.core.links.keep(from, false);
                let observes = self.core.observers.remove(&from).is_some();
                if let Role::Forming(forming) = &self.role
                    && !observes
                    && forming.joined(from.slot).is_none()
                {
                    // It has come only to report that it will not join.
                    self.core
                        .events
                        .push_back(Event::JoinRevoked(from.slot, departure));
                } else {
                    self.join_revoked(from, |_, _| departure);
                }
            }
            (Role::Forming(_), Message::Request(bytes))
                if self.core.observers.contains_key(&from) =>
            {
                self.core.events.push_back(Event::Request(from, bytes));
            }
            (_, Message::Leave(_)) if !self.core.membership.votes(from) => {
                self.core.observers.remove(&from);
                self.core.links.acknowledge(from);
                self.core.links.keep(from, false);
            }
            (
                Role::Following { .. } | Role::Waiting(_) | Role::Candidate(_),
                Message::Leave(departure),
            ) => {
                let proof = Proof::Leave(departure);
                let (member, counts) = (from, true);
                self.handle_proven_end(Ended {
                    member,
                    proof,
                    counts,
                });
            }
            (Role::Candidate(candidate), Message::Follows { term, leads }) => {
                if leads && !self.core.is_departed(term.leader) {
                    // That process coordinates: it decides whether this member follows.
                    self.follow_leader(term);
                } else if term > candidate.term() && candidate.overtaken(&mut self.core, term) {
                    self.wait_for_others();
                }
            }
            (
                _,
                Message::SyncLog {
                    term,
                    start,
                    entries,
                },
            ) => self.sync_log(from, term, start, entries),
            (Role::Following { heard, .. }, Message::Append { term, at, entry }) => {
                if term == self.core.synced {
                    *heard = self.core.now;
                    self.appended(at, entry);
                }
            }
            (Role::Following { .. }, Message::CutOff { term, why }) if term == self.core.synced => {
                self.exclude(why)
            }
            (Role::Waiting(_), Message::CutOff { term, why }) if term == self.core.term => {
                self.exclude(why)
            }
            (Role::Following { .. }, Message::Propose { term, membership }) => {
                if self.core.accept(term, &membership) {
                    let generation = membership.generation;
                    self.core.send(from, Message::Accepted { term, generation });
                }
            }
            (
                Role::Following { .. },
                Message::ReconfigureFailed {
                    reconfigure_request,
                    missing,
                },
            ) => {
                if self
                    .core
                    .reconfigure_request
                    .take_if(|(own, _)| own.number == reconfigure_request)
                    .is_some()
                {
                    self.core
                        .events
                        .push_back(Event::ReconfigureFailed(missing));
                }
            }
            (Role::Following { .. }, Message::LeaveBehind) => {
                // A request to go on on its way counts as one that has arrived.
                if self.core.reconfigure_request.is_none() {
                    self.core.send(from, Message::Released);
                    let generation = Generation {
                        number: self.core.generation() + 1,
                        proposer: from,
                    };
                    self.exclude(Exclusion::LeftBehind(generation));
                }
            }
            (
                Role::Following { .. } | Role::Waiting(_) | Role::Candidate(_),
                Message::Reject(why),
            ) => {
                self.exclude(why);
            }
            (Role::Following { .. }, Message::Follows { term, leads: true }) => {
                if term > self.core.synced {
                    self.follow(term);
                }
            }
            (Role::Waiting(_), Message::Follows { term, leads: true })
                if !self.core.is_departed(term.leader) =>
            {
                self.follow_leader(term);
            }
            (Role::Following { .. } | Role::Waiting(_), Message::Vote { .. }) => {
                let leads = matches!(self.role, Role::Following { .. });
                let term = self.core.term;
                self.core.send(from, Message::Follows { term, leads });
            }
            (Role::Following { .. }, Message::Direct { from, bytes, .. }) => {
                self.core.events.push_back(Event::Direct(from, bytes));
            }
            (Role::Following { .. }, Message::Reply(bytes)) if from == self.core.synced.leader => {
                self.core.events.push_back(Event::Reply(bytes));
            }
            (
                Role::Following { .. } | Role::Waiting(_) | Role::Candidate(_),
                Message::OperatorDecision(word),
            ) => self.operator(word),
            _ => {}
        }
    }

    /// Asks the coordinator of this term to let this member follow, and waits for others meanwhile.
    fn follow_leader(&mut self, term: Term) {
        if term.leader != self.core.id() {
            let report = Box::new(self.core.report());
            self.core.reach(term.leader, Message::Vote { term, report });
        }
    }

    fn activated(&mut self, by: MemberId, membership: SharedMembership, accepted: bool) {
        let is_next = match self.role {
            Role::Joining(_) => true,
            _ => membership.generation.number > self.core.generation() && self.is_in(),
        };
        if is_next {
            // The generation became active after this process had agreed to it, so none existed without it before.
            let lease = if accepted {
                self.core.consented
            } else {
                Time::default()
            };
            self.enter(membership, lease, Some(by));
        }
    }

    fn ahead(&mut self, membership: SharedMembership) {
        let is_later = membership.generation.number > self.core.generation();
        let is_mine = match self.role {
            Role::Joining(_) => membership.votes(self.core.id()),
            _ => is_later && self.is_in(),
        };
        if is_mine {
            self.enter(membership, Time::default(), None);
        }
    }

    fn join(&mut self, from: MemberId, peer: Peer, role: JoinRole) {
        match (&mut self.role, role) {
            (Role::Forming(_), JoinRole::Absent) => self.core.links.keep(from, true),
            (Role::Forming(forming), role) if peer.id == from => match forming.join(peer, role) {
                Some(is_new) => {
                    self.core.links.keep(from, true);
                    if is_new {
                        self.core.events.push_back(Event::Joined(from));
                    }
                    self.form();
                }
                None => self.core.links.close(from),
            },
            (Role::Leading(coordinator), JoinRole::Joiner) => {
                let next = coordinator.message(&mut self.core, from, Message::Join { peer, role });
                self.transition(next);
            }
            (Role::Following { .. }, JoinRole::Joiner) => self.redirect(from),
            // It tries again elsewhere.
            _ => self.core.links.close(from),
        }
    }

    /// Handles a process that is no member and wants to observe.
    fn observe(&mut self, from: MemberId, peer: Peer) {
        match &mut self.role {
            Role::Leading(coordinator) => {
                let next = coordinator.message(&mut self.core, from, Message::Observe(peer));
                self.transition(next);
            }
            // It is told when another coordinates, which may be this member: the coordinator may have ended a moment ago.
            Role::Following { .. } => {
                self.redirect(from);
                self.core.links.keep(from, true);
                self.core.observers.insert(from, peer);
            }
            Role::Waiting(_) | Role::Candidate(_) => {
                // The observer may have an operator's decision for these members, who have no coordinator without it.
                self.send_ahead(from);
                let (term, leads) = (self.core.term, false);
                self.core.send(from, Message::Follows { term, leads });
                self.core.links.keep(from, true);
                self.core.observers.insert(from, peer);
            }
            Role::Forming(_) => {
                self.core.links.keep(from, true);
                self.core.observers.insert(from, peer);
                let generation = self.core.generation();
                self.core.send(from, Message::Forming(generation));
            }
            Role::Joining(_) => self.core.links.close(from),
            Role::Excluded | Role::Left => self.core.send_exclusion(from, u64::MAX),
        }
    }

    /// Refers the observers of this member to the member that coordinates now.
    fn redirect_observers(&mut self) {
        for id in std::mem::take(&mut self.core.observers).into_keys() {
            self.redirect(id);
            self.core.links.keep(id, false);
        }
    }

    /// Refers a process to the coordinator.
    fn redirect(&mut self, to: MemberId) {
        let leader = self.core.synced.leader;
        if let Some(peer) = self.core.membership.peer(leader).cloned() {
            self.core.send(to, Message::Redirect(peer));
        }
    }

    /// Activates the first generation when all are there.
    fn form(&mut self) {
        let Role::Forming(forming) = &mut self.role else {
            return;
        };
        let generation = self.core.membership.generation;
        let Some(membership) = forming.complete(generation) else {
            return;
        };
        let membership = Arc::new(membership);
        let me = self.core.id();
        for peer in membership.voters().filter(|peer| peer.id != me) {
            let (now, number) = (self.core.now, generation.number);
            self.core.links.open(now, peer.id, &peer.at);
            let activate = Message::Activate {
                membership: Arc::clone(&membership),
                accepted: true,
            };
            self.core.links.send(peer.id, number, activate);
        }
        let now = self.core.now;
        self.enter(membership, now, None);
    }

    /// Gives up the first generation.
    fn dismiss(&mut self, bytes: Arc<[u8]>) {
        let Role::Forming(forming) = &self.role else {
            return;
        };
        let joined: Vec<_> = forming
            .all()
            .chain(self.core.observers.keys().copied())
            .collect();
        for id in joined {
            self.core
                .send(id, Message::FormationAborted(Arc::clone(&bytes)));
            self.core.links.keep(id, false);
        }
        self.role = Role::Excluded;
        self.core.dismissed = Some(Arc::clone(&bytes));
        self.core.events.push_back(Event::FormationAborted(bytes));
    }

    /// Handles a candidate's request for this member's vote.
    fn handle_vote_request(&mut self, from: MemberId, request_votes: VoteRequest) {
        let VoteRequest {
            term,
            ended,
            unresponsive,
            leads,
        } = request_votes;
        for ended in &ended {
            match &mut self.role {
                Role::Leading(coordinator) => coordinator.end_is_known(&mut self.core, ended),
                _ => _ = self.core.learn_end(ended),
            }
        }
        if let Role::Leading(coordinator) = &self.role
            && coordinator.is_leaving()
        {
            return;
        }
        let core = &self.core;
        // The candidate has left, and would lead members that do not follow it.
        if core.has_ended(from) {
            return;
        }
        let twice = core.mistakes.makes(Mistake::VotesTwice);
        let hears = match &self.role {
            Role::Following { heard, .. } => {
                let limit = if unresponsive {
                    core.timing.heartbeat_interval * 2
                } else {
                    core.timing.suspect
                };
                let leader = core.synced.leader;
                let is_heard = core.now.since(*heard) < limit && core.links.is_ready(leader);
                !leads && is_heard && !core.has_ended(leader)
            }
            Role::Leading(coordinator) => coordinator.is_current(core),
            _ => false,
        };
        // Among candidates that do not lead yet, the first in line goes first.
        let promised = core.term.leader;
        let prefers = from != promised && !leads && !core.is_before(from, promised);
        let prefers = prefers && !core.sent_leave;
        let prefers = prefers && (self.is_bound() || matches!(self.role, Role::Candidate(_)));
        if (term < core.term || hears || prefers) && !twice {
            let is_led = matches!(self.role, Role::Following { .. } | Role::Leading(_));
            let is_led = hears || (is_led && core.synced == core.term);
            let own = if is_led { core.synced } else { core.term };
            let follows = Message::Follows {
                term: own,
                leads: is_led,
            };
            self.core.send(from, follows);
            match &mut self.role {
                Role::Candidate(candidate) if term > own => {
                    let defers = candidate.overtaken(&mut self.core, term);
                    if defers {
                        self.wait_for_others();
                    }
                }
                Role::Leading(coordinator) if term > own => {
                    let next = coordinator.lead_later_term(&self.core, term);
                    self.transition(Some(next));
                }
                _ => {}
            }
            return;
        }
        if matches!(self.role, Role::Joining(_) | Role::Forming(_)) {
            return;
        }
        if term < core.term {
            // Reached only with a planted mistake.
            let report = Box::new(self.core.report());
            return self.core.send(from, Message::Vote { term, report });
        }
        self.core.term = term;
        let leader = self.core.synced.leader;
        // A leaving coordinator waits for that.
        self.core.links.acknowledge(leader);
        self.core.links.keep(leader, false);
        self.wait(unresponsive);
        let hold = self.core.timing.hold;
        if let Role::Waiting(waiting) = &mut self.role {
            waiting.bound = self.core.now.after(hold);
            waiting.turn = waiting.turn.max(waiting.bound);
        }
        let report = Box::new(self.core.report());
        self.core.send(from, Message::Vote { term, report });
    }

    /// Follows a coordinator that has taken this member in.
    fn sync_log(&mut self, from: MemberId, term: Term, start: u64, entries: Vec<Arc<Entry>>) {
        if term < self.core.term || term.leader != from || start > self.core.log.end() {
            return;
        }
        // The coordinator may have judged by this member's report before the member received another entry.
        let differs = |(at, entry): (u64, &Arc<Entry>)| {
            let own = self.core.log.at(at);
            own.is_some_and(|own| own != entry)
                && !self.core.mistakes.makes(Mistake::DivergentFollows)
        };
        if (start..).zip(&entries).any(differs) {
            return self.exclude(Exclusion::Superseded(from));
        }
        self.core.term = term;
        self.core.synced = term;
        self.role = Role::Following {
            heard: self.core.now,
            asked: self.core.now,
        };
        self.core.lost = None;
        self.core.links.keep(from, true);
        self.core.events.push_back(Event::Coordinator(from));
        self.redirect_observers();
        for (at, entry) in (start..).zip(entries) {
            if !self.appended(at, entry) {
                return;
            }
        }
        if let Some((mut reconfigure_request, since)) = self.core.reconfigure_request {
            reconfigure_request.timeout = reconfigure_request
                .timeout
                .saturating_sub(self.core.now.since(since));
            self.core
                .send(from, Message::Reconfigure(reconfigure_request));
        }
        self.core.send_leave(from);
        if self.core.renounce_lease() && !self.core.mistakes.makes(Mistake::AbstentionForgotten) {
            self.core.send(from, Message::Abstain);
        }
        // Messages that were not in the report.
        let unlogged: Vec<_> = self.core.unlogged.iter().cloned().collect();
        for said in unlogged {
            self.core.send(from, Message::Broadcast(said));
        }
        if self.core.has_ended(from) {
            self.coordinator_lost(false);
        }
    }

    /// Handles the next entry of the log. Returns whether this member still takes part.
    fn appended(&mut self, at: u64, entry: Arc<Entry>) -> bool {
        if at > self.core.log.end() {
            // The coordinator sends the missing entries.
            self.follow_leader(self.core.synced);
        }
        if at != self.core.log.end() {
            return true;
        }
        self.core.deliver(Arc::clone(&entry));
        let Entry::Gone {
            member, departure, ..
        } = &*entry
        else {
            return true;
        };
        if *member == self.core.id() {
            match departure {
                Departure::Lost(_) => {
                    let leader = self.core.synced.leader;
                    self.exclude(Exclusion::Superseded(leader));
                }
                Departure::Left | Departure::Failed(_) => self.transition(Some(Transition::Left)),
            }
            return false;
        }
        if *member == self.core.synced.leader {
            self.coordinator_lost(false);
            return false;
        }
        true
    }

    /// Handles the operator's decision where another member coordinates, as far as this one knows, or none.
    fn operator(&mut self, word: OperatorDecision) {
        if word.generation != self.core.generation() {
            return;
        }
        if matches!(self.role, Role::Following { .. }) {
            // The coordinator may be out of reach without this member having noticed.
            let leader = self.core.synced.leader;
            self.core
                .send(leader, Message::OperatorDecision(word.clone()));
        }
        self.core.operator.get_or_insert_with(|| Arc::new(word));
        self.settle();
    }

    fn command(&mut self, command: Command) {
        if !self.is_in() {
            return;
        }
        match command {
            Command::Called(member, call) => {
                let now = self.core.now;
                self.core.calls.insert(member, (now, call));
            }
            Command::Broadcast { topic, bytes } => {
                let said = self.core.make_broadcast(topic, bytes);
                match &mut self.role {
                    Role::Leading(coordinator) => {
                        coordinator.enqueue_broadcast(&mut self.core, said);
                        self.settle();
                    }
                    Role::Following { .. } => {
                        let leader = self.core.synced.leader;
                        self.core.send(leader, Message::Broadcast(said));
                    }
                    _ => {}
                }
            }
            Command::SendDirect { to, bytes } => {
                let (from, leader) = (self.core.id(), self.core.synced.leader);
                let message = Message::Direct { from, to, bytes };
                match &mut self.role {
                    Role::Leading(coordinator) => {
                        let next = coordinator.message(&mut self.core, from, message);
                        self.transition(next);
                    }
                    Role::Following { .. } => self.core.send(leader, message),
                    _ => {}
                }
            }
            Command::Request(bytes) => {
                let (me, leader) = (self.core.id(), self.core.synced.leader);
                match &self.role {
                    Role::Leading(_) => self.core.events.push_back(Event::Request(me, bytes)),
                    Role::Following { .. } => self.core.send(leader, Message::Request(bytes)),
                    _ => {}
                }
            }
            Command::Reply { to, bytes } => {
                if !matches!(self.role, Role::Leading(_) | Role::Forming(_)) {
                    return;
                }
                match to == self.core.id() {
                    true => self.core.events.push_back(Event::Reply(bytes)),
                    false => self.core.send(to, Message::Reply(bytes)),
                }
            }
            Command::AbortFormation(bytes) => self.dismiss(bytes),
            Command::Reconfigure { .. } if self.core.abstains || self.core.is_witness() => {
                self.core
                    .events
                    .push_back(Event::ReconfigureFailed(Vec::new()));
            }
            Command::Reconfigure {
                timeout,
                leaves_behind,
            } => {
                let reconfigure_request = self.core.request_reconfigure(timeout, leaves_behind);
                match &mut self.role {
                    Role::Leading(coordinator) => {
                        let next = coordinator.own_reconfigure_request(&mut self.core);
                        self.transition(next);
                    }
                    Role::Following { .. } => {
                        let leader = self.core.synced.leader;
                        self.core
                            .send(leader, Message::Reconfigure(reconfigure_request));
                    }
                    _ => {}
                }
            }
            Command::CancelReconfigure => {
                if let Some((reconfigure_request, _)) = self.core.reconfigure_request.take()
                    && matches!(self.role, Role::Following { .. })
                {
                    let leader = self.core.synced.leader;
                    self.core.send(
                        leader,
                        Message::CancelReconfigure(reconfigure_request.number),
                    );
                }
            }
            Command::Abstain if self.is_joining() || self.core.is_witness() => {}
            Command::Abstain => {
                self.core.abstains = true;
                self.core.reconfigure_request = None;
                match &self.role {
                    Role::Following { .. } if self.core.renounce_lease() => {
                        let leader = self.core.synced.leader;
                        self.core.send(leader, Message::Abstain);
                    }
                    // The next coordinator is told with the vote.
                    _ => self.settle(),
                }
            }
            Command::Leave(departure) => {
                self.core.leaving = Some(departure.clone());
                match &mut self.role {
                    Role::Leading(coordinator) => {
                        let next = coordinator.leave(&mut self.core, departure);
                        self.transition(next);
                    }
                    Role::Following { .. } => {
                        let leader = self.core.synced.leader;
                        self.core.send_leave(leader);
                    }
                    // `finish_joining` does the rest.
                    Role::Joining(joining) => {
                        joining.gives_up = Some(self.core.now);
                        let generation = self.core.generation();
                        let leave = Message::Leave(departure);
                        match joining.role {
                            JoinRole::Absent => {
                                self.core.links.send(joining.asked, generation, leave)
                            }
                            _ => self.core.links.send_all(generation, &leave),
                        }
                    }
                    Role::Forming(_) => self.transition(Some(Transition::Left)),
                    _ => {}
                }
            }
            Command::OperatorDecision(word) => match &mut self.role {
                Role::Leading(coordinator) => {
                    let me = self.core.id();
                    let next =
                        coordinator.message(&mut self.core, me, Message::OperatorDecision(word));
                    self.transition(next);
                }
                _ => {
                    let me = self.core.id();
                    for id in word.members.iter().filter(|id| **id != me) {
                        self.core
                            .reach(*id, Message::OperatorDecision(word.clone()));
                    }
                    self.operator(word);
                }
            },
            Command::Claimed(generation) => {
                if generation == self.core.membership.generation {
                    self.core.claimed = Some(self.core.term);
                    self.settle();
                }
            }
        }
    }
}

impl Joining {
    /// Asks at the next address.
    fn ask(&mut self, core: &mut Core) {
        let at = self.at[self.tries as usize % self.at.len()].clone();
        self.tries += 1;
        self.asked = Links::placeholder_id(self.tries);
        self.send(core, &at);
    }

    fn redirect(&mut self, core: &mut Core, peer: &Peer) {
        self.asked = peer.id;
        self.send(core, &peer.at);
    }

    fn send(&self, core: &mut Core, at: &str) {
        core.consented = core.now;
        let (peer, role) = (core.me.clone(), self.role);
        core.links.open(core.now, self.asked, at);
        core.links.keep(self.asked, true);
        core.send(self.asked, Message::Join { peer, role });
    }
}

//! The machine of one process of a job.
//!
//! ```text
//! Joining ──active──▶ Following ──coordinator lost──▶ Waiting ──next_try──▶ Candidate ──a majority──▶ Coordinating
//!                        ▲                              │  ▲                    │                          │
//!                        └───────────sync log───────────┘  └────a later term────┴──────────────────────────┘
//! Forming ──all have joined──▶ Coordinating
//! any ──no majority, left behind, superseded──▶ Excluded      any ──leave──▶ Left
//! ```
//!
//! A coordinator is lost when its end is proven, its link is lost, it has left, or it leaves a request unanswered for
//! [`Timing::unresponsive`]. The first member in failover order asks for votes at once, each further member
//! [`Timing::stagger`] later.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::candidate::{Candidate, Outcome, no_majority};
use super::coordinator::{Coordinator, Transition};
use super::core::{Core, Event};
use super::forming::Forming;
use super::id::{Generation, MemberId, ProcessInfo, Term, Time};
use super::link::{Connection, ConnectionRequest, LinkEvent, Links};
use super::log::{Entry, OperatorDecision};
use super::membership::{Membership, SharedMembership};
use super::message::{
    Ended, Exclusion, Frame, Heartbeat, HeartbeatReply, JoinRole, Message, Proof, VoteRequest,
};
use super::mistake::{Mistake, Mistakes};
use super::timing::Timing;
use crate::departure::{Departure, Lost};

/// An input of a machine.
#[derive(Clone, Debug)]
pub enum Input {
    /// The driver has opened the requested connection.
    Connected(MemberId, Connection),
    /// The driver could not connect.
    DialFailed(MemberId),
    /// A frame has arrived over a connection, which either side may have opened.
    Frame(Connection, Frame),
    /// A connection has ended.
    Closed(Connection),
    /// A process has ended, as reported by its launcher or the kernel.
    Ended(MemberId, Proof),
    /// A process has ended, as reported by the kernel, and a launcher will report how. It no longer votes. What other
    /// members are told waits for [`Ended`](Self::Ended), which the driver passes in any case.
    Exited(MemberId),
    /// The driver's evidence about an unreachable peer. If the end of that peer is not proven, the coordinator reports
    /// the latest evidence that is newer than the peer's last message. The texts are already sanitized, like those of
    /// decoded messages.
    Evidence(MemberId, Lost),
    /// An operation of NCCL with the other members has made progress.
    Progress,
    /// A command of the driver.
    Command(Command),
}

/// A command of the driver.
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
    /// Sends a request to the coordinator's driver, which may be this process's own. The request is lost with the
    /// coordinator, and dropped while there is none: the driver must repeat it at [`Event::Coordinator`].
    Request(Arc<[u8]>),
    /// Replies from the coordinator's driver to one process. Dropped if this process is neither the coordinator nor the
    /// initial coordinator. A member that does not follow yet receives the reply once it does, after the entries that
    /// the reply depends on.
    Reply {
        /// The receiver.
        to: MemberId,
        /// The content.
        bytes: Arc<[u8]>,
    },
    /// The last call of a member's program, as reported to the coordinator: included in the report of the member's
    /// loss.
    Called(MemberId, String),
    /// Gives up the first generation: all processes that have joined or join later receive this reason, and no longer
    /// take part.
    AbortFormation(Arc<[u8]>),
    /// Requests the next generation.
    Reconfigure {
        /// How long the request is valid, in nanoseconds.
        timeout: u64,
        /// Whether to form the next generation without the members that make no request in time, if all agree.
        leaves_behind: bool,
    },
    /// Withdraws the request for the next generation.
    CancelReconfigure,
    /// Takes part in no later generation, permanently. Other members need not wait for this one, which stays a voter
    /// until they have formed the next generation without it. A later request for the next generation fails at once.
    Abstain,
    /// Leaves, or fails.
    Leave(Departure),
    /// The operator's decision.
    OperatorDecision(OperatorDecision),
    /// The claim for this generation was won for this voter: the half of the voters that includes it may continue.
    Claimed(Generation, MemberId),
}

/// An output of a machine for its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// A request of the links.
    Connection(ConnectionRequest),
    /// An event for the driver.
    Event(Event),
}

/// The role in which a process joins a job.
#[derive(Clone, Debug)]
pub enum StartRole {
    /// The initial coordinator of the first generation, which has this number and this many members.
    InitialCoordinator {
        /// The generation.
        number: u64,
        /// The number of ranks. Their slots are below this number.
        size: u32,
        /// The number of witnesses. Their slots are not below `size`.
        witnesses: u32,
    },
    /// A member of the first generation, whose coordinator listens at `at`.
    Rank {
        /// The generation.
        number: u64,
        /// The coordinator's address.
        at: String,
    },
    /// A voter of the first generation without a rank. Its slot is not below the number of ranks.
    Witness {
        /// The generation.
        number: u64,
        /// The coordinator's address.
        at: String,
    },
    /// Reports to the ranks of the first generation why this process will not join, and leaves.
    Absent {
        /// The generation.
        number: u64,
        /// The coordinator's address.
        at: String,
        /// The reason.
        why: Departure,
    },
    /// Asks to join the next generation, at one of these addresses.
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
    Coordinating(Box<Coordinator>),
    Excluded,
    Left,
}

#[derive(Debug)]
struct Joining {
    at: Vec<String>,
    role: JoinRole,
    tries: u32,
    /// The process that was last asked.
    asked: MemberId,
    /// The time since which joining is cancelled, and the process waits until the processes that it has asked know
    /// that.
    cancelled_since: Option<Time>,
}

/// Represents any generation that is later than that of this process.
const LATER_GENERATION: u64 = u64::MAX;

/// How long a process that gives up joining waits until that is known, in nanoseconds.
const JOIN_CANCEL_WAIT_NS: u64 = 1_000_000_000;

/// The state without a coordinator.
#[derive(Debug)]
struct Waiting {
    /// The time at which it asks for votes, or, as a witness, asks the next member.
    next_try: Time,
    /// Whether the coordinator left requests unanswered.
    unresponsive: bool,
    /// The time until which its vote binds it.
    bound: Time,
}

/// The machine of a member or of a joiner; see the module.
#[derive(Debug)]
pub struct MemberMachine {
    core: Core,
    role: Role,
}

impl MemberMachine {
    /// Creates a machine; `me` is the information that other processes receive about it.
    #[must_use]
    pub fn new(
        me: ProcessInfo,
        role: StartRole,
        timing: Timing,
        mistakes: Mistakes,
        now: Time,
    ) -> Self {
        let number = match &role {
            StartRole::InitialCoordinator { number, .. }
            | StartRole::Rank { number, .. }
            | StartRole::Witness { number, .. }
            | StartRole::Absent { number, .. } => *number,
            StartRole::Joiner { .. } => 0,
        };
        let proposer = me.id;
        let empty = Membership::new(Generation { number, proposer }, Vec::new(), Vec::new());
        let mut core = Core::new(me, Arc::new(empty), timing, mistakes);
        core.now = now;
        let joining = |at, role| {
            Role::Joining(Joining {
                at,
                role,
                tries: 0,
                asked: Links::placeholder_id(0),
                cancelled_since: None,
            })
        };
        let absent = match &role {
            StartRole::Absent { why, .. } => Some(why.clone()),
            _ => None,
        };
        let role = match role {
            StartRole::InitialCoordinator {
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

    /// Returns the member that coordinates the highest known term: the coordinator, or a candidate to which this member
    /// has promised its vote.
    #[must_use]
    pub fn coordinator(&self) -> MemberId {
        self.core.term.coordinator
    }

    /// Whether this process coordinates.
    #[must_use]
    pub fn is_coordinator(&self) -> bool {
        matches!(self.role, Role::Coordinating(_))
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

    /// Whether this process coordinates or follows a coordinator; then requests of its driver are not dropped.
    #[must_use]
    pub fn has_coordinator(&self) -> bool {
        matches!(self.role, Role::Following { .. } | Role::Coordinating(_))
    }

    /// Returns for how many nanoseconds each of the other members has not been heard, if this process coordinates.
    #[must_use]
    pub fn heartbeat_ages(&self, now: Time) -> Vec<(MemberId, u64)> {
        match &self.role {
            Role::Coordinating(coordinator) => coordinator.heartbeat_ages(now),
            _ => Vec::new(),
        }
    }

    /// Returns the process that has joined with `slot`, if this process is the initial coordinator.
    #[must_use]
    pub fn joined(&self, slot: u32) -> Option<&ProcessInfo> {
        match &self.role {
            Role::Forming(forming) => forming.joined(slot),
            _ => None,
        }
    }

    /// Whether no generation exists without this process, as far as this process can know: a majority has answered
    /// within [`Timing::lease`].
    #[must_use]
    pub fn holds_lease(&self, now: Time) -> bool {
        self.core.holds_lease_at(now)
    }

    /// Whether all messages to other processes have arrived.
    #[must_use]
    pub fn is_flushed(&self) -> bool {
        self.core.links.all_flushed()
    }

    /// Returns the bytes of the large messages that are still on their way.
    #[must_use]
    pub fn unacknowledged_large_bytes(&self) -> usize {
        self.core.links.unacknowledged_large_bytes()
    }

    /// Whether this process removes an ended process from the voters of its generation.
    #[must_use]
    pub fn has_removed_voter(&self, member: MemberId) -> bool {
        let known = self.core.ended.get(&member);
        known.is_some_and(|known| known.reduces_electorate)
    }

    /// Whether this process has had a lease in its generation. Without one it removes no ended process from the voters.
    #[must_use]
    pub fn has_had_lease(&self) -> bool {
        self.core.has_had_lease()
    }

    /// Whether this process is neither looking for a coordinator nor waiting for an answer.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        match &self.role {
            Role::Excluded | Role::Left => true,
            Role::Following { .. } | Role::Coordinating(_) => !self.core.awaits_coordinator(),
            Role::Joining(_) | Role::Forming(_) | Role::Waiting(_) | Role::Candidate(_) => false,
        }
    }

    /// Returns approximately how many bytes this machine occupies, without the memberships that it shares.
    #[must_use]
    pub fn size(&self) -> usize {
        let followers = match &self.role {
            Role::Coordinating(coordinator) => coordinator.size(),
            _ => 0,
        };
        size_of::<Self>() + self.core.size() + followers
    }

    /// Returns how many entries of this generation's log have been received.
    #[must_use]
    pub fn log_end(&self) -> u64 {
        self.core.log.end()
    }

    /// Whether this process is not a member yet.
    #[must_use]
    pub fn is_joining(&self) -> bool {
        matches!(self.role, Role::Joining(_) | Role::Forming(_))
    }

    /// Whether this process takes part.
    #[must_use]
    pub fn is_in(&self) -> bool {
        !matches!(self.role, Role::Excluded | Role::Left)
    }

    /// Handles one input and all its consequences.
    pub fn handle(&mut self, now: Time, input: Input) {
        self.core.now = now;
        match input {
            Input::Connected(peer, connection) => self.core.links.connected(now, peer, connection),
            Input::DialFailed(peer) => {
                self.core.links.dial_failed(now, peer);
                self.advance();
            }
            Input::Frame(connection, frame) => self.core.links.received(now, connection, frame),
            Input::Closed(connection) => {
                self.core.links.closed(now, connection);
                self.advance();
            }
            Input::Ended(member, proof) if self.is_in() => self.ended(member, proof),
            Input::Exited(member) if self.is_in() => self.exited(member),
            Input::Ended(..) | Input::Exited(..) => {}
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
            && let Some(since) = joining.cancelled_since
        {
            let links = &self.core.links;
            let is_vain = !matches!(joining.role, JoinRole::Absent) && !links.any_ready();
            let is_known = links.all_flushed() || is_vain;
            if is_known || self.core.now.since(since) >= JOIN_CANCEL_WAIT_NS {
                self.transition(Some(Transition::Left));
            }
        }
    }

    /// Returns when to call [`handle_timeout`](Self::handle_timeout) at the latest.
    #[must_use]
    pub fn next_timeout(&self) -> Time {
        let core = &self.core;
        let role = match &self.role {
            Role::Joining(joining) => match joining.cancelled_since {
                Some(since) => since.after(JOIN_CANCEL_WAIT_NS),
                None => Time::NEVER,
            },
            Role::Forming(_) | Role::Excluded => Time::NEVER,
            Role::Left => return Time::NEVER,
            Role::Following { heard, asked } => (*heard.max(asked)).after(core.timing.unresponsive),
            Role::Waiting(waiting) => match core.majority_deadline() {
                Some(at) if at > core.now => waiting.next_try.min(at),
                _ => waiting.next_try,
            },
            Role::Candidate(candidate) => candidate.next_timeout(core),
            Role::Coordinating(coordinator) => coordinator.next_timeout(core),
        };
        role.min(core.links.next_timeout())
    }

    /// Handles the timeouts that are due.
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
                    self.handle_coordinator_lost(true);
                } else if is_unresponsive {
                    // The coordinator may follow another member by now.
                    *asked = now;
                    self.ask_to_follow(self.core.synced);
                }
            }
            Role::Waiting(waiting) if now >= waiting.next_try || self.core.has_no_majority() => {
                let unresponsive = waiting.unresponsive;
                if self.core.has_no_majority() {
                    let why = no_majority(&self.core, &BTreeSet::new());
                    self.exclude(why);
                } else if self.core.is_witness() {
                    self.look_for_coordinator();
                } else {
                    self.role =
                        Role::Candidate(Candidate::start(&mut self.core, unresponsive, false));
                    self.advance();
                }
            }
            Role::Coordinating(coordinator) => {
                let next = coordinator.timeout(&mut self.core);
                self.transition(next);
            }
            Role::Candidate(_) => self.advance(),
            _ => {}
        }
        self.drain();
        self.finish_joining();
    }

    fn drain(&mut self) {
        while let Some(event) = self.core.links.next_event() {
            match event {
                LinkEvent::Up => self.advance(),
                LinkEvent::Resumed(peer, outage) => {
                    self.core.events.push_back(Event::Resumed(peer, outage));
                    self.advance();
                }
                LinkEvent::Lost(peer) => self.handle_link_lost(peer),
                LinkEvent::Renewed(peer) => self.handle_link_renewed(peer),
                LinkEvent::Received {
                    from,
                    generation,
                    message,
                } => self.message(from, generation, message),
                LinkEvent::Heartbeat(from, heartbeat) => self.heartbeat(from, &heartbeat),
                LinkEvent::HeartbeatReply(from, heartbeat_reply) => {
                    if let Role::Coordinating(coordinator) = &mut self.role {
                        let next =
                            coordinator.heartbeat_reply(&mut self.core, from, heartbeat_reply);
                        self.transition(next);
                    }
                }
            }
        }
    }

    /// Makes all progress that has become possible in this role.
    fn advance(&mut self) {
        match &mut self.role {
            Role::Candidate(candidate) => match candidate.advance(&mut self.core) {
                Some(Outcome::Coordinates(mut coordinator)) => {
                    let next = match self.core.leaving.clone() {
                        Some(departure) => coordinator.leave(&mut self.core, departure),
                        None => coordinator.advance(&mut self.core),
                    };
                    self.role = Role::Coordinating(coordinator);
                    self.transition(next);
                }
                Some(Outcome::Stops(next)) => self.transition(Some(next)),
                Some(Outcome::Waits) => self.wait_for_others(),
                None => {}
            },
            Role::Coordinating(coordinator) => {
                let next = coordinator.advance(&mut self.core);
                self.transition(next);
            }
            _ => {}
        }
    }

    fn transition(&mut self, next: Option<Transition>) {
        match next {
            None => {}
            Some(Transition::Enter(membership, certain_since)) => {
                self.enter(membership, certain_since, None)
            }
            Some(Transition::Exclude(why)) => self.exclude(why),
            Some(Transition::Follow(term)) => self.follow(term),
            Some(Transition::CoordinateLaterTerm(term)) => {
                self.core.term = self.core.term.max(term);
                self.role = Role::Candidate(Candidate::start(&mut self.core, false, true));
                self.advance();
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
            // Other members have included this process in a generation in which it does not take part.
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

    /// Enters an active generation, as reported by `by`. Since `certain_since`, it is certain that no generation exists
    /// without this member.
    fn enter(&mut self, membership: SharedMembership, certain_since: Time, by: Option<MemberId>) {
        // A member that abstains may have requested the generation before, and been included in it.
        if !membership.votes(self.core.id()) || self.core.abstains {
            let generation = membership.generation;
            self.core.ahead = Some(membership);
            return self.exclude(Exclusion::LeftBehind(generation));
        }
        self.core.enter(membership, certain_since);
        let proposer = self.core.membership.generation.proposer;
        if proposer == self.core.id() {
            let mut coordinator = Coordinator::of_generation(&mut self.core);
            let next = match self.core.leaving.clone() {
                Some(departure) => coordinator.leave(&mut self.core, departure),
                None => coordinator.advance(&mut self.core),
            };
            self.role = Role::Coordinating(Box::new(coordinator));
            return self.transition(next);
        }
        self.core.events.push_back(Event::Coordinator(proposer));
        self.core.links.keep(proposer, true);
        self.redirect_observers();
        for ended in self.core.known_ends() {
            self.core.send(proposer, Message::ReportEnd(ended));
        }
        self.core.send_leave(proposer);
        self.role = Role::Following {
            heard: self.core.now,
            asked: self.core.now,
        };
        if self.core.has_ended(proposer) {
            self.handle_coordinator_lost(false);
        } else if by != Some(proposer) {
            // The new coordinator's first messages may have arrived before this.
            self.follow(self.core.term);
        }
    }

    /// Asks to follow another member, which coordinates in a later term.
    fn follow(&mut self, term: Term) {
        if term.coordinator == self.core.id() {
            return;
        }
        self.core.term = self.core.term.max(term);
        self.wait_for_others();
        let report = Box::new(self.core.report());
        self.core
            .reach(term.coordinator, Message::Vote { term, report });
    }

    /// Handles the loss of the coordinator.
    fn handle_coordinator_lost(&mut self, unresponsive: bool) {
        let coordinator_id = self.core.synced.coordinator;
        // A leaving coordinator waits for this acknowledgement.
        self.core.links.acknowledge(coordinator_id);
        self.core.links.keep(coordinator_id, false);
        self.wait(unresponsive);
        if let Role::Waiting(waiting) = &self.role
            && waiting.next_try <= self.core.now
            && !self.core.is_witness()
        {
            self.role = Role::Candidate(Candidate::start(&mut self.core, unresponsive, false));
            self.advance();
        } else if let Some(ended) = self.core.end_of(coordinator_id) {
            // The first member in failover order may be on a host where the end is not known.
            if let Some(first) = self.failover_order().first().copied() {
                self.core.reach(first, Message::ReportEnd(ended));
            }
        }
    }

    /// Waits for this member's position in the failover order.
    fn wait(&mut self, unresponsive: bool) {
        let me = self.core.id();
        let order = self.failover_order();
        let position = match order.iter().position(|id| *id == me) {
            Some(_) if self.core.abstains || self.core.sent_leave => order.len(),
            Some(position) => position,
            // A witness asks the coordinator that the other members have by then.
            None => usize::from(self.core.is_witness()),
        };
        let stagger = self.core.timing.stagger;
        let next_try = self.core.now.after(position as u64 * stagger);
        let bound = Time::default();
        self.core
            .without_coordinator_since
            .get_or_insert(self.core.now);
        self.role = Role::Waiting(Waiting {
            next_try,
            unresponsive,
            bound,
        });
    }

    /// Looks for the coordinator on a witness, which does not coordinate itself: asks one member after the other,
    /// beginning with the one that it has voted for.
    fn look_for_coordinator(&mut self) {
        let core = &self.core;
        let waited = core
            .without_coordinator_since
            .map_or(0, |since| core.now.since(since))
            / core.timing.stagger;
        let promised = Some(core.term.coordinator).filter(|id| !core.is_departed(*id));
        let order: Vec<_> = promised.into_iter().chain(self.failover_order()).collect();
        if let Some(asked) = order.get(waited as usize % order.len().max(1)).copied() {
            let (term, report) = (self.core.term, Box::new(self.core.report()));
            self.core.reach(asked, Message::Vote { term, report });
        }
        let next_try = self.core.now.after(self.core.timing.stagger);
        if let Role::Waiting(waiting) = &mut self.role {
            waiting.next_try = next_try;
        }
    }

    /// As [`wait`](Self::wait), but for longer than a vote binds.
    fn wait_for_others(&mut self) {
        self.wait(false);
        let hold = self.core.timing.hold;
        if let Role::Waiting(waiting) = &mut self.role {
            waiting.next_try = waiting.next_try.after(hold);
        }
    }

    /// Returns the members that may take over, in order. If the coordinator's host is unreachable, other hosts put the
    /// members of that host last.
    fn failover_order(&self) -> Vec<MemberId> {
        let core = &self.core;
        let lost = core.synced.coordinator;
        let kernel = core
            .membership
            .process(lost)
            .map_or(0, |process| process.kernel);
        let is_beside = |process: &ProcessInfo| {
            kernel != 0
                && process.kernel == kernel
                && core.me.kernel != kernel
                && !core.has_ended(lost)
        };
        let members = core.membership.members.iter();
        let mut order: Vec<_> = members
            .filter(|process| process.id != lost && !core.is_departed(process.id))
            .collect();
        order.sort_by_key(|process| is_beside(process));
        order.into_iter().map(|process| process.id).collect()
    }

    fn ended(&mut self, member: MemberId, proof: Proof) {
        if matches!(self.role, Role::Forming(_)) {
            self.core.links.close(member);
            return self.join_revoked(member, |_, process| proof.departure(process.pid));
        }
        let reduces_electorate = self.core.holds_lease();
        self.handle_proven_end(Ended {
            member,
            proof,
            reduces_electorate,
        });
    }

    fn exited(&mut self, member: MemberId) {
        match &mut self.role {
            Role::Forming(_) => {}
            Role::Coordinating(coordinator) => {
                coordinator.handle_exit(&mut self.core, member);
                self.advance();
            }
            _ => {
                let is_new = self.core.learn_exit(member);
                self.handle_missing(member, is_new);
            }
        }
    }

    fn handle_proven_end(&mut self, ended: Ended) {
        let member = ended.member;
        if let Role::Coordinating(coordinator) = &mut self.role {
            coordinator.handle_end(&mut self.core, &ended);
            return self.advance();
        }
        let is_new = self.core.learn_end(&ended);
        let coordinator_id = self.core.synced.coordinator;
        if is_new && let Some(ended) = self.core.end_of(member) {
            match &self.role {
                Role::Following { .. } if coordinator_id != member => {
                    self.core.send(coordinator_id, Message::ReportEnd(ended));
                }
                // The first member in failover order may be on a host where the end is not known.
                Role::Waiting(_) if coordinator_id == member => {
                    let first = self.failover_order().first().copied();
                    if let Some(first) = first.filter(|first| *first != self.core.id()) {
                        self.core.reach(first, Message::ReportEnd(ended));
                    }
                }
                _ => {}
            }
        }
        self.handle_missing(member, is_new);
    }

    /// Handles the end of a process while this one does not coordinate.
    fn handle_missing(&mut self, member: MemberId, is_new: bool) {
        match &self.role {
            Role::Following { .. } if self.core.synced.coordinator == member => {
                self.handle_coordinator_lost(false)
            }
            Role::Waiting(_) if is_new && !self.is_bound() => self.wait(false),
            Role::Waiting(_) => {}
            _ => self.advance(),
        }
    }

    /// Whether this member's vote still binds it.
    fn is_bound(&self) -> bool {
        let Role::Waiting(waiting) = &self.role else {
            return false;
        };
        self.core.now < waiting.bound && !self.core.has_ended(self.core.term.coordinator)
    }

    fn handle_link_lost(&mut self, peer: MemberId) {
        self.core.observers.remove(&peer);
        self.core.held_replies.remove(&peer);
        match &mut self.role {
            Role::Coordinating(coordinator) => {
                let next = coordinator.handle_link_lost(&mut self.core, peer);
                self.transition(next);
            }
            Role::Following { .. } if peer == self.core.synced.coordinator => {
                if self.core.mistakes.makes(Mistake::ClosedIsDead) {
                    let (member, proof, reduces_electorate) = (peer, Proof::Kernel, true);
                    self.core.learn_end(&Ended {
                        member,
                        proof,
                        reduces_electorate,
                    });
                }
                self.handle_coordinator_lost(false);
            }
            Role::Joining(joining) if joining.cancelled_since.is_none() => {
                joining.ask(&mut self.core)
            }
            Role::Forming(_) => {
                let resume = self.core.timing.resume;
                let heard = Time(self.core.now.0.saturating_sub(2 * resume));
                self.join_revoked(peer, |core, _| core.unreachable(peer, heard, resume));
            }
            _ => self.advance(),
        }
    }

    /// Handles the end of a process that may have joined, before the first generation is active.
    fn join_revoked(&mut self, id: MemberId, why: impl FnOnce(&Core, &ProcessInfo) -> Departure) {
        if let Role::Forming(forming) = &mut self.role
            && let Some(process) = forming.remove(id)
        {
            let departure = why(&self.core, &process);
            self.core
                .events
                .push_back(Event::JoinRevoked(id.slot, departure));
        }
    }

    fn handle_link_renewed(&mut self, peer: MemberId) {
        match &mut self.role {
            Role::Coordinating(coordinator) => {
                let next = coordinator.handle_link_renewed(&mut self.core, peer);
                self.transition(next);
            }
            Role::Following { .. } if peer == self.core.synced.coordinator => {
                self.follow(self.core.synced);
            }
            _ => self.advance(),
        }
    }

    fn heartbeat(&mut self, from: MemberId, heartbeat: &Heartbeat) {
        let own = self.core.generation();
        if self.is_joining() {
            // The heartbeat has overtaken the message that makes this process a member.
            return;
        }
        if !self.is_in() {
            return self.core.send_exclusion(from, heartbeat.generation);
        }
        if heartbeat.generation != own {
            if heartbeat.generation < own {
                self.send_newer_generation(from);
            }
            return;
        }
        if heartbeat.term != self.core.term || self.core.synced != heartbeat.term {
            if heartbeat.term < self.core.term {
                let (term, already_coordinates) =
                    (self.core.term, self.core.synced == self.core.term);
                self.core.send(
                    from,
                    Message::Follows {
                        term,
                        already_coordinates,
                    },
                );
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

    fn send_newer_generation(&mut self, to: MemberId) {
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
            Message::Redirect(process) => {
                if let Role::Joining(joining) = &mut self.role {
                    joining.redirect(&mut self.core, &process);
                }
                return;
            }
            Message::Join { .. } | Message::Observe(_) if self.core.formation_aborted.is_some() => {
                let bytes = self.core.formation_aborted.clone().unwrap_or_default();
                self.core.events.push_back(Event::Joined(from));
                return self.core.send(from, Message::FormationAborted(bytes));
            }
            Message::Join { process, role } => return self.join(from, process, role),
            Message::Observe(process) => return self.observe(from, process),
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
                if let Role::Coordinating(coordinator) = &mut self.role {
                    coordinator.handle_outdated_member(&mut self.core, from);
                } else {
                    self.send_newer_generation(from);
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
        // A process that no longer takes part belongs to no later generation either, and a joiner has no generation
        // yet.
        let is_of_any = matches!(message, Message::Leave(_) | Message::Accepted { .. });
        if generation < own && !is_of_any {
            return self.send_newer_generation(from);
        }
        if generation > own {
            if !matches!(message, Message::Reject(_) | Message::Leave(_)) {
                self.core.send(from, Message::UnknownGeneration);
            }
            return;
        }
        match message {
            Message::RequestVote(vote_request) => self.handle_vote_request(from, vote_request),
            Message::ReportEnd(ended) if !matches!(self.role, Role::Coordinating(_)) => {
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
                Role::Coordinating(_),
                Message::SyncLog {
                    term,
                    start,
                    entries,
                },
            ) if term > self.core.term => {
                self.sync_log(from, term, start, entries);
            }
            (Role::Coordinating(coordinator), message) => {
                let next = coordinator.message(&mut self.core, from, message);
                self.transition(next);
            }
            (Role::Candidate(candidate), Message::Vote { term, report }) => {
                candidate.vote(&mut self.core, from, term, *report);
                self.advance();
            }
            (Role::Forming(_), Message::Leave(departure)) => {
                self.core.links.acknowledge(from);
                self.core.links.keep(from, false);
                let observes = self.core.observers.remove(&from).is_some();
                if let Role::Forming(forming) = &self.role
                    && !observes
                    && forming.joined(from.slot).is_none()
                {
                    // The process has connected only to report that it will not join.
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
                let (member, reduces_electorate) = (from, true);
                self.handle_proven_end(Ended {
                    member,
                    proof,
                    reduces_electorate,
                });
            }
            (
                Role::Candidate(candidate),
                Message::Follows {
                    term,
                    already_coordinates,
                },
            ) => {
                if already_coordinates && !self.core.is_departed(term.coordinator) {
                    // That process coordinates, and decides whether this member follows.
                    self.ask_to_follow(term);
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
                // A request for the next generation that is on its way counts as one that has arrived.
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
            (
                Role::Following { .. },
                Message::Follows {
                    term,
                    already_coordinates: true,
                },
            ) => {
                if term > self.core.synced {
                    self.follow(term);
                }
            }
            (
                Role::Waiting(_),
                Message::Follows {
                    term,
                    already_coordinates: true,
                },
            ) if !self.core.is_departed(term.coordinator) => {
                self.ask_to_follow(term);
            }
            (Role::Following { .. } | Role::Waiting(_), Message::Vote { .. }) => {
                let already_coordinates = matches!(self.role, Role::Following { .. });
                let term = self.core.term;
                self.core.send(
                    from,
                    Message::Follows {
                        term,
                        already_coordinates,
                    },
                );
            }
            (Role::Following { .. }, Message::Direct { from, bytes, .. }) => {
                self.core.events.push_back(Event::Direct(from, bytes));
            }
            (Role::Following { .. }, Message::Reply(bytes))
                if from == self.core.synced.coordinator =>
            {
                self.core.events.push_back(Event::Reply(bytes));
            }
            (
                Role::Following { .. } | Role::Waiting(_) | Role::Candidate(_),
                Message::OperatorDecision(decision),
            ) => self.handle_operator_decision(decision),
            _ => {}
        }
    }

    /// Asks the coordinator of this term to let this member follow.
    fn ask_to_follow(&mut self, term: Term) {
        if term.coordinator != self.core.id() {
            let report = Box::new(self.core.report());
            self.core
                .reach(term.coordinator, Message::Vote { term, report });
        }
    }

    fn activated(&mut self, by: MemberId, membership: SharedMembership, accepted: bool) {
        let is_next = match self.role {
            Role::Joining(_) => true,
            _ => membership.generation.number > self.core.generation() && self.is_in(),
        };
        if is_next {
            // The generation became active after this process had agreed to it, so none existed without this process
            // before.
            let certain_since = if accepted {
                self.core.consented
            } else {
                Time::default()
            };
            self.enter(membership, certain_since, Some(by));
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

    fn join(&mut self, from: MemberId, process: ProcessInfo, role: JoinRole) {
        match (&mut self.role, role) {
            (Role::Forming(_), JoinRole::Absent) => self.core.links.keep(from, true),
            (Role::Forming(forming), role) if process.id == from => {
                match forming.join(process, role) {
                    Some(is_new) => {
                        self.core.links.keep(from, true);
                        if is_new {
                            self.core.events.push_back(Event::Joined(from));
                        }
                        self.form();
                    }
                    None => self.core.links.close(from),
                }
            }
            (Role::Coordinating(coordinator), JoinRole::Joiner) => {
                let next =
                    coordinator.message(&mut self.core, from, Message::Join { process, role });
                self.transition(next);
            }
            (Role::Following { .. }, JoinRole::Joiner) => self.redirect(from),
            // The process tries again elsewhere.
            _ => self.core.links.close(from),
        }
    }

    /// Handles a process that is not a member and wants to observe.
    fn observe(&mut self, from: MemberId, process: ProcessInfo) {
        match &mut self.role {
            Role::Coordinating(coordinator) => {
                let next = coordinator.message(&mut self.core, from, Message::Observe(process));
                self.transition(next);
            }
            // The observer is redirected when another member coordinates, possibly this one: the coordinator may have
            // ended a moment ago.
            Role::Following { .. } => {
                self.redirect(from);
                self.core.links.keep(from, true);
                self.core.observers.insert(from, process);
            }
            Role::Waiting(_) | Role::Candidate(_) => {
                // The observer may have an operator's decision for these members, which have no coordinator without it.
                self.send_newer_generation(from);
                let (term, already_coordinates) = (self.core.term, false);
                self.core.send(
                    from,
                    Message::Follows {
                        term,
                        already_coordinates,
                    },
                );
                self.core.links.keep(from, true);
                self.core.observers.insert(from, process);
            }
            Role::Forming(_) => {
                self.core.links.keep(from, true);
                self.core.observers.insert(from, process);
                let generation = self.core.generation();
                self.core.send(from, Message::Forming(generation));
            }
            Role::Joining(_) => self.core.links.close(from),
            Role::Excluded | Role::Left => self.core.send_exclusion(from, LATER_GENERATION),
        }
    }

    /// Redirects the observers of this member to the member that coordinates now.
    fn redirect_observers(&mut self) {
        for id in std::mem::take(&mut self.core.observers).into_keys() {
            self.redirect(id);
            self.core.links.keep(id, false);
        }
    }

    /// Redirects a process to the coordinator.
    fn redirect(&mut self, to: MemberId) {
        let coordinator_id = self.core.synced.coordinator;
        if let Some(process) = self.core.membership.process(coordinator_id).cloned() {
            self.core.send(to, Message::Redirect(process));
        }
    }

    /// Activates the first generation once all processes have joined.
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
        for process in membership.voters().filter(|process| process.id != me) {
            let (now, number) = (self.core.now, generation.number);
            self.core.links.open(now, process.id, &process.at);
            let activate = Message::Activate {
                membership: Arc::clone(&membership),
                accepted: true,
            };
            self.core.links.send(process.id, number, activate);
        }
        let now = self.core.now;
        self.enter(membership, now, None);
    }

    /// Gives up the first generation.
    fn abort_formation(&mut self, bytes: Arc<[u8]>) {
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
        self.core.formation_aborted = Some(Arc::clone(&bytes));
        self.core.events.push_back(Event::FormationAborted(bytes));
    }

    /// Handles a candidate's request for this member's vote.
    fn handle_vote_request(&mut self, from: MemberId, vote_request: VoteRequest) {
        let VoteRequest {
            term,
            ended,
            unresponsive,
            already_coordinates,
        } = vote_request;
        for ended in &ended {
            match &mut self.role {
                Role::Coordinating(coordinator) => coordinator.handle_end(&mut self.core, ended),
                _ => _ = self.core.learn_end(ended),
            }
        }
        if let Role::Coordinating(coordinator) = &self.role
            && coordinator.is_leaving()
        {
            return;
        }
        let core = &self.core;
        // The candidate has left, and would coordinate members that do not follow it.
        if core.has_ended(from) {
            return;
        }
        let twice = core.mistakes.makes(Mistake::VotesTwice);
        let hears = match &self.role {
            Role::Following { heard, .. } => {
                let timeout = if unresponsive {
                    core.timing.heartbeat_interval * 2
                } else {
                    core.timing.suspect_after
                };
                let coordinator_id = core.synced.coordinator;
                let is_heard =
                    core.now.since(*heard) < timeout && core.links.is_ready(coordinator_id);
                !already_coordinates && is_heard && !core.has_ended(coordinator_id)
            }
            Role::Coordinating(coordinator) => coordinator.has_recent_majority(core),
            _ => false,
        };
        // Among candidates that do not coordinate yet, the first in failover order takes precedence.
        let promised = core.term.coordinator;
        let prefers = from != promised && !already_coordinates && !core.is_before(from, promised);
        let prefers = prefers && !core.sent_leave;
        let prefers = prefers && (self.is_bound() || matches!(self.role, Role::Candidate(_)));
        if (term < core.term || hears || prefers) && !twice {
            let has_coordinator =
                matches!(self.role, Role::Following { .. } | Role::Coordinating(_));
            let has_coordinator = hears || (has_coordinator && core.synced == core.term);
            let own = if has_coordinator {
                core.synced
            } else {
                core.term
            };
            let follows = Message::Follows {
                term: own,
                already_coordinates: has_coordinator,
            };
            self.core.send(from, follows);
            match &mut self.role {
                Role::Candidate(candidate) if term > own => {
                    let defers = candidate.overtaken(&mut self.core, term);
                    if defers {
                        self.wait_for_others();
                    }
                }
                Role::Coordinating(coordinator) if term > own => {
                    let next = coordinator.coordinate_later_term(&self.core, term);
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
        let coordinator_id = self.core.synced.coordinator;
        // A leaving coordinator waits for this acknowledgement.
        self.core.links.acknowledge(coordinator_id);
        self.core.links.keep(coordinator_id, false);
        self.wait(unresponsive);
        let hold = self.core.timing.hold;
        if let Role::Waiting(waiting) = &mut self.role {
            waiting.bound = self.core.now.after(hold);
            waiting.next_try = waiting.next_try.max(waiting.bound);
        }
        let report = Box::new(self.core.report());
        self.core.send(from, Message::Vote { term, report });
    }

    /// Follows a coordinator that has admitted this member.
    fn sync_log(&mut self, from: MemberId, term: Term, start: u64, entries: Vec<Arc<Entry>>) {
        if term < self.core.term || term.coordinator != from || start > self.core.log.end() {
            return;
        }
        // The coordinator may have decided based on this member's report before the member received another entry.
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
        self.core.held_replies.clear();
        self.role = Role::Following {
            heard: self.core.now,
            asked: self.core.now,
        };
        self.core.without_coordinator_since = None;
        self.core.links.keep(from, true);
        self.core.events.push_back(Event::Coordinator(from));
        self.redirect_observers();
        for (at, entry) in (start..).zip(entries) {
            if !self.appended(at, entry) {
                return;
            }
        }
        // The ends that this member has learned of since its vote.
        let mut ends = self.core.known_ends();
        ends.retain(|ended| self.core.log.departure_proven(ended.member) != Some(true));
        for ended in ends {
            self.core.send(from, Message::ReportEnd(ended));
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
        for broadcast in unlogged {
            self.core.send(from, Message::Broadcast(broadcast));
        }
        if self.core.has_ended(from) {
            self.handle_coordinator_lost(false);
        }
    }

    /// Handles the next entry of the log. Returns whether this member still takes part.
    fn appended(&mut self, at: u64, entry: Arc<Entry>) -> bool {
        if at > self.core.log.end() {
            // The coordinator then sends the missing entries.
            self.ask_to_follow(self.core.synced);
        }
        if at != self.core.log.end() {
            return true;
        }
        self.core.deliver(Arc::clone(&entry));
        let Entry::Departed {
            member, departure, ..
        } = &*entry
        else {
            return true;
        };
        if *member == self.core.id() {
            match departure {
                Departure::Lost(_) => {
                    let coordinator_id = self.core.synced.coordinator;
                    self.exclude(Exclusion::Superseded(coordinator_id));
                }
                Departure::Left | Departure::Failed(_) => self.transition(Some(Transition::Left)),
            }
            return false;
        }
        if *member == self.core.synced.coordinator {
            self.handle_coordinator_lost(false);
            return false;
        }
        true
    }

    /// Handles the operator's decision while another member coordinates, as far as this one knows, or none does.
    fn handle_operator_decision(&mut self, decision: OperatorDecision) {
        if decision.generation != self.core.generation() {
            return;
        }
        if matches!(self.role, Role::Following { .. }) {
            // The coordinator may be unreachable without this member having noticed.
            let coordinator_id = self.core.synced.coordinator;
            self.core
                .send(coordinator_id, Message::OperatorDecision(decision.clone()));
        }
        self.core.operator.get_or_insert_with(|| Arc::new(decision));
        self.advance();
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
                let broadcast = self.core.make_broadcast(topic, bytes);
                match &mut self.role {
                    Role::Coordinating(coordinator) => {
                        coordinator.enqueue_broadcast(&mut self.core, broadcast);
                        self.advance();
                    }
                    Role::Following { .. } => {
                        let coordinator_id = self.core.synced.coordinator;
                        self.core
                            .send(coordinator_id, Message::Broadcast(broadcast));
                    }
                    _ => {}
                }
            }
            Command::SendDirect { to, bytes } => {
                let (from, coordinator_id) = (self.core.id(), self.core.synced.coordinator);
                let message = Message::Direct { from, to, bytes };
                match &mut self.role {
                    Role::Coordinating(coordinator) => {
                        let next = coordinator.message(&mut self.core, from, message);
                        self.transition(next);
                    }
                    Role::Following { .. } => self.core.send(coordinator_id, message),
                    _ => {}
                }
            }
            Command::Request(bytes) => {
                let (me, coordinator_id) = (self.core.id(), self.core.synced.coordinator);
                match &self.role {
                    Role::Coordinating(_) => self.core.events.push_back(Event::Request(me, bytes)),
                    Role::Following { .. } => {
                        self.core.send(coordinator_id, Message::Request(bytes))
                    }
                    _ => {}
                }
            }
            Command::Reply { to, bytes } => match &mut self.role {
                Role::Coordinating(_) | Role::Forming(_) if to == self.core.id() => {
                    self.core.events.push_back(Event::Reply(bytes));
                }
                Role::Coordinating(coordinator) => coordinator.reply(&mut self.core, to, bytes),
                // This process may coordinate in a later term.
                Role::Candidate(_) | Role::Waiting(_) => self.core.hold_reply(to, bytes),
                Role::Forming(_) => self.core.send(to, Message::Reply(bytes)),
                _ => {}
            },
            Command::AbortFormation(bytes) => self.abort_formation(bytes),
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
                    Role::Coordinating(coordinator) => {
                        let next = coordinator.own_reconfigure_request(&mut self.core);
                        self.transition(next);
                    }
                    Role::Following { .. } => {
                        let coordinator_id = self.core.synced.coordinator;
                        self.core
                            .send(coordinator_id, Message::Reconfigure(reconfigure_request));
                    }
                    _ => {}
                }
            }
            Command::CancelReconfigure => {
                if let Some((reconfigure_request, _)) = self.core.reconfigure_request.take()
                    && matches!(self.role, Role::Following { .. })
                {
                    let coordinator_id = self.core.synced.coordinator;
                    self.core.send(
                        coordinator_id,
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
                        let coordinator_id = self.core.synced.coordinator;
                        self.core.send(coordinator_id, Message::Abstain);
                    }
                    // The next coordinator receives it with the vote.
                    _ => self.advance(),
                }
            }
            Command::Leave(departure) => {
                self.core.leaving = Some(departure.clone());
                match &mut self.role {
                    Role::Coordinating(coordinator) => {
                        let next = coordinator.leave(&mut self.core, departure);
                        self.transition(next);
                    }
                    Role::Following { .. } => {
                        let coordinator_id = self.core.synced.coordinator;
                        self.core.send_leave(coordinator_id);
                    }
                    // `finish_joining` completes this.
                    Role::Joining(joining) => {
                        joining.cancelled_since = Some(self.core.now);
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
            Command::OperatorDecision(decision) => match &mut self.role {
                Role::Coordinating(coordinator) => {
                    let me = self.core.id();
                    let next = coordinator.message(
                        &mut self.core,
                        me,
                        Message::OperatorDecision(decision),
                    );
                    self.transition(next);
                }
                _ => {
                    let me = self.core.id();
                    for id in decision.members.iter().filter(|id| **id != me) {
                        self.core
                            .reach(*id, Message::OperatorDecision(decision.clone()));
                    }
                    self.handle_operator_decision(decision);
                }
            },
            Command::Claimed(generation, voter) => {
                if generation == self.core.membership.generation {
                    self.core.claimed = Some(voter);
                    self.advance();
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

    fn redirect(&mut self, core: &mut Core, process: &ProcessInfo) {
        self.asked = process.id;
        self.send(core, &process.at);
    }

    fn send(&self, core: &mut Core, at: &str) {
        core.consented = core.now;
        let (process, role) = (core.me.clone(), self.role);
        core.links.open(core.now, self.asked, at);
        core.links.keep(self.asked, true);
        core.send(self.asked, Message::Join { process, role });
    }
}

//! The machine of one process of a job.
//!
//! ```text
//! Joining ──active──▶ Following ──coordinator lost──▶ Waiting ──its turn──▶ Candidate ──a majority──▶ Leading
//!    Forming ──all are there──▶ Leading   ▲                │ ▲                  │                        │
//!                                         └──lead──────────┘ └────a later term──┴────────────────────────┘
//! any ──no majority, left behind, passed over──▶ Out          any ──leave──▶ Left
//! ```
//!
//! A coordinator is lost when its end is proven, its session is lost, it has left, or it leaves a request unanswered for
//! [`Timing::mute`]. The first in line asks for votes at once, each further one [`Timing::stagger`] later.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::candidate::{Candidate, Outcome, no_majority};
use super::coordinator::{Coordinator, Next};
use super::core::{Core, Event};
use super::forming::Forming;
use super::id::{Generation, MemberId, Membership, Peer, SharedMembership, Term, Time};
use super::link::{Connection, LinkEvent, Links, Wire};
use super::log::{Entry, OperatorWord};
use super::message::{Beat, Ended, Exclusion, Frame, Message, Place, Proof, Pulse, Solicit};
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
    Say {
        /// The topic.
        topic: String,
        /// The content.
        bytes: Vec<u8>,
    },
    /// Sends a message to one member.
    Tell {
        /// The receiver.
        to: MemberId,
        /// The content.
        bytes: Vec<u8>,
    },
    /// Sends a request to the coordinator's program, which may be this process's. Lost with the coordinator, and dropped while there is
    /// none: the program has to repeat it at [`Event::Coordinator`].
    Ask(Arc<[u8]>),
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
    Dismiss(Arc<[u8]>),
    /// Asks to go on to the next generation.
    GoOn {
        /// How long this is valid, in nanoseconds.
        patience: u64,
        /// Whether to go on without the members that do not come in time, if all agree.
        leaves_behind: bool,
    },
    /// Withdraws the wish to go on.
    StayHere,
    /// Goes on into no successor, for good. Others need not wait for this member, which stays a voter until they have gone
    /// on without it. A later wish fails at once.
    Abstain,
    /// Leaves, or fails.
    Leave(Departure),
    /// The operator's decision.
    Operator(OperatorWord),
    /// The claim for this generation was won.
    Claimed(Generation),
}

/// An output of a machine for its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// A request of the sessions.
    Wire(Wire),
    /// An event for the program.
    Event(Event),
}

/// The role in which a process joins a job.
#[derive(Clone, Debug)]
pub enum Seat {
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
    Out,
    Left,
}

#[derive(Debug)]
struct Joining {
    at: Vec<String>,
    seat: Place,
    tries: u32,
    /// The process that was asked.
    asked: MemberId,
    /// Since when it gives up, and waits until the processes that it has asked know that.
    gives_up: Option<Time>,
}

/// For how long a process that gives up joining waits until that is known, in nanoseconds.
const FAREWELL: u64 = 1_000_000_000;

/// The state without a coordinator.
#[derive(Debug)]
struct Waiting {
    turn: Time,
    /// Whether the coordinator left requests unanswered.
    mute: bool,
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
    pub fn new(me: Peer, seat: Seat, timing: Timing, mistakes: Mistakes, now: Time) -> Self {
        let number = match &seat {
            Seat::First { number, .. }
            | Seat::Rank { number, .. }
            | Seat::Witness { number, .. }
            | Seat::Absent { number, .. } => *number,
            Seat::Joiner { .. } => 0,
        };
        let proposer = me.id;
        let nobody = Membership::new(Generation { number, proposer }, Vec::new(), Vec::new());
        let mut core = Core::new(me, Arc::new(nobody), timing, mistakes);
        core.now = now;
        let joining = |at, seat| {
            Role::Joining(Joining {
                at,
                seat,
                tries: 0,
                asked: Links::stranger(0),
                gives_up: None,
            })
        };
        let absent = match &seat {
            Seat::Absent { why, .. } => Some(why.clone()),
            _ => None,
        };
        let role = match seat {
            Seat::First {
                size, witnesses, ..
            } => Role::Forming(Forming::new(&core.me, size, witnesses)),
            Seat::Rank { at, .. } => joining(vec![at], Place::Rank),
            Seat::Witness { at, .. } => joining(vec![at], Place::Witness),
            Seat::Joiner { at } => joining(at, Place::Joiner),
            Seat::Absent { at, .. } => joining(vec![at], Place::Absent),
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
        event.or_else(|| self.core.links.poll().map(Output::Wire))
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

    /// Returns the connection that carries the session with a process, if there is one.
    #[must_use]
    pub fn connection_of(&self, id: MemberId) -> Option<Connection> {
        self.core.links.connection_of(id)
    }

    /// Returns the observers, as far as this process knows.
    #[must_use]
    pub fn observers(&self) -> Vec<MemberId> {
        self.core.observers.keys().copied().collect()
    }

    /// Returns the process whose session a connection carries, if any.
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
            Role::Out | Role::Left => true,
            Role::Following { .. } | Role::Leading(_) => !self.core.asks(),
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
        !matches!(self.role, Role::Out | Role::Left)
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
        self.stop_joining();
    }

    /// Ends a process that gives up joining, once that is known.
    fn stop_joining(&mut self) {
        if let Role::Joining(joining) = &self.role
            && let Some(since) = joining.gives_up
        {
            let links = &self.core.links;
            let is_vain = !matches!(joining.seat, Place::Absent) && !links.any_ready();
            let is_known = links.all_flushed() || is_vain;
            if is_known || self.core.now.since(since) >= FAREWELL {
                self.go(Some(Next::Left));
            }
        }
    }

    /// Returns when to call [`handle_timeout`](Self::handle_timeout) at the latest.
    #[must_use]
    pub fn next_timeout(&self) -> Time {
        let core = &self.core;
        let role = match &self.role {
            Role::Joining(joining) => match joining.gives_up {
                Some(since) => since.after(FAREWELL),
                None => Time::NEVER,
            },
            Role::Forming(_) | Role::Out => Time::NEVER,
            Role::Left => return Time::NEVER,
            Role::Following { heard, asked } => (*heard.max(asked)).after(core.timing.mute),
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
                let due = (*heard.max(asked)).after(self.core.timing.mute);
                let is_mute = now >= due;
                if is_mute && now.since(due) > self.core.timing.beat {
                    // This process itself was delayed.
                    *asked = now;
                } else if is_mute && self.core.asks() {
                    self.bereaved(true);
                } else if is_mute {
                    // The coordinator may follow another by now.
                    *asked = now;
                    self.follow_leader(self.core.synced);
                }
            }
            Role::Waiting(waiting) if now >= waiting.turn || self.core.gives_up() => {
                let mute = waiting.mute;
                if self.core.gives_up() {
                    let why = no_majority(&self.core, &BTreeSet::new());
                    self.out(why);
                } else if self.core.is_witness() {
                    self.look_for_coordinator();
                } else {
                    self.role = Role::Candidate(Candidate::start(&mut self.core, mute, false));
                    self.settle();
                }
            }
            Role::Leading(coordinator) => {
                let next = coordinator.timeout(&mut self.core);
                self.go(next);
            }
            Role::Candidate(_) => self.settle(),
            _ => {}
        }
        self.drain();
        self.stop_joining();
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
                LinkEvent::Beat(from, beat) => self.beat(from, &beat),
                LinkEvent::Pulse(from, pulse) => {
                    if let Role::Leading(coordinator) = &mut self.role {
                        let next = coordinator.pulse(&mut self.core, from, pulse);
                        self.go(next);
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
                    self.go(next);
                }
                Some(Outcome::Stops(next)) => self.go(Some(next)),
                Some(Outcome::Waits) => self.wait_for_others(),
                None => {}
            },
            Role::Leading(coordinator) => {
                let next = coordinator.settle(&mut self.core);
                self.go(next);
            }
            _ => {}
        }
    }

    fn go(&mut self, next: Option<Next>) {
        match next {
            None => {}
            Some(Next::Enter(membership, lease)) => self.enter(membership, lease, None),
            Some(Next::Out(why)) => self.out(why),
            Some(Next::Follow(term)) => self.follow(term),
            Some(Next::Stand(term)) => {
                self.core.term = self.core.term.max(term);
                self.role = Role::Candidate(Candidate::start(&mut self.core, false, true));
                self.settle();
            }
            Some(Next::Left) => {
                self.role = Role::Left;
                self.core.links.close_all();
                self.core.events.push_back(Event::Left);
            }
        }
    }

    fn out(&mut self, why: Exclusion) {
        if self.is_in() {
            self.role = Role::Out;
            let (generation, message) = self.core.out_for(false, 0);
            self.core.links.send_all(generation, &message);
            // Others have named this process in the generation to which it does not come.
            let (me, ahead) = (self.core.id(), self.core.ahead.as_ref());
            if let Some(ahead) = ahead.filter(|ahead| ahead.votes(me)) {
                let (generation, message) = self.core.out_for(true, ahead.generation.number);
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
            return self.out(Exclusion::LeftBehind(generation));
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
            return self.go(next);
        }
        self.core.events.push_back(Event::Coordinator(proposer));
        self.core.links.keep(proposer, true);
        self.redirect_observers();
        for ended in self.core.ends() {
            self.core.send(proposer, Message::Testify(ended));
        }
        self.core.say_goodbye(proposer);
        self.role = Role::Following {
            heard: self.core.now,
            asked: self.core.now,
        };
        if self.core.has_ended(proposer) {
            self.bereaved(false);
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
    fn bereaved(&mut self, mute: bool) {
        let leader = self.core.synced.leader;
        // A leaving coordinator waits for that.
        self.core.links.acknowledge(leader);
        self.core.links.keep(leader, false);
        self.wait(mute);
        if let Role::Waiting(waiting) = &self.role
            && waiting.turn <= self.core.now
            && !self.core.is_witness()
        {
            self.role = Role::Candidate(Candidate::start(&mut self.core, mute, false));
            self.settle();
        } else if let Some(ended) = self.core.end_of(leader) {
            // The first in line may be on a host where that is not known.
            if let Some(first) = self.line().first().copied() {
                self.core.reach(first, Message::Testify(ended));
            }
        }
    }

    /// Waits for its turn in a failover.
    fn wait(&mut self, mute: bool) {
        let me = self.core.id();
        let line = self.line();
        let place = match line.iter().position(|id| *id == me) {
            Some(_) if self.core.abstains || self.core.said_goodbye => line.len(),
            Some(place) => place,
            // A witness asks the coordinator that the others have by then.
            None => usize::from(self.core.is_witness()),
        };
        let turn = self.core.now.after(place as u64 * self.core.timing.stagger);
        let bound = Time::default();
        self.core.lost.get_or_insert(self.core.now);
        self.role = Role::Waiting(Waiting { turn, mute, bound });
    }

    /// Looks for the coordinator of a witness, which does not coordinate itself: it asks one member after the other, beginning with the
    /// one that it has voted for.
    fn look_for_coordinator(&mut self) {
        let core = &self.core;
        let waited = core.lost.map_or(0, |since| core.now.since(since)) / core.timing.stagger;
        let promised = Some(core.term.leader).filter(|id| !core.is_out(*id));
        let line: Vec<_> = promised.into_iter().chain(self.line()).collect();
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
    fn line(&self) -> Vec<MemberId> {
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
            .filter(|peer| peer.id != lost && !core.is_out(peer.id))
            .collect();
        line.sort_by_key(|peer| is_beside(peer));
        line.into_iter().map(|peer| peer.id).collect()
    }

    fn ended(&mut self, member: MemberId, proof: Proof) {
        if matches!(self.role, Role::Forming(_)) {
            self.core.links.close(member);
            return self.fell(member, |_, peer| proof.departure(peer.pid));
        }
        let counts = self.core.is_current();
        self.know_end(Ended {
            member,
            proof,
            counts,
        });
    }

    fn know_end(&mut self, ended: Ended) {
        let member = ended.member;
        if let Role::Leading(coordinator) = &mut self.role {
            coordinator.end_is_known(&mut self.core, &ended);
            return self.settle();
        }
        let is_new = self.core.learn_end(&ended);
        match &self.role {
            Role::Following { .. } if self.core.synced.leader == member => self.bereaved(false),
            Role::Following { .. } if is_new => {
                let leader = self.core.synced.leader;
                self.core.send(leader, Message::Testify(ended));
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
                self.go(next);
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
                self.bereaved(false);
            }
            Role::Joining(joining) if joining.gives_up.is_none() => joining.ask(&mut self.core),
            Role::Forming(_) => {
                let resume = self.core.timing.resume;
                let heard = Time(self.core.now.0.saturating_sub(2 * resume));
                self.fell(peer, |core, _| core.unreachable(peer, heard, resume));
            }
            _ => self.settle(),
        }
    }

    /// Handles the end of a process that may have joined, before the first generation is active.
    fn fell(&mut self, id: MemberId, why: impl FnOnce(&Core, &Peer) -> Departure) {
        if let Role::Forming(forming) = &mut self.role
            && let Some(peer) = forming.fall(id)
        {
            let departure = why(&self.core, &peer);
            self.core.events.push_back(Event::Fell(id.slot, departure));
        }
    }

    fn renewed(&mut self, peer: MemberId) {
        match &mut self.role {
            Role::Leading(coordinator) => {
                let next = coordinator.renewed(&mut self.core, peer);
                self.go(next);
            }
            Role::Following { .. } if peer == self.core.synced.leader => {
                self.follow(self.core.synced);
            }
            _ => self.settle(),
        }
    }

    fn beat(&mut self, from: MemberId, beat: &Beat) {
        let own = self.core.generation();
        if self.is_joining() {
            // The message overtakes the one that makes this process a member.
            return;
        }
        if !self.is_in() {
            return self.core.say_out(from, beat.generation);
        }
        if beat.generation != own {
            if beat.generation < own {
                self.send_ahead(from);
            }
            return;
        }
        if beat.term != self.core.term || self.core.synced != beat.term {
            if beat.term < self.core.term {
                let (term, leads) = (self.core.term, self.core.synced == self.core.term);
                self.core.send(from, Message::Follows { term, leads });
            }
            return;
        }
        if let Role::Following { heard, .. } = &mut self.role {
            *heard = self.core.now;
            self.core.hear(beat);
            let pulse = Pulse {
                generation: own,
                term: beat.term,
                number: beat.number,
                progress: std::mem::take(&mut self.core.has_progressed),
            };
            self.core.links.send_now(from, Frame::Pulse(pulse));
        }
    }

    fn send_ahead(&mut self, to: MemberId) {
        let membership = Arc::clone(&self.core.membership);
        self.core.send(to, Message::Ahead(membership));
    }

    fn message(&mut self, from: MemberId, generation: u64, message: Message) {
        match message {
            Message::Activate {
                membership,
                accepted,
            } if self.is_in() => return self.activated(from, membership, accepted),
            Message::Ahead(membership) => return self.ahead(membership),
            Message::Redirect(peer) => {
                if let Role::Joining(joining) = &mut self.role {
                    joining.redirect(&mut self.core, &peer);
                }
                return;
            }
            Message::Join { .. } | Message::Observe(_) if self.core.dismissed.is_some() => {
                let bytes = self.core.dismissed.clone().unwrap_or_default();
                self.core.events.push_back(Event::Joined(from));
                return self.core.send(from, Message::Dismissed(bytes));
            }
            Message::Join { peer, seat } => return self.join(from, peer, seat),
            Message::Observe(peer) => return self.observe(from, peer),
            Message::Dismissed(bytes) => {
                if matches!(self.role, Role::Joining(_)) {
                    self.role = Role::Out;
                    self.core.links.acknowledge(from);
                    self.core.links.close_all();
                    self.core.events.push_back(Event::Dismissed(bytes));
                }
                return;
            }
            Message::Behind if self.is_in() => {
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
                Message::Solicit(_)
                    | Message::Append { .. }
                    | Message::Activate { .. }
                    | Message::Propose { .. }
            ) {
                self.core.say_out(from, generation);
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
            if !matches!(message, Message::TurnAway(_) | Message::Leave(_)) {
                self.core.send(from, Message::Behind);
            }
            return;
        }
        match message {
            Message::Solicit(solicit) => self.solicited(from, solicit),
            Message::Testify(ended) if !matches!(self.role, Role::Leading(_)) => {
                self.know_end(ended)
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
                Message::Lead {
                    term,
                    start,
                    entries,
                },
            ) if term > self.core.term => {
                self.led(from, term, start, entries);
            }
            (Role::Leading(coordinator), message) => {
                let next = coordinator.message(&mut self.core, from, message);
                self.go(next);
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
                        .push_back(Event::Fell(from.slot, departure));
                } else {
                    self.fell(from, |_, _| departure);
                }
            }
            (Role::Forming(_), Message::Ask(bytes)) if self.core.observers.contains_key(&from) => {
                self.core.events.push_back(Event::Asked(from, bytes));
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
                let proof = Proof::Goodbye(departure);
                let (member, counts) = (from, true);
                self.know_end(Ended {
                    member,
                    proof,
                    counts,
                });
            }
            (Role::Candidate(candidate), Message::Follows { term, leads }) => {
                if leads && !self.core.is_out(term.leader) {
                    // That process coordinates: it decides whether this member follows.
                    self.follow_leader(term);
                } else if term > candidate.term() && candidate.overtaken(&mut self.core, term) {
                    self.wait_for_others();
                }
            }
            (
                _,
                Message::Lead {
                    term,
                    start,
                    entries,
                },
            ) => self.led(from, term, start, entries),
            (Role::Following { heard, .. }, Message::Append { term, at, entry }) => {
                if term == self.core.synced {
                    *heard = self.core.now;
                    self.appended(at, entry);
                }
            }
            (Role::Following { .. }, Message::CutOff { term, why }) if term == self.core.synced => {
                self.out(why)
            }
            (Role::Waiting(_), Message::CutOff { term, why }) if term == self.core.term => {
                self.out(why)
            }
            (Role::Following { .. }, Message::Propose { term, membership }) => {
                if self.core.accept(term, &membership) {
                    let generation = membership.generation;
                    self.core.send(from, Message::Accepted { term, generation });
                }
            }
            (Role::Following { .. }, Message::NoSuccessor { wish, missing }) => {
                if self
                    .core
                    .wish
                    .take_if(|(own, _)| own.number == wish)
                    .is_some()
                {
                    self.core.events.push_back(Event::NoSuccessor(missing));
                }
            }
            (Role::Following { .. }, Message::LeaveBehind) => {
                // A wish on its way counts as one that has arrived.
                if self.core.wish.is_none() {
                    self.core.send(from, Message::Released);
                    let generation = Generation {
                        number: self.core.generation() + 1,
                        proposer: from,
                    };
                    self.out(Exclusion::LeftBehind(generation));
                }
            }
            (
                Role::Following { .. } | Role::Waiting(_) | Role::Candidate(_),
                Message::TurnAway(why),
            ) => {
                self.out(why);
            }
            (Role::Following { .. }, Message::Follows { term, leads: true }) => {
                if term > self.core.synced {
                    self.follow(term);
                }
            }
            (Role::Waiting(_), Message::Follows { term, leads: true })
                if !self.core.is_out(term.leader) =>
            {
                self.follow_leader(term);
            }
            (Role::Following { .. } | Role::Waiting(_), Message::Vote { .. }) => {
                let leads = matches!(self.role, Role::Following { .. });
                let term = self.core.term;
                self.core.send(from, Message::Follows { term, leads });
            }
            (Role::Following { .. }, Message::Tell { from, bytes, .. }) => {
                self.core.events.push_back(Event::Told(from, bytes));
            }
            (Role::Following { .. }, Message::Reply(bytes)) if from == self.core.synced.leader => {
                self.core.events.push_back(Event::Replied(bytes));
            }
            (
                Role::Following { .. } | Role::Waiting(_) | Role::Candidate(_),
                Message::Operator(word),
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

    fn join(&mut self, from: MemberId, peer: Peer, seat: Place) {
        match (&mut self.role, seat) {
            (Role::Forming(_), Place::Absent) => self.core.links.keep(from, true),
            (Role::Forming(forming), seat) if peer.id == from => match forming.join(peer, seat) {
                Some(is_new) => {
                    self.core.links.keep(from, true);
                    if is_new {
                        self.core.events.push_back(Event::Joined(from));
                    }
                    self.form();
                }
                None => self.core.links.close(from),
            },
            (Role::Leading(coordinator), Place::Joiner) => {
                let next = coordinator.message(&mut self.core, from, Message::Join { peer, seat });
                self.go(next);
            }
            (Role::Following { .. }, Place::Joiner) => self.redirect(from),
            // It tries again elsewhere.
            _ => self.core.links.close(from),
        }
    }

    /// Handles a process that is no member and wants to observe.
    fn observe(&mut self, from: MemberId, peer: Peer) {
        match &mut self.role {
            Role::Leading(coordinator) => {
                let next = coordinator.message(&mut self.core, from, Message::Observe(peer));
                self.go(next);
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
                self.core.send(from, Message::Forms(generation));
            }
            Role::Joining(_) => self.core.links.close(from),
            Role::Out | Role::Left => self.core.say_out(from, u64::MAX),
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
            self.core.send(id, Message::Dismissed(Arc::clone(&bytes)));
            self.core.links.keep(id, false);
        }
        self.role = Role::Out;
        self.core.dismissed = Some(Arc::clone(&bytes));
        self.core.events.push_back(Event::Dismissed(bytes));
    }

    /// Handles a candidate's request for this member's vote.
    fn solicited(&mut self, from: MemberId, solicit: Solicit) {
        let Solicit {
            term,
            ended,
            mute,
            leads,
        } = solicit;
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
        // The candidate has said goodbye, and would lead members that do not follow it.
        if core.has_ended(from) {
            return;
        }
        let twice = core.mistakes.makes(Mistake::VotesTwice);
        let hears = match &self.role {
            Role::Following { heard, .. } => {
                let limit = if mute {
                    core.timing.beat * 2
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
        let prefers = prefers && !core.said_goodbye;
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
                    let next = coordinator.stand(&self.core, term);
                    self.go(Some(next));
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
        self.wait(mute);
        let hold = self.core.timing.hold;
        if let Role::Waiting(waiting) = &mut self.role {
            waiting.bound = self.core.now.after(hold);
            waiting.turn = waiting.turn.max(waiting.bound);
        }
        let report = Box::new(self.core.report());
        self.core.send(from, Message::Vote { term, report });
    }

    /// Follows a coordinator that has taken this member in.
    fn led(&mut self, from: MemberId, term: Term, start: u64, entries: Vec<Arc<Entry>>) {
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
            return self.out(Exclusion::PassedOver(from));
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
        if let Some((mut wish, since)) = self.core.wish {
            wish.patience = wish.patience.saturating_sub(self.core.now.since(since));
            self.core.send(from, Message::GoOn(wish));
        }
        self.core.say_goodbye(from);
        if self.core.renounce() && !self.core.mistakes.makes(Mistake::AbstentionForgotten) {
            self.core.send(from, Message::Abstain);
        }
        // Messages that were not in the report.
        let unheard: Vec<_> = self.core.unheard.iter().cloned().collect();
        for said in unheard {
            self.core.send(from, Message::Say(said));
        }
        if self.core.has_ended(from) {
            self.bereaved(false);
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
                    self.out(Exclusion::PassedOver(leader));
                }
                Departure::Left | Departure::Failed(_) => self.go(Some(Next::Left)),
            }
            return false;
        }
        if *member == self.core.synced.leader {
            self.bereaved(false);
            return false;
        }
        true
    }

    /// Handles the operator's decision where another member coordinates, as far as this one knows, or none.
    fn operator(&mut self, word: OperatorWord) {
        if word.generation != self.core.generation() {
            return;
        }
        if matches!(self.role, Role::Following { .. }) {
            // The coordinator may be out of reach without this member having noticed.
            let leader = self.core.synced.leader;
            self.core.send(leader, Message::Operator(word.clone()));
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
            Command::Say { topic, bytes } => {
                let said = self.core.say(topic, bytes);
                match &mut self.role {
                    Role::Leading(coordinator) => {
                        coordinator.say(&mut self.core, said);
                        self.settle();
                    }
                    Role::Following { .. } => {
                        let leader = self.core.synced.leader;
                        self.core.send(leader, Message::Say(said));
                    }
                    _ => {}
                }
            }
            Command::Tell { to, bytes } => {
                let (from, leader) = (self.core.id(), self.core.synced.leader);
                let message = Message::Tell { from, to, bytes };
                match &mut self.role {
                    Role::Leading(coordinator) => {
                        let next = coordinator.message(&mut self.core, from, message);
                        self.go(next);
                    }
                    Role::Following { .. } => self.core.send(leader, message),
                    _ => {}
                }
            }
            Command::Ask(bytes) => {
                let (me, leader) = (self.core.id(), self.core.synced.leader);
                match &self.role {
                    Role::Leading(_) => self.core.events.push_back(Event::Asked(me, bytes)),
                    Role::Following { .. } => self.core.send(leader, Message::Ask(bytes)),
                    _ => {}
                }
            }
            Command::Reply { to, bytes } => {
                if !matches!(self.role, Role::Leading(_) | Role::Forming(_)) {
                    return;
                }
                match to == self.core.id() {
                    true => self.core.events.push_back(Event::Replied(bytes)),
                    false => self.core.send(to, Message::Reply(bytes)),
                }
            }
            Command::Dismiss(bytes) => self.dismiss(bytes),
            Command::GoOn { .. } if self.core.abstains || self.core.is_witness() => {
                self.core.events.push_back(Event::NoSuccessor(Vec::new()));
            }
            Command::GoOn {
                patience,
                leaves_behind,
            } => {
                let wish = self.core.wish(patience, leaves_behind);
                match &mut self.role {
                    Role::Leading(coordinator) => {
                        let next = coordinator.own_wish(&mut self.core);
                        self.go(next);
                    }
                    Role::Following { .. } => {
                        let leader = self.core.synced.leader;
                        self.core.send(leader, Message::GoOn(wish));
                    }
                    _ => {}
                }
            }
            Command::StayHere => {
                if let Some((wish, _)) = self.core.wish.take()
                    && matches!(self.role, Role::Following { .. })
                {
                    let leader = self.core.synced.leader;
                    self.core.send(leader, Message::StayHere(wish.number));
                }
            }
            Command::Abstain if self.is_joining() || self.core.is_witness() => {}
            Command::Abstain => {
                self.core.abstains = true;
                self.core.wish = None;
                match &self.role {
                    Role::Following { .. } if self.core.renounce() => {
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
                        self.go(next);
                    }
                    Role::Following { .. } => {
                        let leader = self.core.synced.leader;
                        self.core.say_goodbye(leader);
                    }
                    // `stop_joining` does the rest.
                    Role::Joining(joining) => {
                        joining.gives_up = Some(self.core.now);
                        let generation = self.core.generation();
                        let leave = Message::Leave(departure);
                        match joining.seat {
                            Place::Absent => self.core.links.send(joining.asked, generation, leave),
                            _ => self.core.links.send_all(generation, &leave),
                        }
                    }
                    Role::Forming(_) => self.go(Some(Next::Left)),
                    _ => {}
                }
            }
            Command::Operator(word) => match &mut self.role {
                Role::Leading(coordinator) => {
                    let me = self.core.id();
                    let next = coordinator.message(&mut self.core, me, Message::Operator(word));
                    self.go(next);
                }
                _ => {
                    let me = self.core.id();
                    for id in word.members.iter().filter(|id| **id != me) {
                        self.core.reach(*id, Message::Operator(word.clone()));
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
        self.asked = Links::stranger(self.tries);
        self.send(core, &at);
    }

    fn redirect(&mut self, core: &mut Core, peer: &Peer) {
        self.asked = peer.id;
        self.send(core, &peer.at);
    }

    fn send(&self, core: &mut Core, at: &str) {
        core.consented = core.now;
        let (peer, seat) = (core.me.clone(), self.seat);
        core.links.open(core.now, self.asked, at);
        core.links.keep(self.asked, true);
        core.send(self.asked, Message::Join { peer, seat });
    }
}

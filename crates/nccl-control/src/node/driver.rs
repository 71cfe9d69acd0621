//! One process's part in a job: its machine, and all inputs to it.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use nccl_base::ranges::ranges;
use nccl_base::wire;

use super::acceptor::Acceptor;
use super::desk::{self, Desk};
use super::kept::Kept;
use super::vigil::{self, Vigil};
use crate::attached::{Attached, host};
use crate::client;
use crate::clock::Clock;
use crate::departure::{Departure, How, Lost, ProcessEnd, Sign, cut};
use crate::discovery::Found;
use crate::envelope::{self, Asking, Saying, Telling, replied};
use crate::environment::Rendezvous;
use crate::heartbeat::Said as Spoken;
use crate::incoming::{Incoming, Known, Push};
use crate::job::Job;
use crate::mailbox::Mailbox;
use crate::message::Incomplete;
use crate::process;
use crate::proto::{
    self, Command, Entry, Event, Exclusion, Generation, Input, Member, MemberId, Membership,
    OperatorWord, Output, Peer, Proof, SharedMembership, Wire,
};
use crate::reactor::{Reactor, Source};
use crate::request::Request;
use crate::service::LONGEST_NAME;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::transport::{Dialer, Driver, Ports};

/// All nodes of this process, which die one by one in tests.
#[cfg(test)]
pub(super) static ALL: Mutex<Vec<Weak<Node>>> = Mutex::new(Vec::new());

/// How long the end of a connection waits for the launcher's report of the process's end, and that report for the end of the
/// connection.
const WORD: Duration = Duration::from_millis(500);

/// The longest text of a report about the end of a process, in bytes.
const LONGEST_WORD: usize = 8 << 10;

/// One process's part in a job.
pub(crate) struct Node {
    pub(super) this: Weak<Self>,
    pub(super) job: Job,
    pub(super) me: MemberId,
    pub(super) dialer: Dialer,
    pub(super) acceptor: OnceLock<Arc<Acceptor>>,
    pub(super) state: Mutex<State>,
    /// The discovery that decides between two halves of the job, if there is one.
    pub(super) discovery: Option<Found>,
    /// How long it waits for a majority.
    pub(super) cut_off_after: Duration,
    /// Whether a rank that NCCL reaches stays, although the connection to it is lost.
    tolerates: bool,
    /// The value whose recordings it sends.
    pub(super) attached: Mutex<Option<Arc<dyn Attached>>>,
    /// Signalled when a generation is active, a wish has failed, or this process is excluded.
    pub(super) bell: Condvar,
}

pub(super) struct State {
    pub(super) member: Member,
    pub(super) clock: Clock,
    pub(super) ports: Ports,
    /// The mailbox of the line of the first generation, which exists before that line.
    pub(super) mailbox: Option<Arc<Mailbox>>,
    /// The lines of all generations that this process is or was in, and that a program still holds.
    pub(super) lines: Vec<LineOf>,
    /// The last coordinator, as far as this process knows.
    pub(super) coordinator: Option<MemberId>,
    /// While another process coordinates: when it was heard.
    pub(super) ear: Option<Ear>,
    /// Set when the process that was to form the first generation has ended: until when another may take its place, and its process id.
    pub(super) former: Option<(Instant, u64)>,
    /// Watches that process, until the first generation is active.
    pub(super) former_vigil: Option<Arc<Vigil>>,
    pub(super) desk: Desk,
    /// The members that have left this generation, in the order in which all learn of it.
    pub(super) gone: Vec<(MemberId, Departure)>,
    pub(super) vigils: HashMap<MemberId, Arc<Vigil>>,
    /// Members of which an observer will report how they end.
    pub(super) watched: BTreeSet<MemberId>,
    /// Ends, and until when each waits: for a report of the parent, or, where that has come, for a goodbye.
    pub(super) ends: Vec<(Instant, MemberId, Proof)>,
    /// How the processes have ended that started these members.
    pub(super) words: HashMap<MemberId, ProcessEnd>,
    /// Why the first generation was not formed.
    pub(super) dismissed: Option<Incomplete>,
    /// The slots that have received that reason.
    pub(super) dismissals: BTreeSet<u32>,
    /// The members that did not come, when a wish has failed.
    pub(super) refused: Option<Vec<MemberId>>,
    /// Why this process takes part no more.
    pub(super) excluded: Option<Exclusion>,
    pub(super) left: bool,
    pub(super) joiners: usize,
    progress: Sample,
    pub(super) alarm: Option<Instant>,
    pub(super) work: Work,
    /// In tests: after this many sends, this process behaves as if dead.
    #[cfg(test)]
    pub(super) fuse: Option<usize>,
}

/// One generation of the world, held by a program of this process.
pub(super) struct LineOf {
    pub(super) generation: u64,
    pub(super) rank: usize,
    pub(super) membership: SharedMembership,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) kept: Kept,
}

/// When the coordinator, which asks every member whether it is there, was heard.
pub(super) struct Ear {
    /// When it was last heard.
    heard: Instant,
    /// Whether the program was told that this is too long ago.
    is_silent: bool,
}

/// The progress of NCCL in a generation.
#[derive(Default)]
struct Sample {
    at: Option<Instant>,
    generation: u64,
    progress: u64,
}

/// The shortest time between two checks of it.
const SAMPLES: Duration = Duration::from_millis(400);

/// After how long without a heartbeat request a coordinator is silent. Nothing ends because of that.
const SILENT: Duration = Duration::from_secs(2);

/// A process that checks this late was delayed itself, and reports no member as silent.
const LATE: Duration = Duration::from_millis(500);

/// How long a launcher may take to stand in for the process that was to form the first generation.
const STANDS_IN: Duration = Duration::from_secs(1);

/// Work for when the lock is free.
#[derive(Default)]
pub(super) struct Work {
    pub(super) mailboxes: Vec<Arc<Mailbox>>,
    pub(super) said: Vec<Spoken>,
    pub(super) takes_places: bool,
    pub(super) claims: Vec<Generation>,
    pub(super) ends: bool,
    #[cfg(test)]
    pub(super) dies: bool,
}

impl Node {
    /// Makes a node, with a machine in this seat.
    pub(super) fn new(
        rendezvous: &Rendezvous,
        me: Peer,
        seat: proto::Seat,
        first: Option<client::Met>,
    ) -> Arc<Self> {
        let id = me.id;
        let timing = proto::Timing {
            give_up: rendezvous.cut_off_after.as_nanos() as u64,
            ..proto::Timing::default()
        };
        let member = Member::new(me, seat, timing, proto::Mistakes::default(), Clock::ORIGIN);
        let state = State {
            member,
            clock: Clock::start(),
            ports: Ports::starting_with(first),
            mailbox: None,
            lines: Vec::new(),
            coordinator: None,
            ear: None,
            former: None,
            former_vigil: None,
            desk: Desk::default(),
            gone: Vec::new(),
            vigils: HashMap::new(),
            watched: BTreeSet::new(),
            ends: Vec::new(),
            words: HashMap::new(),
            dismissed: None,
            dismissals: BTreeSet::new(),
            refused: None,
            excluded: None,
            left: false,
            joiners: 0,
            progress: Sample::default(),
            alarm: None,
            work: Work::default(),
            #[cfg(test)]
            fuse: None,
        };
        let node = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            job: rendezvous.job.clone(),
            me: id,
            dialer: Dialer::default(),
            acceptor: OnceLock::new(),
            state: Mutex::new(state),
            discovery: rendezvous.address.discovery().cloned(),
            cut_off_after: rendezvous.cut_off_after,
            tolerates: rendezvous.tolerates,
            attached: Mutex::default(),
            bell: Condvar::new(),
        });
        #[cfg(test)]
        ALL.lock().push(Arc::downgrade(&node));
        node
    }

    /// Asks the discovery whether this side of a cut network may go on, on a thread: the answer may take its time.
    fn claim(&self, generation: Generation) {
        let Some(Found(discovery)) = self.discovery.clone() else {
            return;
        };
        let (me, this) = (self.me, Weak::clone(&self.this));
        let ask = move || {
            let proposer = generation.proposer;
            let (slot, incarnation) = (proposer.slot, proposer.incarnation);
            let name = format!("{}-{slot}-{incarnation:x}", generation.number);
            let claimant = format!("{}-{:x}", me.slot, me.incarnation);
            let (by, generation_number) = (discovery.name(), generation.number);
            match discovery.claim(&name, &claimant) {
                Ok(won) => {
                    tracing::warn!(name: "nccl.rendezvous.claim", target: "nccl", generation = generation_number, by, won, "half of the voters are out of reach: the side that claims first goes on");
                    if won && let Some(node) = this.upgrade() {
                        node.command(Command::Claimed(generation));
                    }
                }
                Err(error) => {
                    tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "claim", by, %error, "half of the voters are out of reach, and which side goes on cannot be claimed");
                }
            }
        };
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-claim"))
            .spawn(ask);
        if let Err(error) = spawned {
            tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "claim", %error, "no thread for a claim can be had");
        }
    }

    /// Returns the job's name.
    pub(crate) fn job_name(&self) -> &str {
        &self.job.name
    }

    /// Returns its job, with the number of one of its generations.
    pub(crate) fn job_of(&self, generation: u64) -> Job {
        let mut job = self.job.clone();
        job.generation = generation;
        job
    }

    /// Stores the value under which its communicators record their calls.
    pub(crate) fn attach(&self, attached: &Arc<dyn Attached>) {
        *self.attached.lock() = Some(Arc::clone(attached));
    }

    /// Records the operator's decision that these ranks of a generation may go on as half of its voters.
    pub(crate) fn decide(&self, generation: u64, ranks: &[usize]) {
        let mut state = self.state.lock();
        let Some(line) = state.line(generation) else {
            return;
        };
        let peers = ranks
            .iter()
            .filter_map(|rank| line.membership.members.get(*rank));
        let members = peers.map(|peer| peer.id).collect();
        let word = OperatorWord {
            generation,
            members,
        };
        state.handle(Input::Command(Command::Operator(word)));
        self.pump(&mut state);
        drop(state);
        self.settle();
    }

    /// Returns for how long each rank that is another process has not been heard, where this process coordinates.
    pub(crate) fn heartbeat_ages(&self, generation: u64) -> Vec<(usize, Duration)> {
        let state = self.state.lock();
        let mut lines = state.lines.iter();
        let Some(line) = lines.find(|line| line.generation == generation) else {
            return Vec::new();
        };
        let now = state.clock.time(Instant::now());
        let ages = state.member.ages(now).into_iter();
        ages.filter_map(|(id, age)| Some((line.membership.rank_of(id)?, Duration::from_nanos(age))))
            .collect()
    }

    /// Returns the rank in `generation` of each member of a later one.
    pub(crate) fn ranks_before(&self, generation: u64, later: &Membership) -> Vec<Option<usize>> {
        let state = self.state.lock();
        let mut lines = state.lines.iter();
        let Some(line) = lines.find(|line| line.generation == generation) else {
            return vec![None; later.members.len()];
        };
        let members = later.members.iter();
        members
            .map(|peer| line.membership.rank_of(peer.id))
            .collect()
    }

    /// Feeds one input into the machine.
    fn input(&self, input: Input) {
        let mut state = self.state.lock();
        state.handle(input);
        self.pump(&mut state);
        drop(state);
        self.settle();
    }

    pub(super) fn command(&self, command: Command) {
        self.input(Input::Command(command));
    }

    /// Sends a request of the line of this generation; its answer, if any, arrives under `id`.
    pub(crate) fn send(&self, generation: u64, id: u64, request: Request) {
        let mut state = self.state.lock();
        self.request(&mut state, generation, id, request);
        self.pump(&mut state);
        drop(state);
        self.settle();
    }

    fn request(&self, state: &mut State, generation: u64, id: u64, request: Request) {
        let Some(index) = state
            .lines
            .iter()
            .position(|line| line.generation == generation)
        else {
            return;
        };
        let is_last = index + 1 == state.lines.len();
        let command = match request {
            Request::Announce { topic, bytes } => {
                let saying = Saying::Announced {
                    generation,
                    topic,
                    bytes,
                };
                say(&saying)
            }
            Request::Tell { to, topic, bytes } => {
                let telling = Telling {
                    generation,
                    topic,
                    bytes,
                };
                let bytes = wire::encode(&telling);
                let line = &mut state.lines[index];
                let Some(peer) = line.membership.members.get(to) else {
                    return;
                };
                let peer = peer.id;
                line.kept.tell(to, bytes.clone());
                Command::Tell { to: peer, bytes }
            }
            // The line of an earlier generation ends without a goodbye.
            Request::Goodbye if !is_last => return,
            Request::Goodbye => Command::Leave(Departure::Left),
            Request::Fail { why } => Command::Leave(Departure::Failed(why)),
            Request::Stay { why } => {
                if let Some(why) = why.clone() {
                    let failed = Saying::Failed { generation, why };
                    state.handle(Input::Command(say(&failed)));
                }
                if is_last {
                    state.handle(Input::Command(Command::Abstain));
                }
                return self.ask(state, index, id, Request::Stay { why });
            }
            request => return self.ask(state, index, id, request),
        };
        state.handle(Input::Command(command));
    }

    /// Asks the coordinator, or the next one.
    fn ask(&self, state: &mut State, index: usize, id: u64, request: Request) {
        let line = &mut state.lines[index];
        let asking = Asking {
            generation: line.generation,
            id,
            request,
        };
        let bytes = line.kept.keep(&asking, &line.mailbox);
        if state.member.is_led() {
            state.handle(Input::Command(Command::Ask(bytes)));
        } else {
            line.kept.later(&asking, bytes);
        }
    }

    /// Carries out the outputs of the machine and the services, until there are none.
    pub(super) fn pump(&self, state: &mut State) {
        loop {
            if let Some(output) = state.member.poll() {
                match output {
                    Output::Wire(wire) => self.wire(state, wire),
                    Output::Event(event) => self.event(state, event),
                }
            } else if !self.serve(state) {
                return;
            }
        }
    }

    fn wire(&self, state: &mut State, wire: Wire) {
        #[cfg(test)]
        if let Wire::Transmit(_, frame) = &wire
            && state.burns(frame)
        {
            return;
        }
        if let Some(input) = state.ports.wire(&self.driver(), wire) {
            state.handle(input);
        }
    }

    pub(super) fn driver(&self) -> Weak<dyn Driver> {
        Weak::clone(&self.this) as Weak<dyn Driver>
    }

    fn event(&self, state: &mut State, event: Event) {
        match event {
            Event::Active(membership) => self.active(state, membership),
            Event::Coordinator(id) => self.coordinator(state, id),
            Event::Entry(entry) => {
                state.entry(&entry, self.me);
                if matches!(*entry, Entry::Gone { .. }) {
                    self.bell.notify_all();
                }
            }
            Event::Told(from, bytes) => state.told(from, &bytes),
            Event::Asked(from, bytes) => state.asked(from, &bytes),
            Event::Replied(bytes) => state.replied(&bytes),
            Event::Suspected(member, nanos) => {
                state.suspected(member, Some(Duration::from_nanos(nanos)));
            }
            Event::Heard(member) => state.suspected(member, None),
            Event::Resumed(member, nanos) => {
                let outage_ms = nanos / 1_000_000;
                let slot = member.slot;
                tracing::info!(name: "nccl.rendezvous.resumed", target: "nccl", slot, outage_ms, "a connection was lost and is there again");
            }
            Event::NoSuccessor(missing) => {
                state.refused = Some(missing);
                self.bell.notify_all();
            }
            Event::Excluded(why) => {
                state.out(&why);
                state.excluded = Some(why);
                self.bell.notify_all();
            }
            Event::Left => {
                state.left = true;
                state.work.ends = true;
                self.bell.notify_all();
            }
            Event::Claim(generation) => state.work.claims.push(generation),
            Event::Joiners(count) => {
                state.joiners = count;
                state.push_all(&Push::Newcomers(count));
            }
            Event::Joined(id) => {
                if state.dismissed.is_some() {
                    state.dismissals.insert(id.slot);
                } else if let Some(peer) = state.joined(id.slot as usize) {
                    let known = Known::of(id.slot as usize, peer);
                    state.observe(state.generation(), &Push::Member(known));
                }
                self.bell.notify_all();
            }
            Event::Ended(_) | Event::Forms(_) => {}
            Event::Fell(slot, departure) => {
                let rank = slot as usize;
                state.dismiss(&Incomplete::Gone { rank, departure });
            }
            Event::Dismissed(bytes) => {
                let why = wire::decode(&bytes).unwrap_or(Incomplete::OtherMembers);
                state.dismissed.get_or_insert(why);
                self.bell.notify_all();
            }
        }
    }

    /// Handles that this process is in a new generation.
    fn active(&self, state: &mut State, membership: SharedMembership) {
        state.gone.clear();
        (state.refused, state.coordinator) = (None, None);
        (state.former, state.former_vigil) = (None, None);
        state.joiners = 0;
        // A witness has no rank.
        if let Some(rank) = membership.rank_of(self.me) {
            state.lines.push(LineOf {
                generation: membership.generation.number,
                rank,
                membership: Arc::clone(&membership),
                mailbox: state.mailbox.take().unwrap_or_default(),
                kept: Kept::default(),
            });
        }
        state.vigils.retain(|id, _| membership.votes(*id));
        state.words.retain(|id, _| membership.votes(*id));
        let unwatched: Vec<_> = vigil::of_this_kernel(&membership.members)
            .filter(|peer| !state.vigils.contains_key(&peer.id))
            .collect();
        for peer in unwatched {
            match self.watch(peer) {
                vigil::Kept::Watched(vigil) => _ = state.vigils.insert(peer.id, vigil),
                vigil::Kept::Ended => state.handle(Input::Ended(peer.id, Proof::Kernel)),
                vigil::Kept::Elsewhere => {}
            }
        }
        self.bell.notify_all();
    }

    /// Watches the process of a member.
    fn watch(&self, peer: &Peer) -> vigil::Kept {
        let (this, member) = (Weak::clone(&self.this), peer.id);
        vigil::keep(peer, move || {
            if let Some(node) = this.upgrade() {
                node.process_ended(member);
            }
        })
    }

    /// Watches the process that forms the first generation, at the other end of this socket.
    pub(super) fn watch_former(&self, socket: OwnedFd) -> Option<Arc<Vigil>> {
        let this = Weak::clone(&self.this);
        vigil::keep_former(socket, move |pid| {
            if let Some(node) = this.upgrade() {
                node.former_ended(pid);
            }
        })
    }

    /// Handles that a member coordinates from now on.
    fn coordinator(&self, state: &mut State, id: MemberId) {
        let before = state.coordinator.replace(id);
        self.bell.notify_all();
        let is_other = before.is_some_and(|before| before != id);
        if is_other {
            // Requests to the previous coordinator are not answered any more.
            let why = Lost::from(How::PassedOver);
            for line in &state.lines {
                line.mailbox.interrupt(&why);
            }
        }
        let me = self.me;
        state.ear = (id != me).then(|| Ear {
            heard: Instant::now(),
            is_silent: false,
        });
        if id == me {
            let is_first = before.is_none();
            if is_first {
                state.pass_on_watched();
            }
            let State {
                desk,
                lines,
                gone,
                joiners,
                ..
            } = state;
            if let Some(line) = lines.last() {
                desk.open(line.generation, &line.membership, gone, is_first);
                if *joiners > 0 {
                    let count = *joiners;
                    state.push_all(&Push::Newcomers(count));
                }
            }
            state.work.takes_places |= !is_first;
            if is_other && let Some(line) = state.lines.last() {
                state.work.said.push(Spoken::Leads(line.rank));
            }
        } else {
            state.desk.close();
        }
        let generation = state.generation();
        let mut asks = Vec::new();
        for line in &mut state.lines {
            if let Some(rank) = line.membership.rank_of(id) {
                line.mailbox
                    .set_coordinator(rank, is_other && line.generation == generation);
            }
            if !is_other && before.is_some() {
                let again = line.kept.asks_again(&line.mailbox).into_iter();
                asks.extend(again.map(Command::Ask));
            } else {
                asks.extend(line.kept.asks().into_iter().map(Command::Ask));
                if is_other {
                    asks.extend(line.kept.told().into_iter().filter_map(|(to, bytes)| {
                        let to = line.membership.members.get(to)?.id;
                        Some(Command::Tell { to, bytes })
                    }));
                }
            }
            state.work.mailboxes.push(Arc::clone(&line.mailbox));
        }
        for ask in asks {
            state.handle(Input::Command(ask));
        }
    }

    /// Handles one output of a service. Returns whether there was one.
    fn serve(&self, state: &mut State) -> bool {
        let output = state.desk.poll().or_else(|| {
            state.count_majority();
            state.desk.poll()
        });
        let Some((generation, output)) = output else {
            return false;
        };
        state.carry(generation, output, self.me);
        true
    }

    /// Handles the end of a process of this kernel.
    pub(super) fn process_ended(&self, member: MemberId) {
        let port = {
            let state = self.state.lock();
            let connection = state.member.connection_of(member);
            connection.and_then(|number| state.ports.get(number).cloned())
        };
        // Its last messages may have arrived: a goodbye, perhaps.
        if let Some(port) = port {
            port.read_if_free();
        }
        let mut state = self.state.lock();
        state.vigils.remove(&member);
        if let Some(end) = state.words.remove(&member) {
            state.handle(Input::Ended(member, Proof::Parent(Box::new(end))));
        } else if state.is_told(member) {
            let until = Instant::now() + WORD;
            state.ends.push((until, member, Proof::Kernel));
        } else {
            state.handle(Input::Ended(member, Proof::Kernel));
        }
        self.pump(&mut state);
        drop(state);
        self.settle();
    }

    /// Handles the end of the process that was to form the first generation, reported by the kernel.
    fn former_ended(&self, pid: u64) {
        let mut state = self.state.lock();
        state.former_vigil = None;
        if state.lines.is_empty() {
            state.former = Some((Instant::now() + STANDS_IN, pid));
            self.bell.notify_all();
        }
    }

    /// Tells the machine when NCCL has reached all ranks since the last check.
    fn look_for_progress(&self, state: &mut State, now: Instant) {
        let is_early = |at: Instant| now.saturating_duration_since(at) < SAMPLES;
        if !self.tolerates || state.progress.at.is_some_and(is_early) {
            return;
        }
        let Some(attached) = self.attached.lock().clone() else {
            return;
        };
        let before = std::mem::replace(
            &mut state.progress,
            Sample {
                at: Some(now),
                generation: state.member.membership().generation.number,
                progress: attached.progress(),
            },
        );
        let is_same = before.at.is_some() && before.generation == state.progress.generation;
        if is_same && before.progress < state.progress.progress {
            state.handle(Input::Progress);
        }
    }

    fn schedule(&self, state: &mut State) {
        let Some(next) = state.next_timeout() else {
            return;
        };
        if state.alarm.is_some_and(|alarm| alarm <= next) {
            return;
        }
        if let Ok(reactor) = Reactor::get() {
            state.alarm = Some(next);
            reactor.wake_at(next, Weak::clone(&self.this) as Weak<dyn Source>);
        }
    }

    /// Waits until `bell` is signalled, or the deadline.
    pub(super) fn wait(&self, state: &mut MutexGuard<'_, State>, deadline: Instant) {
        self.bell.wait_until(state, deadline);
    }
}

impl Driver for Node {
    fn came(&self, number: proto::Connection, frames: Vec<proto::Frame>, lost: Option<Lost>) {
        let mut state = self.state.lock();
        if frames
            .iter()
            .any(|frame| matches!(frame, proto::Frame::Beat(_)))
        {
            state.feel();
            self.look_for_progress(&mut state, Instant::now());
        }
        // Why a process that may live is out of reach; the end of a connection alone shows nothing about the process.
        let silent = lost.clone().map(|lost| match lost.how {
            How::Closed => Sign::Closed.into(),
            _ => lost,
        });
        let silent = silent.filter(Lost::may_live);
        if let (Some(peer), Some(lost)) = (state.member.peer_of(number), silent) {
            state.handle(Input::Evidence(peer, lost));
        }
        for input in state.ports.inputs(number, frames, lost.is_some()) {
            state.handle(input);
        }
        self.pump(&mut state);
    }

    fn dialled(&self, peer: MemberId, met: client::Met) {
        let mut state = self.state.lock();
        let input = state.ports.connected(&self.driver(), peer, met);
        state.handle(input);
        self.pump(&mut state);
        drop(state);
        self.settle();
    }

    fn dial_failed(&self, peer: MemberId, lost: Lost) {
        let mut state = self.state.lock();
        state.handle(Input::Evidence(peer, lost));
        state.handle(Input::DialFailed(peer));
        self.pump(&mut state);
        drop(state);
        self.settle();
    }

    fn settle(&self) {
        loop {
            let mut state = self.state.lock();
            let work = std::mem::take(&mut state.work);
            let wires = std::mem::take(&mut state.ports.work);
            if work.is_empty() && wires.is_empty() {
                self.schedule(&mut state);
                return;
            }
            drop(state);
            wires.carry_out(&self.driver(), &self.dialer);
            for mailbox in work.mailboxes {
                mailbox.run_handlers();
            }
            work.said.into_iter().for_each(Spoken::say);
            for generation in work.claims {
                self.claim(generation);
            }
            #[cfg(test)]
            if work.dies {
                self.cut_for_a_test();
            }
            if let Some(acceptor) = self.acceptor.get() {
                if work.takes_places {
                    acceptor.take_places();
                }
                if work.ends {
                    acceptor.close();
                }
            }
        }
    }

    fn job(&self) -> &Job {
        &self.job
    }

    fn slot(&self) -> usize {
        self.me.slot as usize
    }
}

impl Source for Node {
    fn ready(self: Arc<Self>, _: rustix::event::epoll::EventFlags) {}

    fn due(self: Arc<Self>, now: Instant) {
        let mut state = self.state.lock();
        if state.alarm.is_some_and(|alarm| alarm <= now) {
            state.alarm = None;
        }
        let late: Vec<_> = state
            .ends
            .extract_if(.., |(until, ..)| *until <= now)
            .collect();
        for (_, member, proof) in late {
            state.handle(Input::Ended(member, proof));
        }
        self.look_for_progress(&mut state, now);
        let time = state.clock.time(now);
        if state.member.next_timeout() <= time {
            state.member.handle_timeout(time);
        }
        state.listen(now);
        state.desk.handle_timeout(now);
        let reports = state.desk.reports(now);
        self.pump(&mut state);
        drop(state);
        self.settle();
        for text in reports {
            tracing::info!(name: "nccl.rendezvous.waiting", target: "nccl", "still waiting: {text}");
        }
    }
}

impl Work {
    fn is_empty(&self) -> bool {
        #[cfg(test)]
        if self.dies {
            return false;
        }
        self.mailboxes.is_empty()
            && self.said.is_empty()
            && self.claims.is_empty()
            && !self.takes_places
            && !self.ends
    }
}

impl State {
    pub(super) fn handle(&mut self, input: Input) {
        self.member.handle(self.clock.time(Instant::now()), input);
    }

    /// Whether this process behaves as if dead, and `frame` is not sent.
    #[cfg(test)]
    fn burns(&mut self, frame: &proto::Frame) -> bool {
        use proto::Message::{Append, Tell};
        let is_send = match frame {
            proto::Frame::Data { message, .. } => matches!(message, Append { .. } | Tell { .. }),
            _ => false,
        };
        let is_beat = matches!(frame, proto::Frame::Beat(_));
        match &mut self.fuse {
            None => false,
            Some(usize::MAX) => true,
            Some(0) if is_send || is_beat => {
                self.fuse = Some(usize::MAX);
                self.work.dies = true;
                true
            }
            Some(left) => {
                *left -= usize::from(is_send);
                false
            }
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.member.membership().generation.number
    }

    fn next_timeout(&self) -> Option<Instant> {
        let machine = self.clock.instant(self.member.next_timeout());
        let ends = self.ends.iter().map(|(until, ..)| *until).min();
        let ear = self.ear.as_ref().filter(|ear| !ear.is_silent);
        machine
            .into_iter()
            .chain(self.desk.next_timeout())
            .chain(ends)
            .chain(ear.map(|ear| ear.heard + SILENT))
            .min()
    }

    /// Reports a silent coordinator, as a coordinator reports others: its process may be stopped.
    fn listen(&mut self, now: Instant) {
        let is_led = self.member.is_led();
        let Some(ear) = self.ear.as_mut().filter(|ear| !ear.is_silent) else {
            return;
        };
        let late = now.checked_duration_since(ear.heard + SILENT);
        match late {
            None => {}
            // A coordinator that this process has lost is not reported as alive.
            Some(late) if late > LATE || !is_led => ear.heard = now,
            Some(late) => {
                ear.is_silent = true;
                self.coordinator_turns(Some(SILENT + late));
            }
        }
    }

    /// Reports that the coordinator is silent, or is heard again.
    fn coordinator_turns(&mut self, silent: Option<Duration>) {
        let Some(line) = self.lines.last() else {
            return;
        };
        let rank = self.coordinator.and_then(|id| line.membership.rank_of(id));
        let Some(rank) = rank else {
            return;
        };
        let peer = &line.membership.members[rank];
        let is_here = peer.kernel != 0 && peer.kernel == process::kernel_sum();
        let state = silent
            .filter(|_| is_here)
            .and_then(|_| process::state_of(peer.pid.into()));
        self.work.said.push(match silent {
            Some(silent) => Spoken::Silent(rank, silent, state.clone()),
            None => Spoken::HeardAgain(rank, Duration::ZERO),
        });
        line.mailbox.push(Push::Suspected {
            rank,
            silent,
            state,
        });
        self.work.mailboxes.push(Arc::clone(&line.mailbox));
    }

    /// Whether a launcher will report how a member ends: the member said so itself, or an observer did.
    fn is_told(&self, member: MemberId) -> bool {
        let peer = self.member.membership().peer(member);
        peer.is_some_and(|peer| peer.observed) || self.watched.contains(&member)
    }

    /// Tells newly joined members whose ends launchers will report.
    fn pass_on_watched(&mut self) {
        let members = self.member.membership().members.iter();
        let watched = members
            .map(|peer| peer.id)
            .filter(|id| self.watched.contains(id));
        let watched: Vec<_> = watched.collect();
        if !watched.is_empty() {
            self.handle(Input::Command(say(&Saying::Watched(watched))));
        }
    }

    /// Records that the coordinator has asked whether this process is there.
    fn feel(&mut self) {
        let now = Instant::now();
        if let Some(ear) = &mut self.ear {
            ear.heard = now;
            if std::mem::take(&mut ear.is_silent) {
                self.coordinator_turns(None);
            }
        }
        if let Some(line) = self.lines.last() {
            line.mailbox.heard_coordinator(now);
        }
        let call = host().last_call();
        if let (Some(call), Some(line)) = (call, self.lines.last()) {
            let asking = Asking {
                generation: line.generation,
                id: u64::MAX,
                request: Request::Last { call },
            };
            self.handle(Input::Command(Command::Ask(asking.encode())));
        }
    }

    fn line(&mut self, generation: u64) -> Option<&mut LineOf> {
        let mut lines = self.lines.iter_mut();
        lines.find(|line| line.generation == generation)
    }

    fn entry(&mut self, entry: &Entry, me: MemberId) {
        match entry {
            Entry::Gone {
                member, departure, ..
            } => {
                self.vigils.remove(member);
                self.watched.remove(member);
                self.ends.retain(|(_, id, _)| id != member);
                if self.coordinator == Some(*member) {
                    self.ear = None;
                }
                self.gone.push((*member, departure.clone()));
                for line in &self.lines {
                    // A member's own goodbye is not delivered to it.
                    if *member != me
                        && let Some(rank) = line.membership.rank_of(*member)
                    {
                        let departure = departure.clone();
                        line.mailbox.push(Push::Gone { rank, departure });
                        self.work.mailboxes.push(Arc::clone(&line.mailbox));
                    }
                }
                self.desk.leave(*member, departure, false);
            }
            Entry::Said(said) => match wire::decode(&said.bytes) {
                Ok(Saying::Announced {
                    generation,
                    topic,
                    bytes,
                }) => {
                    let from = said.from;
                    let bytes = bytes.into();
                    self.deliver(generation, from, |from| Push::Notice { from, topic, bytes });
                }
                Ok(Saying::Failed { generation, why }) => {
                    let from = said.from;
                    let departure = Departure::Failed(why);
                    let told = departure.clone();
                    self.deliver(generation, from, |rank| Push::Gone {
                        rank,
                        departure: told,
                    });
                    self.desk.leave_in(generation, from, &departure);
                }
                Ok(Saying::Watched(members)) => self.watched.extend(members),
                Ok(Saying::Told { member, end }) => {
                    let waiting = self.ends.extract_if(.., |(_, id, _)| *id == member);
                    if waiting.count() > 0 {
                        self.handle(Input::Ended(member, Proof::Parent(Box::new(end))));
                    } else if self.member.membership().votes(member) {
                        self.words.insert(member, end);
                    }
                }
                Err(broken) => {
                    tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "said", why = broken.0, "what a member said cannot be decoded");
                }
            },
            Entry::Operator(word) => {
                let generation = word.generation;
                tracing::warn!(name: "nccl.rendezvous.operator", target: "nccl", generation, "the operator has decided which side goes on");
            }
        }
    }

    /// Puts a message of a member into the mailbox of a generation.
    fn deliver(&mut self, generation: u64, from: MemberId, push: impl FnOnce(usize) -> Push) {
        let mut lines = self.lines.iter();
        if let Some(line) = lines.find(|line| line.generation == generation)
            && let Some(rank) = line.membership.rank_of(from)
        {
            line.mailbox.push(push(rank));
            self.work.mailboxes.push(Arc::clone(&line.mailbox));
        }
    }

    fn told(&mut self, from: MemberId, bytes: &[u8]) {
        if let Ok(Telling {
            generation,
            topic,
            bytes,
        }) = wire::decode(bytes)
        {
            let bytes = bytes.into();
            self.deliver(generation, from, |from| Push::Told { from, topic, bytes });
        }
    }

    /// Sets whether there is a majority, for which agreements among some ranks wait: the other ranks may have gone on without this side.
    fn count_majority(&mut self) {
        let time = self.clock.time(Instant::now());
        self.desk.majority(self.member.holds_lease(time));
    }

    fn asked(&mut self, from: MemberId, bytes: &[u8]) {
        let Ok((again, asking)) = Asking::decode(bytes) else {
            return;
        };
        let Asking {
            generation,
            id,
            request,
        } = asking;
        self.count_majority();
        match request {
            Request::Last { mut call } => {
                cut(&mut call, LONGEST_NAME);
                self.handle(Input::Command(Command::Called(from, call)));
            }
            Request::Watches { ranks } => self.watched_by(from, generation, &ranks),
            Request::Ended { rank, pid, end } => self.ended(generation, rank, pid, end),
            request => {
                let is_phase = matches!(request, Request::Phase { .. });
                self.desk.handle(from, generation, id, request, again);
                if is_phase {
                    self.show(generation, from);
                }
            }
        }
    }

    /// Records that an observer has started these ranks, as these processes, and sends it the state of all of them.
    fn watched_by(&mut self, observer: MemberId, generation: u64, ranks: &[(usize, u64)]) {
        if self.is_forming(generation) {
            let size = self.desk.size;
            self.show_to(observer, generation, &Push::Size(size));
            for rank in 0..size {
                if let Some(known) = self.joined(rank).map(|peer| Known::of(rank, peer)) {
                    self.show_to(observer, generation, &Push::Member(known));
                }
            }
            return;
        }
        let Some(line) = self.line(generation) else {
            return;
        };
        let peers = &line.membership.members;
        // A process with another id has started the one that is the rank.
        let members = ranks.iter().filter_map(|(rank, _)| peers.get(*rank));
        let members: Vec<_> = members.map(|peer| peer.id).collect();
        if members.iter().any(|id| !self.watched.contains(id)) {
            self.handle(Input::Command(say(&Saying::Watched(members))));
        }
        for known in self.desk.known(generation) {
            self.show_to(observer, generation, &Push::Member(known));
        }
    }

    /// Whether the ranks of this generation still meet here.
    fn is_forming(&self, generation: u64) -> bool {
        self.member.is_joining() && generation == self.generation()
    }

    /// Returns the process of a rank that has joined the generation that is formed here.
    fn joined(&self, rank: usize) -> Option<&Peer> {
        let slot = u32::try_from(rank).ok()?;
        self.member.joined(slot).filter(|_| rank < self.desk.size)
    }

    /// Handles an observer's report of how the process that it has started as this rank ended, while the ranks meet.
    fn ended(&mut self, generation: u64, rank: usize, pid: u64, mut end: ProcessEnd) {
        end.cut(LONGEST_WORD);
        if !self.is_forming(generation) {
            return self.told_of(generation, rank, pid, end);
        }
        // For rank 0: that is this process.
        if !(1..self.desk.size).contains(&rank) {
            return;
        }
        match self.joined(rank) {
            // A goodbye, or why it fails, may still be on its way.
            Some(peer) if u64::from(peer.pid) == pid => {
                let (until, id) = (Instant::now() + WORD, peer.id);
                self.ends.push((until, id, Proof::Parent(Box::new(end))));
            }
            // A process with another id may be another one, which has started this one.
            Some(_) => {}
            None => {
                let departure = Departure::Lost(end.into());
                self.dismiss(&Incomplete::Gone { rank, departure });
            }
        }
    }

    /// Reports to all members how the process ended that has started a rank's process; they report it with that rank's end.
    fn told_of(&mut self, generation: u64, rank: usize, pid: u64, end: ProcessEnd) {
        let peer = self
            .line(generation)
            .and_then(|line| line.membership.members.get(rank));
        if let Some(peer) = peer.filter(|peer| u64::from(peer.pid) != pid) {
            let member = peer.id;
            let told = Saying::Told { member, end };
            self.handle(Input::Command(say(&told)));
        }
    }

    /// Gives up the first generation.
    pub(super) fn dismiss(&mut self, why: &Incomplete) {
        let all = 0..self.desk.size as u32;
        let joined = all.filter(|slot| self.member.joined(*slot).is_some());
        self.dismissals.extend(joined);
        let bytes = wire::encode(why).into();
        self.handle(Input::Command(Command::Dismiss(bytes)));
    }

    /// Returns the ranks among these that have not received that reason.
    pub(super) fn has_not_heard(&self, of: impl Fn(usize) -> bool) -> impl Iterator<Item = usize> {
        let all = (1..self.desk.size).filter(move |rank| of(*rank));
        all.filter(|rank| !self.dismissals.contains(&(*rank as u32)))
    }

    fn show_to(&mut self, observer: MemberId, generation: u64, push: &Push) {
        let bytes = envelope::reply(generation, 0, &push.encode().payload);
        self.reply(observer, bytes);
    }

    /// Sends to all observers.
    fn observe(&mut self, generation: u64, push: &Push) {
        let observers = self.member.observers();
        if observers.is_empty() {
            return;
        }
        let bytes = envelope::reply(generation, 0, &push.encode().payload);
        for observer in observers {
            self.reply(observer, Arc::clone(&bytes));
        }
    }

    /// Sends the state of a member to the observers.
    fn show(&mut self, generation: u64, member: MemberId) {
        if self.member.observers().is_empty() {
            return;
        }
        let Some(rank) = self
            .line(generation)
            .and_then(|line| line.membership.rank_of(member))
        else {
            return;
        };
        if let Some(known) = self.desk.known_of(generation, rank) {
            self.observe(generation, &Push::Member(known));
        }
    }

    fn replied(&mut self, bytes: &[u8]) {
        let Ok((generation, id, incoming)) = replied(bytes) else {
            return;
        };
        self.receive(generation, id, incoming);
    }

    fn receive(&mut self, generation: u64, id: u64, incoming: Incoming) {
        let Some(line) = self.line(generation) else {
            return;
        };
        let mailbox = Arc::clone(&line.mailbox);
        match incoming {
            Incoming::Answer(answer) => {
                line.kept.answered(id);
                mailbox.answer(id, answer);
            }
            Incoming::Push(Push::Look { rank, pid }) => {
                if let Some(state) = process::state_of(pid) {
                    let asking = Asking {
                        generation,
                        id: u64::MAX,
                        request: Request::Saw { rank, state },
                    };
                    self.handle(Input::Command(Command::Ask(asking.encode())));
                }
            }
            Incoming::Push(push) => {
                mailbox.push(push);
                self.work.mailboxes.push(mailbox);
            }
        }
    }

    /// Carries out an output of a service.
    fn carry(&mut self, generation: u64, output: desk::Output, me: MemberId) {
        match output {
            desk::Output::Answer { to, answer } => {
                let payload = answer.encode();
                for (member, id) in to {
                    if member == me {
                        self.receive(generation, id, Incoming::Answer(answer.clone()));
                    } else {
                        self.reply(member, envelope::reply(generation, id, &payload));
                    }
                }
            }
            desk::Output::Observe(push) => self.observe(generation, &push),
            desk::Output::Push { to, push } => {
                let bytes = envelope::reply(generation, 0, &push.encode().payload);
                for member in to {
                    if member == me {
                        self.receive(generation, 0, Incoming::Push(push.clone()));
                    } else {
                        self.reply(member, Arc::clone(&bytes));
                    }
                }
            }
        }
    }

    fn reply(&mut self, to: MemberId, bytes: Arc<[u8]>) {
        self.handle(Input::Command(Command::Reply { to, bytes }));
    }

    /// Sends to all members of this generation.
    fn push_all(&mut self, push: &Push) {
        let Some(line) = self.lines.last() else {
            return;
        };
        let membership = Arc::clone(&line.membership);
        let (generation, rank) = (line.generation, line.rank);
        let to = membership.members.iter().map(|peer| peer.id).collect();
        let output = desk::Output::Push {
            to,
            push: push.clone(),
        };
        self.carry(generation, output, membership.members[rank].id);
    }

    /// Handles that a member is silent, or is heard again.
    fn suspected(&mut self, member: MemberId, silent: Option<Duration>) {
        let Some(line) = self.lines.last() else {
            return;
        };
        let Some(rank) = line.membership.rank_of(member) else {
            return;
        };
        let peer = &line.membership.members[rank];
        let is_here = peer.kernel != 0 && peer.kernel == process::kernel_sum();
        let pid = u64::from(peer.pid);
        let state = silent
            .filter(|_| is_here)
            .and_then(|_| process::state_of(pid));
        match silent {
            Some(silent) => self
                .work
                .said
                .push(Spoken::Silent(rank, silent, state.clone())),
            None => self
                .work
                .said
                .push(Spoken::HeardAgain(rank, Duration::ZERO)),
        }
        if silent.is_some() && !is_here && peer.kernel != 0 {
            // A member of the same kernel can look.
            let beside = line.membership.members.iter().find(|other| {
                let is_gone = self.gone.iter().any(|(id, _)| *id == other.id);
                other.kernel == peer.kernel && other.id != member && !is_gone
            });
            if let Some(beside) = beside.map(|peer| peer.id) {
                let push = Push::Look { rank, pid };
                let bytes = envelope::reply(line.generation, 0, &push.encode().payload);
                self.reply(beside, bytes);
            }
        }
        self.push_all(&Push::Suspected {
            rank,
            silent,
            state,
        });
    }

    /// Handles that this process takes part no more.
    fn out(&mut self, why: &Exclusion) {
        self.ear = None;
        let Some(line) = self.lines.last() else {
            return;
        };
        let membership: &Membership = &line.membership;
        let ranks = |ids: &[MemberId]| {
            let ranks = ids.iter().filter_map(|id| membership.rank_of(*id));
            let mut ranks: Vec<_> = ranks.collect();
            ranks.sort_unstable();
            ranks
        };
        match why {
            Exclusion::NoMajority { unreached, .. } => {
                let from = ranks(unreached);
                let mut all = membership.members.iter();
                let is_on_one_host = all.all(|peer| peer.at.starts_with("unix:"));
                let why = apart(&from, is_on_one_host);
                line.mailbox.cut_off(from, &why);
            }
            Exclusion::PassedOver(by) => {
                let others = (0..membership.members.len()).filter(|rank| *rank != line.rank);
                let by = membership.rank_of(*by).unwrap_or_default();
                let why =
                    format!("rank {by} coordinates now, and the others went on without this rank");
                line.mailbox.cut_off(others.collect(), &why);
            }
            Exclusion::LeftBehind(_) => {
                let rank = line.rank;
                let lost =
                    Lost::said("it was left behind: the others have gone on to another generation");
                let departure = Departure::Lost(lost.clone());
                line.mailbox.push(Push::Gone { rank, departure });
                line.mailbox.end(&lost);
            }
        }
        for line in &self.lines {
            // Lines of earlier generations receive nothing any more either.
            line.mailbox.end(&Lost::from(How::PassedOver));
            self.work.mailboxes.push(Arc::clone(&line.mailbox));
        }
    }
}

/// Describes the unreachable members, for a side that may not decide.
fn apart(from: &[usize], is_on_one_host: bool) -> String {
    let ranks = ranges(from);
    let (who, fault) = match from.len() {
        1 => (format!("rank {ranks}"), "it or this side is at fault"),
        _ => (format!("ranks {ranks}"), "they or this side are at fault"),
    };
    let how = match is_on_one_host {
        true => "on this host one side stands still or did (stopped, frozen, no processor)",
        false => "a partition of the network",
    };
    format!(
        "cut off from {who}: {how}, and the ranks on this side are no majority, so that nobody here can tell \
         whether {fault}"
    )
}

fn say(saying: &Saying) -> Command {
    Command::Say {
        topic: String::new(),
        bytes: wire::encode(saying),
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("me", &self.me)
            .finish_non_exhaustive()
    }
}

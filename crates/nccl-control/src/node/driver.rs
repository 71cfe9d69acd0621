//! The driver of one process's machine: the node of a job, and all inputs to its machine.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use nccl_base::ranges::ranges;
use nccl_base::wire;

use super::acceptor::Acceptor;
use super::outbox::Outbox;
use super::process_watch::{self, ProcessWatch};
use super::services::{self, Services};
use crate::application::{RankRecorder, application};
use crate::clock::Clock;
use crate::connect;
use crate::coordinator_message::{CoordinatorMessage, Push, RankRecord};
use crate::departure::{Departure, LossKind, Lost, ProcessEnd, UnreachableEvidence, cut};
use crate::discovery::{Discovery, DiscoveryHandle};
use crate::driver_message::{
    self, BroadcastContent, DirectContent, NumberedRequest, RequestHead, decode_reply,
};
use crate::environment::Rendezvous;
use crate::heartbeat::{LivenessChange, Suspicion};
use crate::inbox::Inbox;
use crate::job::Job;
use crate::process;
use crate::process_state::ProcessState;
use crate::proto::{
    self, Command, ConnectionRequest, Entry, Event, Exclusion, Generation, Input, MemberId,
    MemberMachine, Membership, OperatorDecision, Output, ProcessInfo, Proof, SharedMembership,
};
use crate::reactor::{Reactor, Source};
use crate::request::{FollowedBefore, NO_ANSWER, Request};
use crate::round::RequestError;
use crate::service::LONGEST_NAME;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::transport::{Dialer, MachineDriver, PeerConnections};

/// All nodes of this process, which tests end one by one.
#[cfg(test)]
pub(super) static ALL: Mutex<Vec<Weak<Node>>> = Mutex::new(Vec::new());

/// How long a proven end waits for the launcher's exit report, and an exit report for a leave message that it may have overtaken.
const EXIT_REPORT_WAIT: Duration = Duration::from_millis(500);

/// The longest text of a report about the end of a process, in bytes.
const LONGEST_EXIT_REPORT: usize = 8 << 10;

/// The part of one process in a job.
pub(crate) struct Node {
    pub(super) this: Weak<Self>,
    pub(super) job: Job,
    pub(super) me: MemberId,
    pub(super) dialer: Dialer,
    pub(super) acceptor: OnceLock<Arc<Acceptor>>,
    pub(super) state: Mutex<State>,
    /// The discovery that decides between two halves of the job, if configured.
    pub(super) discovery: Option<DiscoveryHandle>,
    /// How long this process waits for a majority.
    pub(super) majority_timeout: Duration,
    /// The recorder whose recordings this node sends.
    pub(super) recorder: Mutex<Option<Arc<dyn RankRecorder>>>,
    /// Signalled when a generation is active, a request for the next generation has failed, or this process is excluded.
    pub(super) changed: Condvar,
}

pub(super) struct State {
    pub(super) machine: MemberMachine,
    pub(super) clock: Clock,
    pub(super) connections: PeerConnections,
    /// The inbox of the session of the first generation, which exists before that session.
    pub(super) inbox: Option<Arc<Inbox>>,
    /// The sessions of all generations to which this process belongs or belonged, and which a program still holds or has
    /// not taken yet.
    pub(super) sessions: Vec<GenerationSession>,
    /// The last coordinator, as far as this process knows.
    pub(super) coordinator: Option<MemberId>,
    /// The same, also between two generations.
    pub(super) last_coordinator: Option<MemberId>,
    /// While another process coordinates: its last heartbeat.
    pub(super) coordinator_heartbeat: Option<CoordinatorHeartbeat>,
    /// Set when the initial coordinator has ended: until when another process may stand in for it, and its process id.
    pub(super) ended_initial_coordinator: Option<(Instant, u64)>,
    /// Watches the initial coordinator, until the first generation is active.
    pub(super) initial_coordinator_watch: Option<Arc<ProcessWatch>>,
    pub(super) services: Services,
    /// The members that have departed from this generation, in the order in which all members learn of it.
    pub(super) departed: Vec<(MemberId, Departure)>,
    pub(super) process_watches: HashMap<MemberId, Arc<ProcessWatch>>,
    /// Members whose ends an observer will report.
    pub(super) exit_reported_by_observer: BTreeSet<MemberId>,
    /// Proven ends that have not been reported yet, and until when each waits: for the launcher's exit report, or, if
    /// it is an exit report itself, for a leave message.
    pub(super) deferred_ends: Vec<(Instant, MemberId, Proof)>,
    /// The launchers' reports about these members.
    pub(super) exit_reports: HashMap<MemberId, ProcessEnd>,
    /// Why the first generation was not formed.
    pub(super) formation_error: Option<RequestError>,
    /// The slots that have received that error.
    pub(super) formation_error_received: BTreeSet<u32>,
    /// Whether a call of the program waits for the next generation.
    pub(super) is_reconfiguring: bool,
    /// The members that were missing when the last reconfiguration failed.
    pub(super) reconfiguration_missing: Option<Vec<MemberId>>,
    /// Why this process no longer takes part.
    pub(super) excluded: Option<Exclusion>,
    pub(super) left: bool,
    pub(super) joiners: usize,
    progress: ProgressSample,
    pub(super) alarm: Option<Instant>,
    pub(super) work: DeferredWork,
    /// In tests: after this many sends, this process behaves as if it were dead.
    #[cfg(test)]
    pub(super) sends_before_crash: Option<usize>,
}

/// One generation of the world, held by a program of this process.
pub(super) struct GenerationSession {
    pub(super) generation: u64,
    pub(super) rank: usize,
    pub(super) membership: SharedMembership,
    pub(super) inbox: Arc<Inbox>,
    pub(super) outbox: Outbox,
    /// Whether a program holds it, or has held it.
    pub(super) is_taken: bool,
}

/// The heartbeats of the coordinator, as this process receives them.
pub(super) struct CoordinatorHeartbeat {
    last_heartbeat: Instant,
    /// The time since which the coordinator has not answered, if that was reported to the program.
    suspected_since: Option<Instant>,
}

/// The progress of NCCL in a generation.
#[derive(Default)]
struct ProgressSample {
    at: Option<Instant>,
    generation: u64,
    progress: u64,
}

/// The minimum time between two checks of NCCL's progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(400);

/// How long a coordinator may send no heartbeat before it is a suspect. Nothing ends because of that.
const SUSPECT_AFTER: Duration = Duration::from_secs(2);

/// A process whose check is this late was delayed itself, and reports no member as a suspect.
const OWN_DELAY: Duration = Duration::from_millis(500);

/// How long a launcher may take to stand in for the initial coordinator.
const STAND_IN_WAIT: Duration = Duration::from_secs(1);

/// Work to do once the lock is free.
#[derive(Default)]
pub(super) struct DeferredWork {
    pub(super) inboxes: Vec<Arc<Inbox>>,
    pub(super) liveness_changes: Vec<LivenessChange>,
    pub(super) listens_at_job_addresses: bool,
    pub(super) claims: Vec<(Generation, BTreeSet<MemberId>)>,
    pub(super) closes_acceptor: bool,
    #[cfg(test)]
    pub(super) dies: bool,
}

/// Claims for the voters of `half` in order, and returns the first one for which the claim is or was already won: the
/// half that includes this voter continues. Of two halves without a common voter, only one can win. Every voter is
/// tried, because another half may have won the claim for one of them before the network changed.
fn claim_for_one_of(
    discovery: &dyn Discovery,
    generation: &str,
    half: &BTreeSet<MemberId>,
) -> io::Result<Option<MemberId>> {
    for id in half {
        let claimant = format!("{}-{:x}", id.slot, id.incarnation);
        if discovery.claim(generation, &claimant)? {
            return Ok(Some(*id));
        }
    }
    Ok(None)
}

impl Node {
    /// Creates a node whose machine has this role.
    pub(super) fn new(
        rendezvous: &Rendezvous,
        me: ProcessInfo,
        role: proto::StartRole,
        first: Option<connect::AuthenticatedConnection>,
    ) -> Arc<Self> {
        let id = me.id;
        let timing = proto::Timing {
            majority_timeout: rendezvous.bounded_majority_timeout().as_nanos() as u64,
            ..proto::Timing::default()
        };
        let machine =
            MemberMachine::new(me, role, timing, proto::Mistakes::default(), Clock::ORIGIN);
        let state = State {
            machine,
            clock: Clock::start(),
            connections: PeerConnections::starting_with(first),
            inbox: None,
            sessions: Vec::new(),
            coordinator: None,
            last_coordinator: None,
            coordinator_heartbeat: None,
            ended_initial_coordinator: None,
            initial_coordinator_watch: None,
            services: Services::default(),
            departed: Vec::new(),
            process_watches: HashMap::new(),
            exit_reported_by_observer: BTreeSet::new(),
            deferred_ends: Vec::new(),
            exit_reports: HashMap::new(),
            formation_error: None,
            formation_error_received: BTreeSet::new(),
            is_reconfiguring: false,
            reconfiguration_missing: None,
            excluded: None,
            left: false,
            joiners: 0,
            progress: ProgressSample::default(),
            alarm: None,
            work: DeferredWork::default(),
            #[cfg(test)]
            sends_before_crash: None,
        };
        let node = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            job: rendezvous.job_identity(),
            me: id,
            dialer: Dialer::default(),
            acceptor: OnceLock::new(),
            state: Mutex::new(state),
            discovery: rendezvous.address.discovery().cloned(),
            majority_timeout: rendezvous.bounded_majority_timeout(),
            recorder: Mutex::default(),
            changed: Condvar::new(),
        });
        #[cfg(test)]
        ALL.lock().push(Arc::downgrade(&node));
        node
    }

    /// Asks the discovery on a separate thread whether this side of a network partition may continue, because the
    /// answer may take a while.
    fn claim(&self, generation: Generation, half: BTreeSet<MemberId>) {
        let Some(DiscoveryHandle(discovery)) = self.discovery.clone() else {
            return;
        };
        let this = Weak::clone(&self.this);
        let ask = move || {
            let proposer = generation.proposer;
            let (slot, incarnation) = (proposer.slot, proposer.incarnation);
            let name = format!("{}-{slot}-{incarnation:x}", generation.number);
            let (by, generation_number) = (discovery.name(), generation.number);
            match claim_for_one_of(&*discovery, &name, &half) {
                Ok(voter) => {
                    let won = voter.is_some();
                    tracing::warn!(name: "nccl.rendezvous.claim", target: "nccl", generation = generation_number, by, won, "half of the voters are out of reach: the side that claims first continues");
                    if let (Some(voter), Some(node)) = (voter, this.upgrade()) {
                        node.command(Command::Claimed(generation, voter));
                    }
                }
                Err(error) => {
                    tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "claim", by, %error, "half of the voters are out of reach, and it cannot be claimed which side continues");
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

    /// Returns the job of this node, with the number of one of its generations.
    pub(crate) fn job_of(&self, generation: u64) -> Job {
        let mut job = self.job.clone();
        job.generation = generation;
        job
    }

    /// Stores the recorder of this node's communicators.
    pub(crate) fn set_recorder(&self, recorder: &Arc<dyn RankRecorder>) {
        *self.recorder.lock() = Some(Arc::clone(recorder));
    }

    /// Records the operator's decision that these ranks of a generation may continue as half of its voters.
    pub(crate) fn decide(&self, generation: u64, ranks: &[usize]) {
        let mut state = self.state.lock();
        let Some(session) = state.session(generation) else {
            return;
        };
        let processes = ranks
            .iter()
            .filter_map(|rank| session.membership.members.get(*rank));
        let members = processes.map(|process| process.id).collect();
        let decision = OperatorDecision {
            generation,
            members,
        };
        state.handle(Input::Command(Command::OperatorDecision(decision)));
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
    }

    /// Returns for how long each rank in another process has not been heard, if this process coordinates.
    pub(crate) fn heartbeat_ages(&self, generation: u64) -> Vec<(usize, Duration)> {
        let state = self.state.lock();
        let mut sessions = state.sessions.iter();
        let Some(session) = sessions.find(|session| session.generation == generation) else {
            return Vec::new();
        };
        let now = state.clock.time(Instant::now());
        let ages = state.machine.heartbeat_ages(now).into_iter();
        ages.filter_map(|(id, age)| {
            Some((session.membership.rank_of(id)?, Duration::from_nanos(age)))
        })
        .collect()
    }

    /// Returns the rank in `generation` of each member of a later one.
    pub(crate) fn ranks_before(&self, generation: u64, later: &Membership) -> Vec<Option<usize>> {
        let state = self.state.lock();
        let mut sessions = state.sessions.iter();
        let Some(session) = sessions.find(|session| session.generation == generation) else {
            return vec![None; later.members.len()];
        };
        let members = later.members.iter();
        members
            .map(|process| session.membership.rank_of(process.id))
            .collect()
    }

    /// Feeds one input into the machine.
    fn input(&self, input: Input) {
        let mut state = self.state.lock();
        state.handle(input);
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
    }

    pub(super) fn command(&self, command: Command) {
        self.input(Input::Command(command));
    }

    /// Sends a request of the session of this generation; the answer, if any, arrives under `id`.
    pub(crate) fn send(&self, generation: u64, id: u64, request: Request) {
        let mut state = self.state.lock();
        self.request(&mut state, generation, id, request);
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
    }

    fn request(&self, state: &mut State, generation: u64, id: u64, request: Request) {
        let Some(index) = state
            .sessions
            .iter()
            .position(|session| session.generation == generation)
        else {
            return;
        };
        let is_last = index + 1 == state.sessions.len();
        let command = match request {
            Request::Announce { topic, bytes } => {
                let content = BroadcastContent::Announced {
                    generation,
                    topic,
                    bytes,
                };
                broadcast(&content)
            }
            Request::Direct { to, topic, bytes } => {
                let content = DirectContent {
                    generation,
                    topic,
                    bytes,
                };
                let bytes = wire::encode(&content);
                let session = &mut state.sessions[index];
                let Some(peer) = session.membership.members.get(to) else {
                    return;
                };
                let peer = peer.id;
                session.outbox.add_direct(to, bytes.clone());
                Command::SendDirect { to: peer, bytes }
            }
            Request::LeaveWorld { why } => {
                if let Some(why) = why.clone() {
                    let failed = BroadcastContent::Failed { generation, why };
                    state.handle(Input::Command(broadcast(&failed)));
                }
                if is_last {
                    state.handle(Input::Command(Command::Abstain));
                }
                return self.ask(state, index, id, Request::LeaveWorld { why });
            }
            request => return self.ask(state, index, id, request),
        };
        state.handle(Input::Command(command));
    }

    /// Sends a request to the coordinator, or defers it to the next one.
    fn ask(&self, state: &mut State, index: usize, id: u64, request: Request) {
        let session = &mut state.sessions[index];
        let numbered = NumberedRequest {
            generation: session.generation,
            id,
            request,
        };
        let bytes = session.outbox.add(&numbered, &session.inbox);
        if state.machine.has_coordinator() {
            state.handle(Input::Command(Command::Request(bytes)));
        } else {
            session.outbox.defer(&numbered, bytes);
        }
    }

    /// Carries out the outputs of the machine and the services, until there are none.
    pub(super) fn run_outputs(&self, state: &mut State) {
        loop {
            if let Some(output) = state.machine.poll() {
                match output {
                    Output::Connection(request) => self.handle_connection_request(state, request),
                    Output::Event(event) => self.event(state, event),
                }
            } else if !self.handle_service_output(state) {
                return;
            }
        }
    }

    fn handle_connection_request(&self, state: &mut State, request: ConnectionRequest) {
        #[cfg(test)]
        if let ConnectionRequest::Transmit(_, frame) = &request
            && state.is_crashed(frame)
        {
            return;
        }
        let connections = &mut state.connections;
        if let Some(input) = connections.handle_connection_request(&self.driver(), request) {
            state.handle(input);
        }
    }

    pub(super) fn driver(&self) -> Weak<dyn MachineDriver> {
        Weak::clone(&self.this) as Weak<dyn MachineDriver>
    }

    fn event(&self, state: &mut State, event: Event) {
        match event {
            Event::Active(membership) => self.generation_active(state, membership),
            Event::Coordinator(id) => self.coordinator_changed(state, id),
            Event::Entry(entry) => {
                state.apply_entry(&entry, self.me);
                if matches!(*entry, Entry::Departed { .. }) {
                    self.changed.notify_all();
                }
            }
            Event::Direct(from, bytes) => state.receive_direct(from, &bytes),
            Event::Request(from, bytes) => state.receive_request(from, &bytes),
            Event::Reply(bytes) => state.decode_reply(&bytes),
            Event::Suspected(member, nanos) => {
                state.report_suspicion(member, Suspicion::Lasts(Duration::from_nanos(nanos)));
            }
            Event::Heard(member, nanos) => {
                state.report_suspicion(member, Suspicion::Ended(Duration::from_nanos(nanos)));
            }
            Event::Resumed(member, nanos) => {
                let outage_ms = nanos / 1_000_000;
                let slot = member.slot;
                tracing::info!(name: "nccl.rendezvous.resumed", target: "nccl", slot, outage_ms, "a lost connection was restored");
            }
            Event::ReconfigureFailed(missing) => {
                state.reconfiguration_missing = Some(missing);
                self.changed.notify_all();
            }
            Event::Excluded(why) => {
                state.exclude(&why);
                state.excluded = Some(why);
                self.changed.notify_all();
            }
            Event::Left => {
                state.left = true;
                state.work.closes_acceptor = true;
                self.changed.notify_all();
            }
            Event::Claim(generation, half) => state.work.claims.push((generation, half)),
            Event::Joiners(count) => {
                state.joiners = count;
                state.push_all(&Push::Joiners(count));
            }
            Event::Joined(id) => {
                if state.formation_error.is_some() {
                    state.formation_error_received.insert(id.slot);
                } else if let Some(process) = state.joined(id.slot as usize) {
                    let known = RankRecord::forming(id.slot as usize, process);
                    state.send_to_observers(state.generation(), &Push::Rank(known));
                }
                self.changed.notify_all();
            }
            Event::JobUnreachable(_) | Event::Forming(_) => {}
            Event::JoinRevoked(slot, departure) => {
                let rank = slot as usize;
                state.abort_formation(&RequestError::Departed { rank, departure });
            }
            Event::FormationAborted(bytes) => {
                let why = wire::decode(&bytes).unwrap_or(RequestError::OtherMembers);
                state.formation_error.get_or_insert(why);
                self.changed.notify_all();
            }
        }
    }

    /// Handles that this process belongs to a new generation.
    pub(super) fn generation_active(&self, state: &mut State, membership: SharedMembership) {
        if membership.generation.proposer == self.me {
            log_mixed_tolerance(&membership);
        }
        state.departed.clear();
        (state.reconfiguration_missing, state.coordinator) = (None, None);
        (
            state.ended_initial_coordinator,
            state.initial_coordinator_watch,
        ) = (None, None);
        state.joiners = 0;
        // A witness has no rank.
        if let Some(rank) = membership.rank_of(self.me) {
            state.sessions.push(GenerationSession {
                generation: membership.generation.number,
                rank,
                membership: Arc::clone(&membership),
                inbox: state.inbox.take().unwrap_or_default(),
                outbox: Outbox::new(membership.generation.number, rank),
                is_taken: false,
            });
        }
        state.process_watches.retain(|id, _| membership.votes(*id));
        state.exit_reports.retain(|id, _| membership.votes(*id));
        let unwatched: Vec<_> = process_watch::of_this_kernel(&membership.members)
            .filter(|process| !state.process_watches.contains_key(&process.id))
            .collect();
        for process in unwatched {
            match self.watch(process) {
                process_watch::WatchOutcome::Watched(watch) => {
                    _ = state.process_watches.insert(process.id, watch)
                }
                process_watch::WatchOutcome::Ended => {
                    state.handle(Input::Ended(process.id, Proof::Kernel))
                }
                process_watch::WatchOutcome::NotWatched => {}
            }
        }
        self.changed.notify_all();
    }

    /// Watches the process of a member.
    fn watch(&self, process: &ProcessInfo) -> process_watch::WatchOutcome {
        let (this, member) = (Weak::clone(&self.this), process.id);
        process_watch::watch_process(process, move || {
            if let Some(node) = this.upgrade() {
                node.process_ended(member);
            }
        })
    }

    /// Watches the initial coordinator: the process at the other end of this socket.
    pub(super) fn watch_initial_coordinator(&self, socket: OwnedFd) -> Option<Arc<ProcessWatch>> {
        let this = Weak::clone(&self.this);
        process_watch::watch_socket_peer(socket, move |pid| {
            if let Some(node) = this.upgrade() {
                node.initial_coordinator_ended(pid);
            }
        })
    }

    /// Handles that a member is now the coordinator.
    fn coordinator_changed(&self, state: &mut State, id: MemberId) {
        let before = state.coordinator.replace(id);
        let last = state.last_coordinator.replace(id);
        self.changed.notify_all();
        let is_other = before.is_some_and(|before| before != id);
        if is_other {
            // Requests to the previous coordinator are not answered any more.
            let why = Lost::from(LossKind::Superseded);
            for session in &state.sessions {
                session.inbox.interrupt(&why);
            }
        }
        let me = self.me;
        state.coordinator_heartbeat = (id != me).then(|| CoordinatorHeartbeat {
            last_heartbeat: Instant::now(),
            suspected_since: None,
        });
        if id == me {
            let is_first = before.is_none();
            if is_first {
                state.broadcast_watched();
            }
            let State {
                services,
                sessions,
                departed,
                joiners,
                ..
            } = state;
            if let Some(session) = sessions.last() {
                let former = before.filter(|_| !is_first);
                services.open(session.generation, &session.membership, departed, former);
                if *joiners > 0 {
                    let count = *joiners;
                    state.push_all(&Push::Joiners(count));
                }
            }
            state.work.listens_at_job_addresses |= !is_first;
            if is_other && let Some(session) = state.sessions.last() {
                state
                    .work
                    .liveness_changes
                    .push(LivenessChange::Coordinates(session.rank));
            }
        } else {
            state.services.close();
            // The coordinator counts them.
            state.joiners = 0;
        }
        let generation = state.generation();
        let mut commands = Vec::new();
        for session in &mut state.sessions {
            if let Some(rank) = session.membership.rank_of(id) {
                session
                    .inbox
                    .set_coordinator(rank, is_other && session.generation == generation);
            }
            let rank_of = |id: MemberId| session.membership.rank_of(id);
            if !is_other && before.is_some() {
                let repeated = session
                    .outbox
                    .requests_to_repeat(&session.inbox)
                    .into_iter();
                commands.extend(repeated.map(Command::Request));
            } else {
                // An earlier generation had a coordinator, also if this process did not hear of it.
                let is_earlier = session.generation != generation;
                let before = match before {
                    _ if is_earlier && last == Some(id) => session.inbox.follow_again(),
                    None if !is_earlier => FollowedBefore::None,
                    _ => FollowedBefore::Other(last.and_then(rank_of).unwrap_or_default()),
                };
                let requests = session.outbox.requests_to_resend(&session.inbox, before);
                commands.extend(requests.into_iter().map(Command::Request));
                if is_other {
                    commands.extend(session.outbox.recent_direct().into_iter().filter_map(
                        |(to, bytes)| {
                            let to = session.membership.members.get(to)?.id;
                            Some(Command::SendDirect { to, bytes })
                        },
                    ));
                }
            }
            state.work.inboxes.push(Arc::clone(&session.inbox));
        }
        for command in commands {
            state.handle(Input::Command(command));
        }
    }

    /// Handles one output of a service. Returns whether there was one.
    fn handle_service_output(&self, state: &mut State) -> bool {
        let output = state.services.poll().or_else(|| {
            state.count_majority();
            state.services.poll()
        });
        let Some((generation, output)) = output else {
            return false;
        };
        state.deliver_service_output(generation, output, self.me);
        true
    }

    /// Handles the end of a process under this kernel.
    pub(super) fn process_ended(&self, member: MemberId) {
        let peer_connection = {
            let state = self.state.lock();
            let connection = state.machine.connection_of(member);
            connection.and_then(|number| state.connections.get(number).cloned())
        };
        // Its last messages may have arrived, possibly with a leave message.
        if let Some(peer_connection) = peer_connection {
            peer_connection.read_if_free();
        }
        let mut state = self.state.lock();
        state.process_watches.remove(&member);
        if let Some(end) = state.exit_reports.remove(&member) {
            state.handle(Input::Ended(member, Proof::Launcher(Box::new(end))));
        } else if state.has_exit_reporter(member) {
            let until = Instant::now() + EXIT_REPORT_WAIT;
            state.deferred_ends.push((until, member, Proof::Kernel));
            state.handle(Input::Exited(member));
        } else {
            state.handle(Input::Ended(member, Proof::Kernel));
        }
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
    }

    /// Handles the end of the initial coordinator, reported by the kernel.
    fn initial_coordinator_ended(&self, pid: u64) {
        let mut state = self.state.lock();
        state.initial_coordinator_watch = None;
        if state.sessions.is_empty() {
            state.ended_initial_coordinator = Some((Instant::now() + STAND_IN_WAIT, pid));
            self.changed.notify_all();
        }
    }

    /// Reports progress to the machine if NCCL has reached all ranks since the last check.
    fn check_progress(&self, state: &mut State, now: Instant) {
        let is_early = |at: Instant| now.saturating_duration_since(at) < PROGRESS_INTERVAL;
        let is_tolerated = state.machine.membership().tolerates_unreachable();
        if !is_tolerated || state.progress.at.is_some_and(is_early) {
            return;
        }
        let Some(recorder) = self.recorder.lock().clone() else {
            return;
        };
        let before = std::mem::replace(
            &mut state.progress,
            ProgressSample {
                at: Some(now),
                generation: state.machine.membership().generation.number,
                progress: recorder.progress(),
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

    /// Waits until `changed` is signalled, or until the deadline.
    pub(super) fn wait(&self, state: &mut MutexGuard<'_, State>, deadline: Instant) {
        self.changed.wait_until(state, deadline);
    }
}

impl MachineDriver for Node {
    fn frames_arrived(
        &self,
        number: proto::Connection,
        frames: Vec<proto::Frame>,
        lost: Option<Lost>,
    ) {
        let mut state = self.state.lock();
        if frames
            .iter()
            .any(|frame| matches!(frame, proto::Frame::Heartbeat(_)))
        {
            state.record_heartbeat();
            self.check_progress(&mut state, Instant::now());
        }
        // Why a process that may be alive is unreachable; the end of a connection alone shows nothing about the
        // process.
        let evidence = lost.clone().map(|lost| match lost.how {
            LossKind::Closed => UnreachableEvidence::Closed.into(),
            _ => lost,
        });
        let evidence = evidence.filter(Lost::may_live);
        if let (Some(peer), Some(lost)) = (state.machine.peer_of(number), evidence) {
            state.handle(Input::Evidence(peer, lost));
        }
        for input in state.connections.inputs(number, frames, lost.is_some()) {
            state.handle(input);
        }
        self.run_outputs(&mut state);
    }

    fn dialled(&self, peer: MemberId, connection: connect::AuthenticatedConnection) {
        let mut state = self.state.lock();
        let input = state
            .connections
            .connected(&self.driver(), peer, connection);
        state.handle(input);
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
    }

    fn dial_failed(&self, peer: MemberId, lost: Lost) {
        let mut state = self.state.lock();
        state.handle(Input::Evidence(peer, lost));
        state.handle(Input::DialFailed(peer));
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
    }

    fn run_deferred_work(&self) {
        loop {
            let mut state = self.state.lock();
            let work = std::mem::take(&mut state.work);
            let requests = std::mem::take(&mut state.connections.work);
            if work.is_empty() && requests.is_empty() {
                self.schedule(&mut state);
                return;
            }
            drop(state);
            requests.carry_out(&self.driver(), &self.dialer);
            for inbox in work.inboxes {
                inbox.run_handlers();
            }
            work.liveness_changes
                .into_iter()
                .for_each(LivenessChange::log);
            for (generation, half) in work.claims {
                self.claim(generation, half);
            }
            #[cfg(test)]
            if work.dies {
                self.cut_for_a_test();
            }
            if let Some(acceptor) = self.acceptor.get() {
                if work.listens_at_job_addresses {
                    acceptor.listen_at_job_addresses();
                }
                if work.closes_acceptor {
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
        let due: Vec<_> = state
            .deferred_ends
            .extract_if(.., |(until, ..)| *until <= now)
            .collect();
        for (_, member, proof) in due {
            state.handle(Input::Ended(member, proof));
        }
        self.check_progress(&mut state, now);
        let time = state.clock.time(now);
        if state.machine.next_timeout() <= time {
            state.machine.handle_timeout(time);
        }
        state.check_coordinator_heartbeat(now);
        state.services.handle_timeout(now);
        let reports = state.services.reports(now);
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
        for text in reports {
            tracing::info!(name: "nccl.rendezvous.waiting", target: "nccl", "still waiting: {text}");
        }
    }
}

impl DeferredWork {
    fn is_empty(&self) -> bool {
        #[cfg(test)]
        if self.dies {
            return false;
        }
        self.inboxes.is_empty()
            && self.liveness_changes.is_empty()
            && self.claims.is_empty()
            && !self.listens_at_job_addresses
            && !self.closes_acceptor
    }
}

impl State {
    /// Returns the process id of the initial coordinator, if it has ended and no other process has taken its place.
    pub(super) fn lost_initial_coordinator(&mut self, now: Instant) -> Option<u64> {
        let (_, pid) = self
            .ended_initial_coordinator
            .take_if(|(until, _)| *until <= now)?;
        self.connections.is_empty().then_some(pid)
    }

    pub(super) fn handle(&mut self, input: Input) {
        self.machine.handle(self.clock.time(Instant::now()), input);
    }

    /// Whether this process behaves as if it were dead, so that `frame` is not sent.
    #[cfg(test)]
    fn is_crashed(&mut self, frame: &proto::Frame) -> bool {
        use proto::Message::{Append, Direct};
        let is_send = match frame {
            proto::Frame::Data { message, .. } => matches!(message, Append { .. } | Direct { .. }),
            _ => false,
        };
        let is_heartbeat = matches!(frame, proto::Frame::Heartbeat(_));
        match &mut self.sends_before_crash {
            None => false,
            Some(usize::MAX) => true,
            Some(0) if is_send || is_heartbeat => {
                self.sends_before_crash = Some(usize::MAX);
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
        self.machine.membership().generation.number
    }

    fn next_timeout(&self) -> Option<Instant> {
        let machine = self.clock.instant(self.machine.next_timeout());
        let deferred_ends = self.deferred_ends.iter().map(|(until, ..)| *until).min();
        let heard = self.coordinator_heartbeat.as_ref();
        let heard = heard.filter(|heard| heard.suspected_since.is_none());
        machine
            .into_iter()
            .chain(self.services.next_timeout())
            .chain(deferred_ends)
            .chain(heard.map(|heard| heard.last_heartbeat + SUSPECT_AFTER))
            .min()
    }

    /// Reports a suspected coordinator, like a coordinator reports other suspects: its process may be stopped.
    fn check_coordinator_heartbeat(&mut self, now: Instant) {
        let has_coordinator = self.machine.has_coordinator();
        let heard = self.coordinator_heartbeat.as_mut();
        let Some(heard) = heard.filter(|heard| heard.suspected_since.is_none()) else {
            return;
        };
        let late = now.checked_duration_since(heard.last_heartbeat + SUSPECT_AFTER);
        match late {
            None => {}
            // A coordinator that this process has lost is not reported as alive.
            Some(late) if late > OWN_DELAY || !has_coordinator => heard.last_heartbeat = now,
            Some(late) => {
                heard.suspected_since = Some(heard.last_heartbeat);
                self.report_coordinator_suspicion(Suspicion::Lasts(SUSPECT_AFTER + late));
            }
        }
    }

    /// Reports that the coordinator is a suspect, or answers again.
    fn report_coordinator_suspicion(&mut self, suspicion: Suspicion) {
        let Some(session) = self.sessions.last() else {
            return;
        };
        let rank = self
            .coordinator
            .and_then(|id| session.membership.rank_of(id));
        let Some(rank) = rank else {
            return;
        };
        let process = &session.membership.members[rank];
        let silence = suspicion.lasting();
        let state = silence.and_then(|_| state_here(process));
        let change = LivenessChange::of(rank, suspicion, state.clone());
        self.work.liveness_changes.push(change);
        session.inbox.push(Push::Suspected {
            rank,
            silence,
            state,
        });
        self.work.inboxes.push(Arc::clone(&session.inbox));
    }

    /// Whether a launcher will report how a member ends, as stated by the member itself or by an observer.
    fn has_exit_reporter(&self, member: MemberId) -> bool {
        let process = self.machine.membership().process(member);
        process.is_some_and(|process| process.observed)
            || self.exit_reported_by_observer.contains(&member)
    }

    /// Reports to newly joined members the members whose ends launchers will report.
    fn broadcast_watched(&mut self) {
        let members = self.machine.membership().members.iter();
        let watched = members
            .map(|process| process.id)
            .filter(|id| self.exit_reported_by_observer.contains(id));
        let watched: Vec<_> = watched.collect();
        if !watched.is_empty() {
            self.handle(Input::Command(broadcast(&BroadcastContent::Watched(
                watched,
            ))));
        }
    }

    /// Records a heartbeat of the coordinator.
    fn record_heartbeat(&mut self) {
        let now = Instant::now();
        if let Some(heard) = &mut self.coordinator_heartbeat {
            heard.last_heartbeat = now;
            if let Some(since) = heard.suspected_since.take() {
                let silence = now.saturating_duration_since(since);
                self.report_coordinator_suspicion(Suspicion::Ended(silence));
            }
        }
        if let Some(session) = self.sessions.last() {
            session.inbox.record_coordinator_heartbeat(now);
        }
        let call = application().last_call();
        if let (Some(call), Some(session)) = (call, self.sessions.last()) {
            let numbered = NumberedRequest {
                generation: session.generation,
                id: NO_ANSWER,
                request: Request::LastCall { call },
            };
            self.handle(Input::Command(Command::Request(
                numbered.encode(RequestHead::default()),
            )));
        }
    }

    fn session(&mut self, generation: u64) -> Option<&mut GenerationSession> {
        let mut sessions = self.sessions.iter_mut();
        sessions.find(|session| session.generation == generation)
    }

    fn apply_entry(&mut self, entry: &Entry, me: MemberId) {
        match entry {
            Entry::Departed {
                member,
                departure,
                proven,
            } => {
                self.process_watches.remove(member);
                self.exit_reported_by_observer.remove(member);
                let is_its = |(_, id, _): &mut (Instant, MemberId, Proof)| id == member;
                let deferred: Vec<_> = self.deferred_ends.extract_if(.., is_its).collect();
                // If the loss was not proven, the end still counts for later decisions.
                for (_, member, proof) in deferred.into_iter().filter(|_| !proven) {
                    self.handle(Input::Ended(member, proof));
                }
                if self.coordinator == Some(*member) {
                    self.coordinator_heartbeat = None;
                }
                self.departed.push((*member, departure.clone()));
                for session in &self.sessions {
                    // A member's own leave message is not delivered to the member itself.
                    if *member != me
                        && let Some(rank) = session.membership.rank_of(*member)
                    {
                        let departure = departure.clone();
                        session.inbox.push(Push::Departed { rank, departure });
                        self.work.inboxes.push(Arc::clone(&session.inbox));
                    }
                }
                self.services.record_departure(*member, departure, false);
            }
            Entry::Broadcast(sent) => match wire::decode(&sent.bytes) {
                Ok(BroadcastContent::Announced {
                    generation,
                    topic,
                    bytes,
                }) => {
                    let from = sent.from;
                    let bytes = bytes.into();
                    self.deliver(generation, from, |from| Push::Announced {
                        from,
                        topic,
                        bytes,
                    });
                }
                Ok(BroadcastContent::Failed { generation, why }) => {
                    let from = sent.from;
                    let departure = Departure::Failed(why);
                    let reported = departure.clone();
                    self.deliver(generation, from, |rank| Push::Departed {
                        rank,
                        departure: reported,
                    });
                    self.services
                        .record_failure_in(generation, from, &departure);
                }
                Ok(BroadcastContent::Watched(members)) => {
                    self.exit_reported_by_observer.extend(members)
                }
                Ok(BroadcastContent::Exit { member, end }) => {
                    let is_deferred = |(_, id, _): &mut (Instant, MemberId, Proof)| *id == member;
                    if self.deferred_ends.extract_if(.., is_deferred).count() > 0 {
                        self.handle(Input::Ended(member, Proof::Launcher(Box::new(end))));
                    } else if self.machine.membership().votes(member) {
                        self.exit_reports.insert(member, end);
                    }
                }
                Err(broken) => {
                    tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "broadcast", why = broken.0, "a broadcast of a member cannot be decoded");
                }
            },
            Entry::OperatorDecision(decision) => {
                let generation = decision.generation;
                tracing::warn!(name: "nccl.rendezvous.operator", target: "nccl", generation, "the operator has decided which side continues");
            }
        }
    }

    /// Puts a message from a member into the inbox of a generation.
    fn deliver(&mut self, generation: u64, from: MemberId, push: impl FnOnce(usize) -> Push) {
        let mut sessions = self.sessions.iter();
        if let Some(session) = sessions.find(|session| session.generation == generation)
            && let Some(rank) = session.membership.rank_of(from)
        {
            session.inbox.push(push(rank));
            self.work.inboxes.push(Arc::clone(&session.inbox));
        }
    }

    fn receive_direct(&mut self, from: MemberId, bytes: &[u8]) {
        if let Ok(DirectContent {
            generation,
            topic,
            bytes,
        }) = wire::decode(bytes)
        {
            let bytes = bytes.into();
            self.deliver(generation, from, |from| Push::Direct { from, topic, bytes });
        }
    }

    /// Sets whether there is a majority, which exchanges among some of the ranks wait for: the other ranks may have
    /// formed the next generation without this side.
    fn count_majority(&mut self) {
        let time = self.clock.time(Instant::now());
        self.services.set_majority(self.machine.holds_lease(time));
    }

    fn receive_request(&mut self, from: MemberId, bytes: &[u8]) {
        let Ok((head, numbered)) = NumberedRequest::decode(bytes) else {
            return;
        };
        let NumberedRequest {
            generation,
            id,
            request,
        } = numbered;
        self.count_majority();
        match request {
            Request::LastCall { mut call } => {
                cut(&mut call, LONGEST_NAME);
                self.handle(Input::Command(Command::Called(from, call)));
            }
            Request::WatchRanks { ranks } => {
                self.record_watching_observer(from, generation, &ranks)
            }
            Request::ExitReport { rank, pid, end } => {
                self.report_process_end(generation, rank, pid, end)
            }
            request => {
                let is_phase = matches!(request, Request::Phase { .. });
                // The count may have changed while the rank did not follow.
                if matches!(request, Request::Follow { .. }) && generation == self.generation() {
                    let push = Push::Joiners(self.joiners).encode();
                    let bytes = driver_message::encode_reply(generation, 0, &push.payload);
                    self.reply(from, bytes);
                }
                self.services.handle(from, generation, id, request, head);
                if is_phase {
                    self.send_rank_to_observers(generation, from);
                }
            }
        }
    }

    /// Records that an observer has started these ranks as these processes, and sends it the state of all ranks.
    fn record_watching_observer(
        &mut self,
        observer: MemberId,
        generation: u64,
        ranks: &[(usize, u64)],
    ) {
        if self.is_forming(generation) {
            let size = self.services.size;
            self.send_to_observer(observer, generation, &Push::WorldSize(size));
            for rank in 0..size {
                if let Some(known) = self
                    .joined(rank)
                    .map(|process| RankRecord::forming(rank, process))
                {
                    self.send_to_observer(observer, generation, &Push::Rank(known));
                }
            }
            return;
        }
        let Some(session) = self.session(generation) else {
            return;
        };
        let processes = &session.membership.members;
        // If the process id differs, the process that the observer started has itself started the one that is the rank.
        let members = ranks.iter().filter_map(|(rank, _)| processes.get(*rank));
        let members: Vec<_> = members.map(|process| process.id).collect();
        if members
            .iter()
            .any(|id| !self.exit_reported_by_observer.contains(id))
        {
            self.handle(Input::Command(broadcast(&BroadcastContent::Watched(
                members,
            ))));
        }
        for known in self.services.known(generation) {
            self.send_to_observer(observer, generation, &Push::Rank(known));
        }
    }

    /// Whether this process is forming this generation.
    fn is_forming(&self, generation: u64) -> bool {
        self.machine.is_joining() && generation == self.generation()
    }

    /// Returns the process of a rank that has joined the generation that this process is forming.
    fn joined(&self, rank: usize) -> Option<&ProcessInfo> {
        let slot = u32::try_from(rank).ok()?;
        self.machine
            .joined(slot)
            .filter(|_| rank < self.services.size)
    }

    /// Handles an observer's report of how the process that it started as this rank ended, while the first generation
    /// is being formed.
    fn report_process_end(&mut self, generation: u64, rank: usize, pid: u64, mut end: ProcessEnd) {
        end.cut(LONGEST_EXIT_REPORT);
        if !self.is_forming(generation) {
            return self.broadcast_exit_report(generation, rank, pid, end);
        }
        // Rank 0 is this process.
        if !(1..self.services.size).contains(&rank) {
            return;
        }
        match self.joined(rank) {
            // The leave message or the failure of the rank may still be on its way.
            Some(process) if u64::from(process.pid) == pid => {
                let (until, id) = (Instant::now() + EXIT_REPORT_WAIT, process.id);
                let proof = Proof::Launcher(Box::new(end));
                self.deferred_ends.push((until, id, proof));
            }
            // A process with a different id may be a different one, which has started the rank's process.
            Some(_) => {}
            None => {
                let departure = Departure::Lost(end.into());
                self.abort_formation(&RequestError::Departed { rank, departure });
            }
        }
    }

    /// Reports to all members how the process that started a rank's process ended; they add it to their report of that
    /// rank's end.
    fn broadcast_exit_report(&mut self, generation: u64, rank: usize, pid: u64, end: ProcessEnd) {
        let process = self
            .session(generation)
            .and_then(|session| session.membership.members.get(rank));
        if let Some(process) = process.filter(|process| u64::from(process.pid) != pid) {
            let member = process.id;
            let content = BroadcastContent::Exit { member, end };
            self.handle(Input::Command(broadcast(&content)));
        }
    }

    /// Gives up the first generation.
    pub(super) fn abort_formation(&mut self, why: &RequestError) {
        let all = 0..self.services.size as u32;
        let joined = all.filter(|slot| self.machine.joined(*slot).is_some());
        self.formation_error_received.extend(joined);
        let bytes = wire::encode(why).into();
        self.handle(Input::Command(Command::AbortFormation(bytes)));
    }

    /// Returns the ranks among those that satisfy `is_wanted` that have not received why the first generation was given
    /// up.
    pub(super) fn ranks_without_formation_error(
        &self,
        is_wanted: impl Fn(usize) -> bool,
    ) -> impl Iterator<Item = usize> {
        let all = (1..self.services.size).filter(move |rank| is_wanted(*rank));
        all.filter(|rank| !self.formation_error_received.contains(&(*rank as u32)))
    }

    fn send_to_observer(&mut self, observer: MemberId, generation: u64, push: &Push) {
        let bytes = driver_message::encode_reply(generation, 0, &push.encode().payload);
        self.reply(observer, bytes);
    }

    /// Sends to all observers.
    fn send_to_observers(&mut self, generation: u64, push: &Push) {
        let observers = self.machine.observers();
        if observers.is_empty() {
            return;
        }
        let bytes = driver_message::encode_reply(generation, 0, &push.encode().payload);
        for observer in observers {
            self.reply(observer, Arc::clone(&bytes));
        }
    }

    /// Sends the state of a member to the observers.
    fn send_rank_to_observers(&mut self, generation: u64, member: MemberId) {
        if self.machine.observers().is_empty() {
            return;
        }
        let Some(rank) = self
            .session(generation)
            .and_then(|session| session.membership.rank_of(member))
        else {
            return;
        };
        if let Some(known) = self.services.known_of(generation, rank) {
            self.send_to_observers(generation, &Push::Rank(known));
        }
    }

    fn decode_reply(&mut self, bytes: &[u8]) {
        let Ok((generation, id, incoming)) = decode_reply(bytes) else {
            return;
        };
        self.receive(generation, id, incoming);
    }

    fn receive(&mut self, generation: u64, id: u64, incoming: CoordinatorMessage) {
        let Some(session) = self.session(generation) else {
            return;
        };
        let inbox = Arc::clone(&session.inbox);
        match incoming {
            CoordinatorMessage::Answer(answer) => {
                session.outbox.answered(id, &answer);
                inbox.answer(id, answer);
            }
            CoordinatorMessage::Push(Push::ProbeProcess { rank, pid }) => {
                if let Some(state) = process::state_of(pid) {
                    let numbered = NumberedRequest {
                        generation,
                        id: NO_ANSWER,
                        request: Request::ProcessProbed { rank, state },
                    };
                    self.handle(Input::Command(Command::Request(
                        numbered.encode(RequestHead::default()),
                    )));
                }
            }
            CoordinatorMessage::Push(Push::WantOutcome(round)) => {
                if let Some(bytes) = session.outbox.outcome(round) {
                    self.handle(Input::Command(Command::Request(bytes)));
                }
            }
            CoordinatorMessage::Push(push) => {
                inbox.push(push);
                self.work.inboxes.push(inbox);
            }
        }
    }

    /// Carries out an output of a service.
    fn deliver_service_output(&mut self, generation: u64, output: services::Output, me: MemberId) {
        match output {
            services::Output::Answer { to, answer } => {
                let payload = answer.encode();
                for (member, id) in to {
                    if member == me {
                        self.receive(generation, id, CoordinatorMessage::Answer(answer.clone()));
                    } else {
                        self.reply(
                            member,
                            driver_message::encode_reply(generation, id, &payload),
                        );
                    }
                }
            }
            services::Output::Observe(push) => self.send_to_observers(generation, &push),
            services::Output::Push { to, push } => {
                let bytes = driver_message::encode_reply(generation, 0, &push.encode().payload);
                for member in to {
                    if member == me {
                        self.receive(generation, 0, CoordinatorMessage::Push(push.clone()));
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
        let Some(session) = self.sessions.last() else {
            return;
        };
        let membership = Arc::clone(&session.membership);
        let (generation, rank) = (session.generation, session.rank);
        let to = membership
            .members
            .iter()
            .map(|process| process.id)
            .collect();
        let output = services::Output::Push {
            to,
            push: push.clone(),
        };
        self.deliver_service_output(generation, output, membership.members[rank].id);
    }

    /// Handles that a member is a suspect, or answers again.
    fn report_suspicion(&mut self, member: MemberId, suspicion: Suspicion) {
        let Some(session) = self.sessions.last() else {
            return;
        };
        let Some(rank) = session.membership.rank_of(member) else {
            return;
        };
        let process = &session.membership.members[rank];
        let pid = u64::from(process.pid);
        let silence = suspicion.lasting();
        let state = silence.and_then(|_| state_here(process));
        let change = LivenessChange::of(rank, suspicion, state.clone());
        self.work.liveness_changes.push(change);
        if silence.is_some() && !is_here(process) && process.kernel != 0 {
            // A member under the same kernel can read the state.
            let beside = session.membership.members.iter().find(|other| {
                let has_departed = self.departed.iter().any(|(id, _)| *id == other.id);
                other.kernel == process.kernel && other.id != member && !has_departed
            });
            if let Some(beside) = beside.map(|process| process.id) {
                let push = Push::ProbeProcess { rank, pid };
                let bytes =
                    driver_message::encode_reply(session.generation, 0, &push.encode().payload);
                self.reply(beside, bytes);
            }
        }
        self.push_all(&Push::Suspected {
            rank,
            silence,
            state,
        });
    }

    /// Handles that this process no longer takes part.
    fn exclude(&mut self, why: &Exclusion) {
        self.coordinator_heartbeat = None;
        let Some(session) = self.sessions.last() else {
            return;
        };
        let membership: &Membership = &session.membership;
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
                let is_on_one_host = all.all(|process| process.at.starts_with("unix:"));
                let why = describe_cut(&from, is_on_one_host);
                session.inbox.cut_off(from, &why);
            }
            Exclusion::Superseded(by) => {
                let others = (0..membership.members.len()).filter(|rank| *rank != session.rank);
                let why = describe_superseded(membership.rank_of(*by));
                session.inbox.cut_off(others.collect(), &why);
            }
            Exclusion::LeftBehind(_) => {
                let rank = session.rank;
                let lost = Lost::reported(
                    "it was left behind: the other ranks have formed a later generation",
                );
                let departure = Departure::Lost(lost.clone());
                session.inbox.push(Push::Departed { rank, departure });
                session.inbox.end(&lost);
            }
        }
        for session in &self.sessions {
            // Sessions of earlier generations receive nothing more either.
            session.inbox.end(&Lost::from(LossKind::Superseded));
            self.work.inboxes.push(Arc::clone(&session.inbox));
        }
    }
}

/// Describes the unreachable members, for a side that may not make decisions.
fn describe_cut(from: &[usize], is_on_one_host: bool) -> String {
    let ranks = ranges(from);
    let (who, fault) = match from.len() {
        1 => (format!("rank {ranks}"), "it or this side is at fault"),
        _ => (format!("ranks {ranks}"), "they or this side are at fault"),
    };
    let how = match is_on_one_host {
        true => "on this host one side is or was stopped, frozen or without CPU time",
        false => "a partition of the network",
    };
    format!(
        "cut off from {who}: {how}, and this side has no majority, so that it cannot tell whether {fault}"
    )
}

/// Describes that another process coordinates, which has this rank if it is in the generation.
fn describe_superseded(by: Option<usize>) -> String {
    let by = by.map_or_else(
        || String::from("another process"),
        |by| format!("rank {by}"),
    );
    format!("{by} coordinates now, and the others continue without this rank")
}

/// Logs which ranks do not tolerate unreachable ranks, if others do.
fn log_mixed_tolerance(membership: &Membership) {
    let processes = membership.members.iter().enumerate();
    let intolerant = processes.filter(|(_, process)| !process.tolerates_unreachable);
    let intolerant: Vec<_> = intolerant.map(|(rank, _)| rank).collect();
    if !intolerant.is_empty() && intolerant.len() < membership.members.len() {
        let ranks = ranges(&intolerant);
        tracing::warn!(name: "nccl.rendezvous.tolerance", target: "nccl", ranks, "not all ranks tolerate unreachable ones (NCCL_RUN_UNREACHABLE): none of the job does");
    }
}

fn broadcast(content: &BroadcastContent) -> Command {
    Command::Broadcast {
        topic: String::new(),
        bytes: wire::encode(content),
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("me", &self.me)
            .finish_non_exhaustive()
    }
}

/// Whether a process runs under this kernel.
fn is_here(process: &ProcessInfo) -> bool {
    process.kernel != 0 && process.kernel == process::kernel_sum()
}

/// Returns the state of a process, if it runs under this kernel.
fn state_here(process: &ProcessInfo) -> Option<ProcessState> {
    is_here(process)
        .then(|| process::state_of(process.pid.into()))
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_superseded_rank_learns_who_coordinates_if_that_process_has_a_rank_here() {
        let texts = [Some(2), None].map(describe_superseded);
        assert!(texts[0].starts_with("rank 2 coordinates now"), "{texts:?}");
        assert!(
            texts[1].starts_with("another process coordinates now"),
            "{texts:?}"
        );
    }
}

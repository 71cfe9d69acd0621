//! The driver of an observer's machine, and the observer's thread.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nccl_base::wire;

use super::state::{ExitReport, Shared};
use crate::clock::Clock;
use crate::connect::{AuthenticatedConnection, ClaimedRole};
use crate::coordinator_message::{CoordinatorMessage, Push, RankRecord};
use crate::coordinator_search::{CoordinatorSearch, SearchOutcome};
use crate::departure::{Departure, LossKind, Lost, ProcessEnd};
use crate::driver_message::{BroadcastContent, NumberedRequest, RequestHead, decode_reply};
use crate::job::Job;
use crate::node::Node;
use crate::process;
use crate::proto::{
    self, Command, Entry, Event, Input, MemberId, Mistakes, ObserverMachine, OperatorDecision,
    Output, ProcessInfo, Proof, SharedMembership, Timing,
};
use crate::reactor::{EventFlags, Reactor, Source};
use crate::request::{NO_ANSWER, Request};
use crate::round::RequestError;
use crate::sync::Mutex;
use crate::time::deadline_after;
use crate::transport::{Dialer, MachineDriver, PeerConnections};

/// How long delivering the last reports of a leaving observer may take.
const LAST_REPORTS_TIMEOUT: Duration = Duration::from_secs(1);

/// How often the thread checks without an event; events wake it.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Why the observation ends, if no rank is known to have died.
const LEFT: &str = "the ranks have left the world";

struct ObserverDriver {
    this: Weak<Self>,
    job: Job,
    dialer: Dialer,
    shared: Arc<Shared>,
    state: Mutex<State>,
}

struct State {
    machine: ObserverMachine,
    clock: Clock,
    connections: PeerConnections,
    alarm: Option<Instant>,
    membership: Option<SharedMembership>,
    /// Until there is a membership: the number of the first generation, which is being formed.
    forming: Option<u64>,
    /// Whether the coordinator answers, or the initial coordinator before the first generation.
    has_coordinator: bool,
    /// The ranks that have coordinated in this generation, as far as observed.
    coordinators: Vec<usize>,
    /// Why the observation has ended.
    end_reason: Option<String>,
    /// Changes for the view.
    observations: Vec<Observation>,
}

enum Observation {
    Forming(u64),
    Size(usize),
    /// Whether it is the generation that was being formed.
    Generation(SharedMembership, bool),
    Coordinator(usize),
    Departed(usize, Departure),
    RankRecord(RankRecord),
    Late(Arc<crate::straggler::StragglerReport>),
    Decided(Vec<usize>),
}

impl ObserverDriver {
    fn new(shared: &Arc<Shared>, connection: AuthenticatedConnection, found: &str) -> Arc<Self> {
        let me = ProcessInfo {
            id: MemberId {
                slot: u32::MAX / 2,
                incarnation: RandomState::new().build_hasher().finish().max(1),
            },
            host: crate::host::name().to_string(),
            pid: std::process::id(),
            start_time: process::start_time(),
            kernel: process::kernel_sum(),
            at: String::new(),
            launcher_rank: None,
            observed: false,
            tolerates_unreachable: true,
        };
        let at = vec![found.to_owned()];
        let machine = ObserverMachine::new(
            me,
            at,
            Timing::default(),
            Mistakes::default(),
            Clock::ORIGIN,
        );
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            job: shared.rendezvous.job_identity(),
            dialer: Dialer::default(),
            shared: Arc::clone(shared),
            state: Mutex::new(State {
                machine,
                clock: Clock::start(),
                connections: PeerConnections::starting_with(Some(connection)),
                alarm: None,
                membership: None,
                forming: None,
                has_coordinator: false,
                coordinators: Vec::new(),
                end_reason: None,
                observations: Vec::new(),
            }),
        })
    }

    fn driver(&self) -> Weak<dyn MachineDriver> {
        Weak::clone(&self.this) as Weak<dyn MachineDriver>
    }

    fn input(&self, input: Input) {
        let mut state = self.state.lock();
        state.handle(input);
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
    }

    fn run_outputs(&self, state: &mut State) {
        while let Some(output) = state.machine.poll() {
            match output {
                Output::Connection(request) => {
                    let connections = &mut state.connections;
                    if let Some(input) =
                        connections.handle_connection_request(&self.driver(), request)
                    {
                        state.handle(input);
                    }
                }
                Output::Event(event) => state.event(event),
            }
        }
    }

    /// Sends a request to the coordinator's driver, for the generation that is observed or being formed.
    fn ask(&self, request: Request) {
        let mut state = self.state.lock();
        let active = state.membership.as_ref();
        let active = active.map(|membership| membership.generation.number);
        if let Some(generation) = active.or(state.forming) {
            let numbered = NumberedRequest {
                generation,
                id: NO_ANSWER,
                request,
            };
            state.handle(Input::Command(Command::Request(
                numbered.encode(RequestHead::default()),
            )));
            self.run_outputs(&mut state);
        }
        drop(state);
        self.run_deferred_work();
    }

    /// Applies the observations to the view, and sends the reports that are due.
    fn send_reports(&self, reported: &mut HashSet<usize>) {
        let (observations, membership, has_coordinator, is_flushed) = {
            let mut state = self.state.lock();
            let observations = std::mem::take(&mut state.observations);
            let is_flushed = state.machine.is_flushed();
            (
                observations,
                state.membership.clone(),
                state.has_coordinator,
                is_flushed,
            )
        };
        let (mut watches, mut report_again) = (false, false);
        let mut ends = Vec::new();
        let mut requests = Vec::new();
        let mut decision = None;
        {
            let mut state = self.shared.state();
            let is_news = !observations.is_empty();
            for observations in observations {
                match observations {
                    Observation::Forming(generation) => {
                        state.set_generation(generation);
                        (state.was_connected, state.coordinator) = (true, 0);
                        state.view.connected = true;
                        watches = true;
                        report_again = true;
                    }
                    Observation::Size(size) => state.view.set_size(size),
                    Observation::Generation(membership, was_formed) => {
                        report_again |= was_formed;
                        state.set_generation(membership.generation.number);
                        state.view.set_size(membership.members.len());
                        RankRecord::all_of(&membership).for_each(|known| state.view.learn(known));
                        state.was_connected = true;
                    }
                    Observation::Coordinator(rank) => {
                        state.coordinator = rank;
                        state.view.connected = true;
                        watches = true;
                    }
                    Observation::Departed(rank, departure) => {
                        state.view.record_departure(rank, departure)
                    }
                    Observation::RankRecord(known) => state.view.learn(known),
                    Observation::Late(lateness) => state.view.late(&lateness),
                    Observation::Decided(ranks) => state.view.decided(ranks),
                }
            }
            // Reports to the driver of the initial coordinator may have been lost.
            if report_again {
                reported.clear();
                state
                    .exit_reports
                    .iter_mut()
                    .for_each(|report| report.was_received = false);
            }
            for index in 0..state.exit_reports.len() {
                let ExitReport { rank, pid, end, .. } = state.exit_reports[index].clone();
                if state.exit_reports[index].was_received || !has_coordinator {
                    continue;
                }
                if reported.contains(&index) {
                    state.exit_reports[index].was_received = is_flushed;
                    continue;
                }
                let Some(rank) = state.rank_now(rank, pid) else {
                    continue;
                };
                match &membership {
                    Some(membership) => {
                        let Some(process) = membership.members.get(rank) else {
                            continue;
                        };
                        if u64::from(process.pid) == pid {
                            ends.push((process.id, end));
                        } else {
                            requests.push(Request::ExitReport { rank, pid, end });
                        }
                    }
                    None => requests.push(Request::ExitReport { rank, pid, end }),
                }
                reported.insert(index);
            }
            if is_news {
                self.shared.notify();
            }
            if membership.is_some() {
                decision = state.decision.take();
            }
        }
        if let (Some(ranks), Some(membership)) = (decision, &membership) {
            let processes = ranks
                .iter()
                .filter_map(|rank| membership.members.get(*rank));
            let decision = OperatorDecision {
                generation: membership.generation.number,
                members: processes.map(|process| process.id).collect(),
            };
            self.input(Input::Command(Command::OperatorDecision(decision)));
        }
        for (member, end) in ends {
            self.input(Input::Ended(member, Proof::Launcher(Box::new(end))));
        }
        requests.into_iter().for_each(|request| self.ask(request));
        if watches {
            self.watch();
        }
    }

    /// Describes how the world ended if no rank is left to report it: the ends that only this process knows, and the
    /// coordinators.
    fn describe_end(&self) -> String {
        let (membership, coordinators) = {
            let state = self.state.lock();
            (state.membership.clone(), state.coordinators.clone())
        };
        let Some(membership) = membership else {
            return String::from(LEFT);
        };
        let mut shared = self.shared.state();
        let ranks = membership.members.iter().enumerate();
        let (last, others): (Vec<_>, Vec<_>) =
            ranks.partition(|(rank, _)| coordinators.contains(rank));
        for (rank, process) in others.into_iter().chain(last) {
            let pid = u64::from(process.pid);
            let mut exit_reports = shared.exit_reports.iter();
            let report = exit_reports.find(|report| {
                report.pid == pid && shared.rank_now(report.rank, report.pid) == Some(rank)
            });
            let is_here = process.kernel != 0 && process.kernel == process::kernel_sum();
            let how = match report {
                Some(report) => Some(Lost::from(report.end.clone())),
                None => (is_here && process::find(process.pid, process.start_time).has_ended())
                    .then(|| LossKind::Exited { pid }.into()),
            };
            if let Some(how) = how {
                shared.view.record_departure(rank, Departure::Lost(how));
            }
        }
        self.shared.notify();
        let ends = coordinators.iter().filter_map(|rank| {
            let departure = shared.view.departure(*rank)?;
            (*departure != Departure::Left).then(|| format!("rank {rank} is gone: {departure}"))
        });
        let ends: Vec<_> = ends.collect();
        match ends.is_empty() {
            true => String::from(LEFT),
            false => ends.join("; then "),
        }
    }

    /// Reports which processes this process has started, and asks for the state of all ranks.
    fn watch(&self) {
        let ranks = {
            let state = self.shared.state();
            let started = state.started.iter();
            started
                .filter_map(|&(rank, pid)| Some((state.rank_now(rank, pid)?, pid)))
                .collect()
        };
        self.ask(Request::WatchRanks { ranks });
    }

    fn close(&self) {
        let mut state = self.state.lock();
        state.connections.close_all();
        drop(state);
        self.run_deferred_work();
    }
}

impl MachineDriver for ObserverDriver {
    fn frames_arrived(
        &self,
        number: proto::Connection,
        frames: Vec<proto::Frame>,
        lost: Option<Lost>,
    ) {
        let mut state = self.state.lock();
        for input in state.connections.inputs(number, frames, lost.is_some()) {
            state.handle(input);
        }
        self.run_outputs(&mut state);
    }

    fn run_deferred_work(&self) {
        loop {
            let mut state = self.state.lock();
            let work = std::mem::take(&mut state.connections.work);
            if work.is_empty() {
                let next = state.clock.instant(state.machine.next_timeout());
                let next = next.filter(|next| state.alarm.is_none_or(|alarm| alarm > *next));
                if let (Some(next), Ok(reactor)) = (next, Reactor::get()) {
                    state.alarm = Some(next);
                    reactor.wake_at(next, Weak::clone(&self.this) as Weak<dyn Source>);
                }
                let has_observations = state.has_observations();
                drop(state);
                if has_observations {
                    // Taking the lock ensures that the thread is either waiting or has not checked yet.
                    drop(self.shared.state());
                    self.shared.notify();
                }
                return;
            }
            drop(state);
            work.carry_out(&self.driver(), &self.dialer);
        }
    }

    fn dialled(&self, peer: MemberId, connection: AuthenticatedConnection) {
        let mut state = self.state.lock();
        let input = state
            .connections
            .connected(&self.driver(), peer, connection);
        state.handle(input);
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
    }

    fn dial_failed(&self, peer: MemberId, _: Lost) {
        self.input(Input::DialFailed(peer));
    }

    fn job(&self) -> &Job {
        &self.job
    }

    fn slot(&self) -> usize {
        0
    }
}

impl Source for ObserverDriver {
    fn ready(self: Arc<Self>, _: EventFlags) {}

    fn due(self: Arc<Self>, now: Instant) {
        let mut state = self.state.lock();
        state.alarm.take_if(|alarm| *alarm <= now);
        let time = state.clock.time(now);
        if state.machine.next_timeout() <= time {
            state.machine.handle_timeout(time);
        }
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
    }
}

impl State {
    fn handle(&mut self, input: Input) {
        self.machine.handle(self.clock.time(Instant::now()), input);
    }

    /// Whether there is work for the observer's thread.
    fn has_observations(&self) -> bool {
        !self.observations.is_empty() || self.end_reason.is_some()
    }

    /// Whether another generation has followed this one.
    fn is_past(&self, generation: u64) -> bool {
        let present = self.membership.as_ref();
        present.is_some_and(|present| generation < present.generation.number)
    }

    fn rank_of(&self, id: MemberId) -> Option<usize> {
        self.membership.as_ref()?.rank_of(id)
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Active(membership) => {
                self.membership = Some(Arc::clone(&membership));
                self.has_coordinator = false;
                self.coordinators.clear();
                let was_formed = self.forming.take().is_some();
                self.observations
                    .push(Observation::Generation(membership, was_formed));
            }
            Event::Forming(generation) => {
                (self.forming, self.has_coordinator) = (Some(generation), true);
                self.observations.push(Observation::Forming(generation));
            }
            Event::Coordinator(id) => {
                self.has_coordinator = true;
                let rank = self.rank_of(id);
                let is_new = rank.filter(|rank| self.coordinators.last() != Some(rank));
                self.coordinators.extend(is_new);
                self.observations.extend(rank.map(Observation::Coordinator));
            }
            Event::Entry(entry) => match &*entry {
                Entry::Departed {
                    member, departure, ..
                } => {
                    let rank = self.rank_of(*member);
                    let departed = rank.map(|rank| Observation::Departed(rank, departure.clone()));
                    self.observations.extend(departed);
                }
                Entry::Broadcast(broadcast) => {
                    if let Ok(BroadcastContent::Failed { why, .. }) = wire::decode(&broadcast.bytes)
                    {
                        let rank = self.rank_of(broadcast.from);
                        let failed =
                            rank.map(|rank| Observation::Departed(rank, Departure::Failed(why)));
                        self.observations.extend(failed);
                    }
                }
                Entry::OperatorDecision(decision) => {
                    let ranks = decision.members.iter().filter_map(|id| self.rank_of(*id));
                    let ranks = ranks.collect();
                    self.observations.push(Observation::Decided(ranks));
                }
            },
            Event::Reply(bytes) => match decode_reply(&bytes) {
                // Its ranks are not those of the present generation.
                Ok((generation, ..)) if self.is_past(generation) => {}
                Ok((_, _, CoordinatorMessage::Push(Push::Rank(known)))) => {
                    self.observations.push(Observation::RankRecord(known));
                }
                Ok((_, _, CoordinatorMessage::Push(Push::WorldSize(size)))) => {
                    self.observations.push(Observation::Size(size))
                }
                Ok((_, _, CoordinatorMessage::Push(Push::Stragglers(late)))) => {
                    self.observations.push(Observation::Late(late))
                }
                _ => {}
            },
            Event::JobUnreachable(_) if self.membership.is_some() => {
                self.end_reason = Some(String::from(LEFT));
            }
            Event::JobUnreachable(_) => {
                self.end_reason = Some(String::from("the ranks have not met"))
            }
            Event::FormationAborted(bytes) => {
                if let Ok(RequestError::Departed { rank, departure }) = wire::decode(&bytes) {
                    self.observations
                        .push(Observation::Departed(rank, departure));
                }
                self.end_reason = Some(String::from("the ranks have not met"));
            }
            Event::Left => {
                self.end_reason
                    .get_or_insert(String::from("the observer was dropped"));
            }
            _ => {}
        }
    }
}

/// The observer's thread; runs until the observation ends.
pub(super) fn run(shared: &Arc<Shared>) {
    let why = observe(shared);
    let mut state = shared.state();
    state.view.end(&why);
    state.done = true;
    drop(state);
    shared.notify();
}

fn observe(shared: &Arc<Shared>) -> String {
    let deadline = deadline_after(shared.rendezvous.timeout);
    let (connection, found) = match find_process(shared, deadline) {
        Ok(found) => found,
        Err(why) => return why,
    };
    let driver = ObserverDriver::new(shared, connection, &found);
    {
        let mut state = driver.state.lock();
        driver.run_outputs(&mut state);
    }
    driver.run_deferred_work();
    let mut reported = HashSet::new();
    let mut started = 0;
    loop {
        let over = driver.state.lock().end_reason.clone();
        driver.send_reports(&mut reported);
        if let Some(why) = over {
            driver.close();
            return match why == LEFT {
                true => driver.describe_end(),
                false => why,
            };
        }
        let mut state = shared.state();
        if state.stop {
            break;
        }
        let now = state.started.len();
        if now != started {
            started = now;
            drop(state);
            driver.watch();
            continue;
        }
        #[cfg(test)]
        if std::mem::take(&mut state.cut) {
            driver.state.lock().connections.cut_for_a_test();
        }
        if driver.state.lock().has_observations() {
            continue;
        }
        let until = Instant::now() + CHECK_INTERVAL;
        shared.wait(&mut state, until);
    }
    // The last reports are delivered before the leave message.
    let deadline = Instant::now() + LAST_REPORTS_TIMEOUT;
    loop {
        driver.send_reports(&mut reported);
        let all = shared
            .state()
            .exit_reports
            .iter()
            .all(|report| report.was_received);
        let has_coordinator = driver.state.lock().has_coordinator;
        if all || !has_coordinator || Instant::now() >= deadline {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    driver.input(Input::Command(Command::Leave(Departure::Left)));
    driver.close();
    String::from("the observer was dropped")
}

/// Finds a process of the job.
fn find_process(
    shared: &Arc<Shared>,
    deadline: Instant,
) -> Result<(AuthenticatedConnection, String), String> {
    let rendezvous = &shared.rendezvous;
    let mut search =
        CoordinatorSearch::new(rendezvous, ClaimedRole::new_observer(rendezvous.world_size));
    let mut pause = Duration::from_millis(2);
    loop {
        let is_alive = match search.step(deadline) {
            SearchOutcome::Connected(connection, address) => {
                return Ok((connection, address.to_string()));
            }
            SearchOutcome::Refused(why) => return Err(why),
            SearchOutcome::Alive(_) => true,
            SearchOutcome::NoAnswer(_) => false,
        };
        let mut state = shared.state();
        if state.stop {
            return Err(String::from("the observer was dropped"));
        }
        if search.has_referral() {
            continue;
        }
        let is_numbered = state.is_numbered();
        let mut exit_reports = state.exit_reports.iter();
        let report = exit_reports.find(|report| report.rank == 0 && is_numbered);
        // If other processes answer, rank 0 belonged to an earlier generation.
        if let Some(end) = report
            .filter(|_| !is_alive)
            .map(|report| report.end.clone())
        {
            drop(state);
            return Err(report_absent_rank_0(shared, &end, deadline));
        }
        if Instant::now() >= deadline {
            return Err(search.failure());
        }
        shared.wait(&mut state, Instant::now() + pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Listens in place of rank 0, and reports to joining processes that rank 0 will not join.
fn report_absent_rank_0(shared: &Arc<Shared>, end: &ProcessEnd, deadline: Instant) -> String {
    let lost = Lost::from(end.clone());
    let over = format!("rank 0 never came: {lost}");
    {
        let mut state = shared.state();
        state
            .view
            .record_departure(0, Departure::Lost(lost.clone()));
        for report in &mut state.exit_reports {
            report.was_received = true;
        }
    }
    shared.notify();
    if shared.rendezvous.world_size == 0 {
        return over;
    }
    let should_stop = || shared.state().stop || Instant::now() >= deadline;
    match Node::report_absent_rank_0(&shared.rendezvous, Departure::Lost(lost), should_stop) {
        Ok(()) => over,
        Err(error) => format!("{over}; {error}"),
    }
}

//! How a process joins a world, and how it forms later generations.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, Write as _};
#[cfg(test)]
use std::sync::Weak;
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use nccl_base::ranges::ranges;

use super::acceptor::Acceptor;
use super::driver::{GenerationSession, Node, State};
use crate::connect::{self, ClaimedRole};
use crate::coordinator_search::CoordinatorSearch;
use crate::departure::{Departure, Failure, LossKind};
use crate::environment::Rendezvous;
use crate::error::{Error, Result};
use crate::inbox::Inbox;
use crate::launcher;
use crate::process;
use crate::proto::{Command, Input, MemberId, ProcessInfo, SharedMembership, StartRole};
use crate::rank_process::RankProcess;
#[cfg(test)]
use crate::round::Round;
use crate::round::{Missing, RequestError};
use crate::sanitize;
use crate::service::WAIT_LOG_INTERVAL;
use crate::socket::{self, Listener};
use crate::sync::MutexGuard;
use crate::time::deadline_after;
use crate::transport::MachineDriver as _;

/// How long a rank waits beyond its timeout for the coordinator to report which ranks are missing.
const COORDINATOR_GRACE: Duration = Duration::from_secs(2);

/// The generation passed by a process that leaves and has no session.
pub(crate) const NO_GENERATION: u64 = u64::MAX;

/// How long a leave message may take to arrive.
const LEAVE_SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// How long another process may take to read and open a large answer that the system has accepted for sending.
const LARGE_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the initial coordinator waits for ranks that have not received the reason why there is no first generation.
const LATE_RANKS_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the withdrawal of a published address may take: a discovery may block for a second.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a leaving coordinator waits for other members that leave.
const COORDINATOR_LINGER: Duration = Duration::from_millis(50);

/// How long the members may take to agree on a generation, in addition to the timeout of the request and the time for
/// which they wait for a majority: a member that does not answer is left out after twelve heartbeats.
const AGREEMENT_TIMEOUT: Duration = Duration::from_secs(8);

/// A generation that has become active.
pub(crate) struct ActiveGeneration {
    pub(crate) node: Arc<Node>,
    pub(crate) generation: u64,
    pub(crate) rank: usize,
    pub(crate) membership: SharedMembership,
    pub(crate) inbox: Arc<Inbox>,
}

/// Why there is no next generation for this process.
pub(crate) enum NextGenerationError {
    /// These ranks made no request in time.
    Missing { ranks: Vec<usize>, waited: Duration },
    /// This process no longer takes part.
    Excluded,
    /// Another call of this process waits for the next generation, or has just received it.
    Twice,
}

impl ActiveGeneration {
    fn of(node: &Arc<Node>, session: &mut GenerationSession) -> Self {
        session.is_taken = true;
        Self {
            node: Arc::clone(node),
            generation: session.generation,
            rank: session.rank,
            membership: Arc::clone(&session.membership),
            inbox: Arc::clone(&session.inbox),
        }
    }

    /// Returns the processes of all ranks.
    pub(crate) fn members(&self) -> Vec<RankProcess> {
        let processes = &self.membership.members;
        let mut ranks: Vec<_> = processes
            .iter()
            .filter_map(|process| process.launcher_rank)
            .collect();
        let known = ranks.len();
        ranks.sort_unstable();
        ranks.dedup();
        // Processes that were started by hand under a launcher all have the launcher's variables for the same rank.
        let are_distinct = ranks.len() == known;
        let member = |(rank, process): (usize, &ProcessInfo)| RankProcess {
            host: sanitize::name(&process.host),
            pid: process.pid,
            slot: self.membership.slot(rank),
            launcher_rank: process
                .launcher_rank
                .filter(|_| are_distinct)
                .map(|rank| rank as usize),
            at: Some(process.at.clone()),
            kernel: process.kernel,
        };
        processes.iter().enumerate().map(member).collect()
    }
}

fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Returns the information that other processes receive about this one.
fn process_info(rendezvous: &Rendezvous, slot: usize, at: &str) -> Result<ProcessInfo> {
    let incarnation = random().max(1);
    let launcher_rank = launcher::launched_rank()?;
    Ok(ProcessInfo {
        id: MemberId {
            slot: slot as u32,
            incarnation,
        },
        host: crate::host::name().to_string(),
        pid: std::process::id(),
        start_time: process::start_time(),
        kernel: process::kernel_sum(),
        at: at.to_owned(),
        launcher_rank: launcher_rank.and_then(|rank| rank.try_into().ok()),
        observed: launcher::is_observed(),
        tolerates_unreachable: rendezvous.tolerate_unreachable,
    })
}

impl Node {
    /// Starts a rank of the first generation: rank 0 listens, and the other ranks connect to it. With `absent`, the
    /// process only reports that it will not join, and why.
    pub(crate) fn start_rank(
        rendezvous: &Rendezvous,
        deadline: Instant,
        inbox: &Arc<Inbox>,
        absent: Option<Departure>,
    ) -> Result<Arc<Self>> {
        let Rendezvous {
            rank,
            world_size,
            address,
            generation,
            ..
        } = rendezvous;
        let (number, size) = (*generation, *world_size);
        let (listener, role, first);
        let mut initial_coordinator = None;
        if *rank == 0 {
            listener = socket::listen(address)?;
            tracing::info!(name: "nccl.rendezvous.listening", target: "nccl", at = listener.at, "rank 0 listens");
            if rendezvous.secret.is_none() && listener.at.starts_with("tcp:") {
                warn_of_missing_secret(&listener.at);
            }
            let (size, witnesses) = (size as u32, rendezvous.expected_witnesses());
            role = StartRole::InitialCoordinator {
                number,
                size,
                witnesses,
            };
            first = None;
        } else {
            let claimed_role = ClaimedRole::rank(*rank, size);
            let authenticated = connect::connect_to_rank_0(
                address,
                &rendezvous.job_identity(),
                claimed_role,
                deadline,
            )?;
            let fd = authenticated.connection.fd();
            listener = socket::listen_beside(address, &rank.to_string(), fd)?;
            initial_coordinator = fd.try_clone_to_owned().ok();
            let at = address.to_string();
            role = match absent {
                Some(why) => StartRole::Absent { number, at, why },
                None => StartRole::Rank { number, at },
            };
            first = Some(authenticated);
        }
        let unreachable = socket::unreachable(address, &listener);
        let me = process_info(rendezvous, *rank, &listener.at)?;
        let node = Self::new(rendezvous, me, role, first);
        {
            let mut state = node.state.lock();
            state.services.size = size;
            state.inbox = Some(Arc::clone(inbox));
            state.initial_coordinator_watch =
                initial_coordinator.and_then(|fd| node.watch_initial_coordinator(fd));
            if let Some(why) = unreachable {
                state.services.note_for_errors(why);
            }
        }
        node.open(listener, rendezvous, size)?;
        Ok(node)
    }

    /// Starts a process that votes without a rank.
    pub(crate) fn start_witness(
        rendezvous: &Rendezvous,
        slot: u32,
        deadline: Instant,
    ) -> Result<Arc<Self>> {
        let address = &rendezvous.address;
        let claimed_role = ClaimedRole::member(slot as usize);
        let authenticated = connect::connect_to_rank_0(
            address,
            &rendezvous.job_identity(),
            claimed_role,
            deadline,
        )?;
        let fd = authenticated.connection.fd();
        let listener = socket::listen_beside(address, &format!("{slot}"), fd)?;
        let initial_coordinator = fd.try_clone_to_owned().ok();
        let at = address.to_string();
        let me = process_info(rendezvous, slot as usize, &listener.at)?;
        let number = rendezvous.generation;
        let node = Self::new(
            rendezvous,
            me,
            StartRole::Witness { number, at },
            Some(authenticated),
        );
        // The lock is taken first: the watch removes itself, under the lock, when the process ends.
        let mut state = node.state.lock();
        state.initial_coordinator_watch =
            initial_coordinator.and_then(|fd| node.watch_initial_coordinator(fd));
        drop(state);
        node.open(listener, rendezvous, rendezvous.world_size)?;
        let mut state = node.state.lock();
        while state.coordinator.is_none() {
            let now = Instant::now();
            let is_lost = state.lost_initial_coordinator(now).is_some();
            let why = match &state.formation_error {
                Some(_) => "the ranks have given up the first generation",
                None if is_lost => "rank 0 has ended",
                None if now >= deadline => "not all ranks joined, or they expect no such witness",
                None => {
                    let stand_in = state.ended_initial_coordinator.map(|(until, _)| until);
                    let until = stand_in.map_or(deadline, |until| until.min(deadline));
                    node.wait(&mut state, until);
                    continue;
                }
            };
            drop(state);
            node.leave(NO_GENERATION, Departure::Left);
            return Err(Error::rendezvous(format!("no witness at {address}: {why}")));
        }
        drop(state);
        Ok(node)
    }

    /// Returns the number of the current generation.
    pub(crate) fn generation(&self) -> u64 {
        self.state.lock().generation()
    }

    /// Starts to listen, and starts the machine.
    fn open(
        self: &Arc<Self>,
        listener: Listener,
        rendezvous: &Rendezvous,
        size: usize,
    ) -> Result<()> {
        let acceptor = Acceptor::open(
            self.admission(),
            &self.job,
            listener,
            rendezvous.addresses(),
            size,
        )?;
        let _ = self.acceptor.set(acceptor);
        let mut state = self.state.lock();
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
        Ok(())
    }

    /// Waits until all ranks have joined.
    ///
    /// # Errors
    /// Why the first generation was not formed.
    pub(crate) fn wait_until_formed(
        self: &Arc<Self>,
        deadline: Instant,
    ) -> Result<ActiveGeneration, RequestError> {
        let begun = Instant::now();
        let mut report = begun + WAIT_LOG_INTERVAL;
        let mut until = deadline;
        let mut state = self.state.lock();
        loop {
            if let Some(session) = state.sessions.last_mut() {
                return Ok(ActiveGeneration::of(self, session));
            }
            if let Some(why) = state.formation_error.clone() {
                self.wait_for_late_ranks(&mut state, &why);
                return Err(why);
            }
            let now = Instant::now();
            if let Some(pid) = state.lost_initial_coordinator(now) {
                let departure = Departure::lost(LossKind::Exited { pid });
                return Err(RequestError::Departed { rank: 0, departure });
            }
            if now >= until {
                let coordinates = self.slot() == 0;
                let missing: Vec<_> = match coordinates {
                    true => self.absent(&state),
                    false => vec![0],
                };
                let phase = (!coordinates).then(|| {
                    let phase = crate::phase::Phase::Named(String::from("no answer"));
                    (phase, begun.elapsed())
                });
                let missing = missing.into_iter().map(|rank| Missing {
                    rank,
                    phase: phase.clone(),
                });
                let why = RequestError::TimedOut {
                    missing: missing.collect(),
                    waited: deadline.saturating_duration_since(begun),
                    notes: state.services.notes(),
                };
                if !coordinates && until == deadline {
                    // The coordinator is about to report that itself.
                    until = deadline + COORDINATOR_GRACE;
                    continue;
                }
                if coordinates {
                    state.abort_formation(&why);
                    self.run_outputs(&mut state);
                }
                drop(state);
                self.run_deferred_work();
                return Err(why);
            }
            if now >= report && self.slot() == 0 && state.services.size > 0 {
                report = now + WAIT_LOG_INTERVAL;
                let missing = self.absent(&state);
                let (size, joined) = (state.services.size, state.services.size - missing.len());
                let waited = begun.elapsed().as_secs();
                let never_joined = missing
                    .iter()
                    .take(4)
                    .map(|rank| format!("; rank {rank} has never joined"));
                let never_joined: String = never_joined.collect();
                let more = if missing.len() > 4 { "; …" } else { "" };
                let missing = ranges(&missing);
                tracing::info!(name: "nccl.rendezvous.waiting", target: "nccl", "still waiting: {joined} of {size} ranks have been waiting in World::join for {waited} s; missing: {missing}{never_joined}{more}");
            }
            let mut next_check = until.min(report.max(now));
            if let Some((stand_in_deadline, _)) = state.ended_initial_coordinator {
                next_check = next_check.min(stand_in_deadline);
            }
            self.wait(&mut state, next_check);
        }
    }

    /// On the initial coordinator: waits until ranks that are still joining have received the reason why there is no
    /// first generation; otherwise they would only see that this process has ended.
    fn wait_for_late_ranks(&self, state: &mut MutexGuard<'_, State>, why: &RequestError) {
        let departed = match why {
            RequestError::Departed { rank, .. } if self.slot() == 0 => *rank,
            _ => return,
        };
        let until = Instant::now() + LATE_RANKS_TIMEOUT;
        while Instant::now() < until
            && state
                .ranks_without_formation_error(|rank| rank != departed)
                .next()
                .is_some()
        {
            self.wait(state, until);
        }
    }

    /// Returns the ranks that have not joined, before the first generation is active.
    fn absent(&self, state: &State) -> Vec<usize> {
        let all = 0..state.services.size;
        all.filter(|&rank| rank != self.slot() && state.machine.joined(rank as u32).is_none())
            .collect()
    }

    /// Starts a process that asks to join a running world; waits until the ranks form the next generation.
    pub(crate) fn join_running_world(
        rendezvous: &Rendezvous,
        deadline: Instant,
    ) -> Result<ActiveGeneration> {
        let begun = Instant::now();
        let mut search = CoordinatorSearch::new(rendezvous, ClaimedRole::joiner());
        loop {
            let (authenticated, found) = search.run(deadline)?;
            let slot = rendezvous.rank;
            // Other processes may have asked to join as the same rank, and so may this process.
            let name = format!("{slot}-{:x}", random() as u32);
            let listener = socket::listen_beside(&found, &name, authenticated.connection.fd())?;
            let me = process_info(rendezvous, slot, &listener.at)?;
            let at = vec![found.to_string()];
            let node = Self::new(
                rendezvous,
                me,
                StartRole::Joiner { at },
                Some(authenticated),
            );
            node.open(listener, rendezvous, rendezvous.world_size)?;
            let mut state = node.state.lock();
            let timed_out = loop {
                if let Some(session) = state.sessions.last_mut() {
                    return Ok(ActiveGeneration::of(&node, session));
                }
                if state.excluded.is_some() || state.formation_error.is_some() {
                    break false;
                }
                if Instant::now() >= deadline {
                    break true;
                }
                node.wait(&mut state, deadline);
            };
            drop(state);
            node.leave(NO_GENERATION, Departure::Left);
            if timed_out {
                return Err(Error::rendezvous(format!(
                    "the world at {found} did not form a next generation within {:.1} s, so that this \
                     process could not join: its ranks have to call World::next_generation",
                    begun.elapsed().as_secs_f64()
                )));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Forms the next generation after `generation`.
    ///
    /// # Errors
    /// Why there is no next generation.
    pub(crate) fn reconfigure(
        self: &Arc<Self>,
        generation: u64,
        timeout: Duration,
        leaves_behind: bool,
    ) -> Result<ActiveGeneration, NextGenerationError> {
        let begun = Instant::now();
        let mut state = self.state.lock();
        // A second request would replace the first in the machine, and both calls would take one session.
        let is_taken =
            |session: &GenerationSession| session.generation > generation && session.is_taken;
        if state.is_reconfiguring || state.sessions.iter().any(is_taken) {
            return Err(NextGenerationError::Twice);
        }
        // It became active after an earlier call had given up; another request would be one for the generation after it.
        if let Some(session) = state.sessions.last_mut()
            && session.generation > generation
        {
            return Ok(ActiveGeneration::of(self, session));
        }
        state.is_reconfiguring = true;
        state.reconfiguration_missing = None;
        state.handle(Input::Command(Command::Reconfigure {
            timeout: u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX / 4),
            leaves_behind,
        }));
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
        let deadline =
            begun.checked_add(timeout.saturating_add(self.majority_timeout + AGREEMENT_TIMEOUT));
        let deadline = deadline.unwrap_or(begun + Duration::from_secs(1 << 30));
        let mut state = self.state.lock();
        loop {
            if let Some(session) = state.sessions.last_mut()
                && session.generation > generation
            {
                let active = ActiveGeneration::of(self, session);
                state.is_reconfiguring = false;
                return Ok(active);
            }
            let why = self.next_generation_error(&state, generation, begun, deadline);
            if let Some(why) = why {
                state.is_reconfiguring = false;
                state.handle(Input::Command(Command::CancelReconfigure));
                self.run_outputs(&mut state);
                drop(state);
                self.run_deferred_work();
                return Err(why);
            }
            self.wait(&mut state, deadline);
        }
    }

    /// Returns why a request for the next generation has failed, if it has.
    fn next_generation_error(
        &self,
        state: &State,
        generation: u64,
        begun: Instant,
        deadline: Instant,
    ) -> Option<NextGenerationError> {
        if state.excluded.is_some() || state.left {
            return Some(NextGenerationError::Excluded);
        }
        let missing = match &state.reconfiguration_missing {
            Some(missing) => missing.clone(),
            None if Instant::now() >= deadline => state.coordinator.into_iter().collect(),
            None => return None,
        };
        let mut sessions = state.sessions.iter();
        let session = sessions.find(|session| session.generation == generation)?;
        let ranks = missing.into_iter();
        let ranks = ranks.filter_map(|id| session.membership.rank_of(id));
        Some(NextGenerationError::Missing {
            ranks: ranks.collect(),
            waited: begun.elapsed(),
        })
    }

    /// Ends the session of a generation, or no session for [`NO_GENERATION`]. After the last session that a program
    /// holds, this process leaves, and waits at most [`LEAVE_SEND_TIMEOUT`] until the others know.
    pub(crate) fn leave(&self, generation: u64, final_departure: Departure) {
        let mut state = self.state.lock();
        state
            .sessions
            .retain(|session| session.generation != generation);
        if state.sessions.iter().any(|session| session.is_taken) {
            return;
        }
        // A generation that became active after the program had stopped waiting for it.
        state.sessions.clear();
        // The coordinator leaves last: members usually leave together, and each must report that to a coordinator.
        let linger_deadline = Instant::now() + COORDINATOR_LINGER;
        while state.machine.is_coordinator()
            && !self.is_alone(&state)
            && Instant::now() < linger_deadline
        {
            self.wait(&mut state, linger_deadline);
        }
        // The machine waits a second for the receivers of its leave message, regardless of what is sent before it.
        self.wait_while_sending(&mut state, LARGE_ANSWER_TIMEOUT, |state| {
            !state.machine.is_coordinator()
                || (state.connections.backlog() == 0
                    && state.machine.unacknowledged_large_bytes() == 0)
        });
        state.handle(Input::Command(Command::Leave(final_departure)));
        self.run_outputs(&mut state);
        drop(state);
        self.run_deferred_work();
        let mut state = self.state.lock();
        self.wait_while_sending(&mut state, LEAVE_SEND_TIMEOUT, |state| {
            state.left || state.excluded.is_some() || state.formation_error.is_some()
        });
        self.close(state);
    }

    /// Waits until `should_stop` returns true, or until nothing has been sent for `timeout`: sending may take longer on
    /// a slow network.
    fn wait_while_sending(
        &self,
        state: &mut MutexGuard<'_, State>,
        timeout: Duration,
        should_stop: impl Fn(&State) -> bool,
    ) {
        let mut deadline = Instant::now() + timeout;
        let mut least = usize::MAX;
        while !should_stop(state) && Instant::now() < deadline {
            // An acknowledgement lets the link put the next large message into the connection's queue, which leaves the sum
            // as it is.
            let left = state.connections.backlog() + state.machine.unacknowledged_large_bytes();
            if left < least {
                (least, deadline) = (left, Instant::now() + timeout);
            }
            self.wait(state, deadline.min(Instant::now() + COORDINATOR_LINGER));
        }
    }

    /// Whether all other members of the generation have departed.
    fn is_alone(&self, state: &State) -> bool {
        state.departed.len() + 1 >= state.machine.membership().members.len()
    }

    /// Closes all connections: nothing is sent or received any more. Waits until published addresses are withdrawn, so
    /// that they are even if the process exits now.
    fn close(&self, mut state: MutexGuard<'_, State>) {
        state.connections.close_all();
        state.process_watches.clear();
        drop(state);
        self.run_deferred_work();
        if let Some(acceptor) = self.acceptor.get() {
            acceptor.close();
            acceptor.wait_until_closed(Instant::now() + WITHDRAW_TIMEOUT);
        }
    }

    /// Reports that this process fails, and why, regardless of its sessions.
    pub(crate) fn fail(&self, why: Failure) {
        self.command(Command::Leave(Departure::Failed(why)));
    }

    #[cfg(test)]
    pub(crate) fn die_after_for_a_test(&self, sends: usize) {
        self.state.lock().sends_before_crash = Some(sends);
    }

    /// Makes another generation active that no program waits for.
    #[cfg(test)]
    pub(crate) fn activate_for_a_test(&self) {
        let mut state = self.state.lock();
        let mut membership = (**state.machine.membership()).clone();
        membership.generation.number += 1;
        self.generation_active(&mut state, Arc::new(membership));
    }

    /// Simulates a network failure of all connections of this node.
    #[cfg(test)]
    pub(crate) fn cut_connections_for_a_test(&self) {
        self.state.lock().connections.cut_for_a_test();
    }

    /// Whether a `wanted` round waits here for ranks.
    #[cfg(test)]
    pub(crate) fn has_round_for_a_test(&self, wanted: impl Fn(&Round) -> bool) -> bool {
        self.state.lock().services.has_round_for_a_test(wanted)
    }

    #[cfg(test)]
    pub(crate) fn is_reconfiguring_for_a_test(&self) -> bool {
        self.state.lock().is_reconfiguring
    }

    #[cfg(test)]
    pub(crate) fn is_coordinator_for_a_test(&self) -> bool {
        self.state.lock().machine.is_coordinator()
    }

    /// Simulates the death of this process, as seen by other processes under the same kernel.
    #[cfg(test)]
    pub(crate) fn cut_for_a_test(&self) {
        let state = self.state.lock();
        self.close(state);
        let others: Vec<_> = super::driver::ALL
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for other in others.iter().filter(|other| other.me != self.me) {
            other.process_ended(self.me);
        }
    }
}

impl Node {
    /// Reports to the other ranks of the first generation why this one will not join.
    pub(crate) fn report_failure(rendezvous: &Rendezvous, chain: String) -> Result<()> {
        let deadline = deadline_after(rendezvous.timeout);
        let departure = Departure::Failed(Failure::Error(chain));
        if rendezvous.rank == 0 {
            return Self::report_absent_rank_0(rendezvous, departure, || {
                Instant::now() >= deadline
            });
        }
        let node = Self::start_rank(rendezvous, deadline, &Arc::default(), Some(departure))?;
        let mut state = node.state.lock();
        while !state.left && Instant::now() < deadline {
            node.wait(&mut state, deadline);
        }
        node.close(state);
        Ok(())
    }

    /// Listens at rank 0's address, and reports to every joining rank why rank 0 will not join, until all ranks have
    /// received that or `should_stop` returns true.
    ///
    /// # Errors
    /// The address cannot be bound, or not all ranks have connected.
    pub(crate) fn report_absent_rank_0(
        rendezvous: &Rendezvous,
        departure: Departure,
        should_stop: impl Fn() -> bool,
    ) -> Result<()> {
        let rank = 0;
        let mut rendezvous = rendezvous.clone();
        rendezvous.rank = 0;
        let node = Self::start_rank(&rendezvous, Instant::now(), &Arc::default(), None)?;
        let mut state = node.state.lock();
        state.abort_formation(&RequestError::Departed { rank, departure });
        node.run_outputs(&mut state);
        drop(state);
        node.run_deferred_work();
        let mut state = node.state.lock();
        loop {
            let absent: Vec<_> = state.ranks_without_formation_error(|_| true).collect();
            if absent.is_empty() || should_stop() {
                node.close(state);
                return match absent.is_empty() {
                    true => Ok(()),
                    false => Err(Error::rendezvous(format!(
                        "ranks {} did not connect to receive the reason",
                        ranges(&absent)
                    ))),
                };
            }
            node.wait(&mut state, Instant::now() + Duration::from_millis(20));
        }
    }
}

/// Warns once per process that there is no secret: in the log, and on stderr for a program without a log.
fn warn_of_missing_secret(at: &str) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            name: "nccl.rendezvous.no_secret",
            target: "nccl",
            at,
            "any process that reaches this address can join the job: set NCCL_RUN_SECRET"
        );
        // Ignored: the program may have closed its stderr.
        let _ = writeln!(
            io::stderr(),
            "nccl: rank 0 listens at {at} without a secret: any process that reaches this address can join the job, and read and change \
             the messages of its ranks; make a secret with (umask 077; openssl rand -hex 32 > FILE) and set \
             NCCL_RUN_SECRET_FILE=FILE on all ranks"
        );
    });
}

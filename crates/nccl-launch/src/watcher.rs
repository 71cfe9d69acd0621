//! The thread of a fleet: it starts the ranks, detects their ends, and ends them.
//!
//! ```text
//!              a rank fails                linger over         grace over         still there
//!  (no stage) ───────────▶ Settle ────────────────▶ Asked ───────────▶ Killed ──────────▶ given up
//!       └─────────────── stop(signal) ────────────────┘▲
//!                                   kill() ────────────────────────────┘
//! ```
//!
//! In `Settle` ranks may still report why *they* failed, and end by themselves. In every stage, the end of the last
//! rank ends the stage. A rank that is restarted alone passes through the same stages on its own.
//!
//! In a stage no restart of a single rank is pending: what begins the stage fails it. `stop`, `kill` and the end of the
//! fleet fail a pending restart of all ranks as well, and new restarts until a caller has got a report.

mod restart;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use tempfile::TempDir;

use super::environment::Environment;
use super::event::{Event, FleetState};
use super::exit_reporter::ExitReporter;
use super::keeper::Keeper;
use super::output::Settings;
use super::pumps::{Pumps, StreamEnd, drop_panic, wake};
use super::rank::Running;
use super::report::UNREAD_OUTPUT_TIMEOUT;
use crate::departure::Signal;
use crate::error::{Error, Result};

/// How long to wait after SIGKILL; a process that is still there after that is blocked inside the kernel.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time that anything is waited for: later times may not exist, as after [`Duration::MAX`].
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
/// How often to look for ended ranks where the kernel does not report them (before Linux 5.3, and in some sandboxes).
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The token of `wake` in epoll events; it is no rank.
const WAKE_TOKEN: u64 = u64::MAX;

/// The arguments of the thread.
pub(super) struct FleetPlan {
    pub(super) environment: Environment,
    pub(super) command: Box<dyn FnMut(usize) -> Command + Send>,
    pub(super) settings: Settings,
    /// Whether the failure of one rank ends all ranks.
    pub(super) end_all: bool,
    pub(super) linger: Duration,
    pub(super) grace: Duration,
    pub(super) generation: u64,
    /// The first rank reads this process's standard input; the others read nothing.
    pub(super) stdin: bool,
    /// Removed when the fleet ends.
    pub(super) directory: TempDir,
}

/// Where the generation of a restart goes, or the reason why there is none.
pub(super) type RestartReply = Sender<Result<u64>>;

/// A request to the thread.
pub(super) enum FleetCommand {
    /// Start the rank again, after ending it if it runs.
    Restart(usize, RestartReply),
    /// Start all ranks again, after ending them.
    RestartAll(RestartReply),
    /// Pass a signal on, and reply when that is done.
    Signal(Option<usize>, Signal, Sender<()>),
    /// Reply with the ranks that take part in the world.
    Joined(Sender<Vec<usize>>),
    /// End all ranks by this signal, and reply when it has been sent.
    Stop(Signal, Sender<()>),
    /// Kill all ranks, and reply when that is done.
    Kill(Sender<()>),
    /// Kill all ranks, and end the thread.
    Leave,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Settle,
    Asked,
    Killed,
}

/// A rank that is being ended in order to be started again.
struct Restart {
    /// One for each caller.
    replies: Vec<RestartReply>,
    /// The time at which the rank is killed; after that, the time at which it is given up.
    until: Instant,
    killed: bool,
}

pub(super) struct Watcher {
    fleet_state: Arc<FleetState>,
    orders: Receiver<FleetCommand>,
    wake: Arc<OwnedFd>,
    epoll: OwnedFd,
    pumps: Pumps,
    keeper: Option<Keeper>,
    exit_reporter: Option<ExitReporter>,
    /// By rank.
    running: HashMap<usize, Running>,
    restarts: HashMap<usize, Restart>,
    /// The callers for whom all ranks are restarted once none runs.
    restart_all: Vec<RestartReply>,
    /// Streams of ended ranks whose output has not been passed on yet.
    undrained: Vec<[Arc<StreamEnd>; 2]>,
    stage: Option<(Stage, Instant)>,
    begun: Instant,
    host: Arc<str>,
    generation: u64,
    leaving: bool,
    /// Last, because fields are dropped in this order: dropping it removes the directory, in which the observer may
    /// have a socket. The keeper removes the directory when this process is killed.
    plan: FleetPlan,
}

impl Watcher {
    /// Creates everything but the ranks. Called on the fleet's thread: the ranks are killed when that thread ends.
    pub(super) fn new(
        plan: FleetPlan,
        fleet_state: Arc<FleetState>,
        orders: Receiver<FleetCommand>,
        wake: Arc<OwnedFd>,
    ) -> std::io::Result<Self> {
        let begun = Instant::now();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &epoll,
            &wake,
            epoll::EventData::new_u64(WAKE_TOKEN),
            epoll::EventFlags::IN,
        )?;
        let world_size = plan.environment.world_size;
        let pumps = Pumps::start(
            &plan.settings.output,
            world_size,
            begun,
            &wake,
            &fleet_state,
        )?;
        Ok(Self {
            generation: plan.generation,
            fleet_state,
            orders,
            wake,
            epoll,
            pumps,
            keeper: None,
            exit_reporter: None,
            running: HashMap::new(),
            restarts: HashMap::new(),
            restart_all: Vec::new(),
            undrained: Vec::new(),
            stage: None,
            begun,
            host: crate::host::name(),
            leaving: false,
            plan,
        })
    }

    fn ranks(&self) -> std::ops::Range<usize> {
        let first = self.plan.environment.first_rank;
        first..first + self.plan.environment.here
    }

    /// Starts every rank, or none.
    pub(super) fn start_all(&mut self) -> Result<()> {
        self.join_world();
        for rank in self.ranks() {
            if let Err(error) = self.start(rank, None) {
                self.end_started();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Joins the world of this generation as an observer, after leaving that of the previous one.
    fn join_world(&mut self) {
        // The old observer is dropped first: it may listen in place of a departed rank 0, at the address where the new
        // rank 0 will listen.
        self.exit_reporter = None;
        if self.plan.environment.observe {
            self.exit_reporter = Some(ExitReporter::start(&self.plan.environment, self.generation));
        }
    }

    fn start(&mut self, rank: usize, alone: Option<&[String]>) -> Result<()> {
        let failed = |why: String| Error::launch(format!("rank {rank} cannot be started: {why}"));
        // A panic would end this thread, which the ranks do not outlive, and for which callers wait.
        let made = catch_unwind(AssertUnwindSafe(|| (self.plan.command)(rank)));
        let mut command = made.map_err(|panic| {
            drop_panic(panic);
            failed(String::from(
                "the function that makes its command has panicked",
            ))
        })?;
        for (name, value) in self.plan.environment.of(rank, self.generation, alone) {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.stdin(if self.plan.stdin && rank == self.ranks().start {
            Stdio::inherit()
        } else {
            Stdio::null()
        });
        self.ensure_keeper();
        let report_socket = match &mut self.keeper {
            Some(keeper) => {
                keeper.check_room();
                let socket = keeper.report_socket();
                Some(socket.map_err(|error| failed(error.to_string()))?)
            }
            None => None,
        };
        let output = (&self.pumps, &self.plan.settings);
        let started = Running::start(rank, self.generation, command, report_socket, output);
        // A process that could not execute the program may have reported its group already. The number may be another
        // process's soon.
        if started.is_err()
            && let Some(keeper) = &mut self.keeper
        {
            keeper.remember_only(self.running.values().map(Running::group));
        }
        let running = started.map_err(failed)?;
        if let Some(pidfd) = running.pidfd() {
            let data = epoll::EventData::new_u64(rank as u64);
            // If epoll refuses the descriptor, the end is found by polling.
            let _ = epoll::add(&self.epoll, pidfd, data, epoll::EventFlags::IN);
        }
        let (pid, generation) = (running.id(), self.generation);
        let index = rank - self.ranks().start;
        self.running.insert(rank, running);
        if let Some(keeper) = &mut self.keeper {
            keeper.catch_up(self.running.values().map(Running::group));
        }
        if let Some(exit_reporter) = &self.exit_reporter {
            exit_reporter.started(rank, pid);
        }
        self.fleet_state.post(
            Event::Started {
                rank,
                pid,
                generation,
            },
            |fleet_state| {
                fleet_state.generation = generation;
                fleet_state.running[index] = Some((pid, generation));
                fleet_state.failures.retain(|end| end.rank != rank);
                fleet_state.left.retain(|&left| left != rank);
                fleet_state.finished = false;
            },
        );
        Ok(())
    }

    /// Starts a keeper unless one runs.
    fn ensure_keeper(&mut self) {
        if self.keeper.as_mut().is_some_and(Keeper::lives) {
            return;
        }
        self.keeper = match Keeper::start(self.plan.directory.path()) {
            Ok(keeper) => Some(keeper),
            Err(error) => {
                tracing::warn!(
                    name: "nccl.launch.trouble",
                    target: "nccl",
                    "no /bin/sh to watch over the ranks ({error}): if this process is killed, what the \
                     ranks have started themselves may stay"
                );
                None
            }
        };
        if let Some(keeper) = &mut self.keeper {
            keeper.remember_only(self.running.values().map(Running::group));
        }
        let pid = self.keeper.as_ref().map(Keeper::id);
        self.fleet_state
            .post(None, |fleet_state| fleet_state.keeper = pid);
    }

    /// Runs until the fleet is dropped and no rank runs.
    pub(super) fn run(mut self) {
        loop {
            // The order matters: a command sent after its wake-up was consumed wakes the thread again.
            self.poll_exits();
            self.handle_commands();
            self.collect();
            self.advance();
            if self.leaving && self.running.is_empty() {
                break;
            }
            self.wait();
        }
    }

    fn handle_commands(&mut self) {
        loop {
            match self.orders.try_recv() {
                Ok(FleetCommand::Restart(rank, reply)) => self.restart(rank, reply),
                Ok(FleetCommand::RestartAll(reply)) => self.restart_all(reply),
                Ok(FleetCommand::Signal(rank, signal, done)) => {
                    let wanted = |r: &&Running| rank.is_none_or(|rank| rank == r.rank());
                    for running in self.running.values().filter(wanted) {
                        let _ = running.signal(signal);
                    }
                    let _ = done.send(());
                }
                Ok(FleetCommand::Joined(reply)) => {
                    let exit_reporter = self.exit_reporter.as_ref();
                    let pids = exit_reporter.map(ExitReporter::joined).unwrap_or_default();
                    let there = |r: &&Running| !r.has_ended() && pids.contains(&r.id());
                    let joined = self.running.values().filter(there).map(Running::rank);
                    let _ = reply.send(joined.collect());
                }
                Ok(FleetCommand::Stop(signal, done)) => {
                    // A stop that follows a failure is not an interruption.
                    let interrupts = self.stage.is_none().then_some(signal);
                    self.refuse_restarts(interrupts);
                    if !matches!(self.stage, Some((Stage::Killed, _))) {
                        self.ask_to_end(signal);
                    }
                    let _ = done.send(());
                }
                Ok(FleetCommand::Kill(done)) => {
                    self.refuse_restarts(None);
                    self.kill();
                    let _ = done.send(());
                }
                Ok(FleetCommand::Leave) | Err(mpsc::TryRecvError::Disconnected) => {
                    if !self.leaving {
                        self.leaving = true;
                        self.refuse_restarts(None);
                        self.kill();
                    }
                    return;
                }
                Err(mpsc::TryRecvError::Empty) => return,
            }
        }
    }

    /// Sends all running ranks a signal that asks them to end.
    fn ask_to_end(&mut self, signal: Signal) {
        if self.running.is_empty() {
            return;
        }
        for running in self.running.values_mut() {
            running.end(signal);
        }
        let until = later(Instant::now(), self.plan.grace);
        let until = match self.stage {
            // Asking again does not give the ranks more time.
            Some((Stage::Asked, earlier)) => until.min(earlier),
            _ => until,
        };
        self.stage = Some((Stage::Asked, until));
        self.fleet_state.post(Event::Ending(signal), |_| {});
    }

    fn kill(&mut self) {
        if self.running.is_empty() {
            return;
        }
        for running in self.running.values_mut() {
            running.end(Signal::Kill);
        }
        self.stage = Some((Stage::Killed, Instant::now() + KILL_TIMEOUT));
        self.fleet_state.post(Event::Ending(Signal::Kill), |_| {});
    }

    /// Handles ended ranks, in the order in which the kernel reports them.
    fn poll_exits(&mut self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
        loop {
            events.clear();
            let none = Timespec::default();
            let buffer = rustix::buffer::spare_capacity(&mut events);
            if epoll::wait(&self.epoll, buffer, Some(&none)).is_err() || events.is_empty() {
                break;
            }
            for event in &events {
                match event.data.u64() {
                    WAKE_TOKEN => {
                        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
                    }
                    rank => self.handle_exit(rank as usize),
                }
            }
        }
        let without_pidfd: Vec<usize> = self.without_pidfd().collect();
        for rank in without_pidfd {
            self.handle_exit(rank);
        }
    }

    /// Returns the running ranks whose end the kernel does not report.
    fn without_pidfd(&self) -> impl Iterator<Item = usize> {
        let without_pidfd = self.running.values().filter(|r| r.pidfd().is_none());
        without_pidfd.filter(|r| !r.has_ended()).map(Running::rank)
    }

    fn handle_exit(&mut self, rank: usize) {
        let now = Instant::now();
        let Some(running) = self.running.get_mut(&rank) else {
            return;
        };
        let exit = running.take_exit(now);
        if let Some(pidfd) = running.pidfd() {
            let _ = epoll::delete(&self.epoll, pidfd);
        }
        let Some(exit) = exit else {
            // The process has ended, and a debugger is to receive the end first. Until then the kernel would report the
            // same end again and again.
            running.close_pidfd();
            return;
        };
        if running.was_asked() || exit.is_success() || self.stage.is_some() {
            return;
        }
        for other in self.running.values_mut().filter(|r| !r.has_ended()) {
            other.record_state();
        }
        if self.plan.end_all {
            self.stage = Some((Stage::Settle, later(now, self.plan.linger)));
            self.fail_single_restarts();
        }
    }

    /// Reports the ends of ranks whose last output has been read, or for which the wait has timed out.
    fn collect(&mut self) {
        let now = Instant::now();
        if let Some(exit_reporter) = &self.exit_reporter {
            for running in self.running.values_mut() {
                exit_reporter.report_exit(running, now);
            }
        }
        let over = |r: &&Running| r.is_drained() || r.drain_until().is_some_and(|d| d <= now);
        let ended = self.running.values().filter(|r| r.has_ended());
        let mut ended: Vec<usize> = ended.filter(over).map(Running::rank).collect();
        // Ends noticed in the same pass are reported in the order in which they happened.
        ended.sort_by_key(|rank| self.running.get(rank).and_then(Running::drain_until));
        for rank in ended {
            let Some(running) = self.running.remove(&rank) else {
                continue;
            };
            let (group, streams) = (running.group(), running.streams());
            let is_drained = running.is_drained();
            let Some(end) = running.collect(self.begun, &self.host) else {
                continue;
            };
            if !is_drained {
                self.pumps.rank_has_ended(&streams);
                self.undrained.push(streams);
            }
            if let Some(keeper) = &mut self.keeper {
                keeper.forget(group, self.running.values().map(Running::group));
            }
            let end = Arc::new(end);
            let index = rank - self.ranks().start;
            self.fleet_state
                .post(Event::Exited(Arc::clone(&end)), |fleet_state| {
                    fleet_state.running[index] = None;
                    fleet_state.ends[index] = Some(Arc::clone(&end));
                    if end.is_failure() {
                        fleet_state.failures.push(end);
                        fleet_state.failures.sort_by_key(|end| end.at);
                    }
                });
        }
        let writing = self.pumps.writing_since();
        let idle = self.running.is_empty() && self.restarts.is_empty();
        // A slow reader loses nothing, however long it takes. Output for a reader that reads nothing is dropped once
        // there is a failure to report, or the fleet has been told to end.
        let unread = idle
            && writing.is_some_and(|since| now >= since + UNREAD_OUTPUT_TIMEOUT)
            && self.fleet_state.lock().is_report_due();
        self.undrained
            .retain(|streams| !(unread || streams.iter().all(|end| end.is_drained())));
        if unread {
            self.fleet_state
                .post(None, |fleet_state| fleet_state.unread = true);
        }
    }

    /// Continues with the next stage when the current one is over.
    fn advance(&mut self) {
        let now = Instant::now();
        if self.running.is_empty() {
            self.stage = None;
        }
        match self.stage {
            Some((Stage::Settle, until)) if until <= now => self.ask_to_end(Signal::Term),
            Some((Stage::Asked, until)) if until <= now => self.kill(),
            Some((Stage::Killed, until)) if until <= now => self.give_up(),
            _ => {}
        }
        debug_assert!(self.stage.is_none() || self.restarts.is_empty());
        self.advance_restarts(now);
        let idle = self.running.is_empty() && self.restarts.is_empty();
        if idle && !self.restart_all.is_empty() {
            self.generation += 1;
            self.fleet_state.post(None, |fleet_state| {
                fleet_state.failures.clear();
                fleet_state.interrupted = None;
                fleet_state.unread = false;
            });
            let started = self.start_all().map(|()| self.generation);
            self.reply_restart_all(started);
            return;
        }
        if idle && self.undrained.is_empty() && !self.fleet_state.lock().finished {
            self.fleet_state
                .post(Event::Finished, |fleet_state| fleet_state.finished = true);
        }
    }

    /// Gives up the processes that cannot be ended.
    fn give_up(&mut self) {
        let mut left: Vec<usize> = self.running.drain().map(|(rank, _)| rank).collect();
        left.sort_unstable();
        let first = self.ranks().start;
        self.fleet_state.post(None, |fleet_state| {
            for rank in left {
                fleet_state.running[rank - first] = None;
                fleet_state.left.push(rank);
            }
        });
        self.stage = None;
    }

    /// Ends the ranks that have started, because not all could be started.
    fn end_started(&mut self) {
        self.kill();
        loop {
            self.poll_exits();
            self.collect();
            if matches!(self.stage, Some((Stage::Killed, until)) if until <= Instant::now()) {
                self.give_up();
            }
            if self.running.is_empty() {
                break;
            }
            self.wait();
        }
        self.stage = None;
        // For commands that have come meanwhile: their wake-ups were consumed here.
        wake(&self.wake);
    }

    /// Waits until an event arrives, or until the next deadline.
    fn wait(&self) {
        let now = Instant::now();
        let mut times: Vec<Instant> = self.restarts.values().map(|r| r.until).collect();
        times.extend(self.stage.map(|(_, until)| until));
        times.extend(self.running.values().filter_map(Running::drain_until));
        if self.exit_reporter.is_some() {
            times.extend(self.running.values().filter_map(Running::report_due));
        }
        if !self.undrained.is_empty() || self.without_pidfd().next().is_some() {
            times.push(now + POLL_INTERVAL);
        }
        let next = times.into_iter().min();
        let limit = next.map(|at| at.saturating_duration_since(now));
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        if self.leaving && self.running.is_empty() {
            return;
        }
        // Polls without consuming events: epoll keeps them.
        let mut polled = [rustix::event::PollFd::from_borrowed_fd(
            self.epoll.as_fd(),
            rustix::event::PollFlags::IN,
        )];
        let _ = rustix::event::poll(&mut polled, limit.as_ref());
    }
}

impl Drop for Watcher {
    /// Kills the ranks that are left and ends the waits of all callers, even if this thread has panicked.
    fn drop(&mut self) {
        for running in self.running.values_mut() {
            running.end(Signal::Kill);
        }
        self.give_up();
        self.fleet_state
            .post(None, |fleet_state| fleet_state.closed = true);
    }
}

/// Returns the time that is `wait` after `now`, at most a [`CENTURY`].
fn later(now: Instant, wait: Duration) -> Instant {
    now + wait.min(CENTURY)
}

/// The error of a fleet whose thread has ended.
pub(super) fn over() -> Error {
    Error::launch("the fleet is over: its thread has ended")
}

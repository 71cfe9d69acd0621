//! The thread of a fleet: it starts the ranks, notices their ends, and ends them.
//!
//! ```text
//!              a rank fails                linger over         grace over         still there
//!  (no stage) ───────────▶ Settle ────────────────▶ Asked ───────────▶ Killed ──────────▶ given up
//!       └─────────────── stop(signal) ────────────────┘▲
//!                                   kill() ────────────────────────────┘
//! ```
//!
//! In `Settle` ranks may report why *they* failed, and end by themselves. In every stage the end of the last rank ends
//! the stage. A rank that is restarted goes through the same stages alone.

mod restart;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use tempfile::TempDir;

use super::control::Control;
use super::environment::Environment;
use super::event::{Board, Event};
use super::keeper::Keeper;
use super::output::Settings;
use super::pumps::Pumps;
use super::rank::Running;
use super::report::UNREAD;
use crate::departure::Signal;
use crate::error::{Error, Result};

/// How long to wait after SIGKILL; a process that is still there then waits inside the kernel.
const KILL: Duration = Duration::from_secs(5);
/// How long nothing must have been written before a stream of an ended rank counts as ended: two writes of one are
/// closer.
const PAUSE: Duration = Duration::from_millis(100);
/// How often to look for ended ranks where the kernel does not report them (before Linux 5.3, and in some sandboxes).
const TICK: Duration = Duration::from_millis(20);
/// The event of `wake`, which is not a rank.
const WAKE: u64 = u64::MAX;

/// The arguments of the thread.
pub(super) struct Plan {
    pub(super) environment: Environment,
    pub(super) command: Box<dyn FnMut(usize) -> Command + Send>,
    pub(super) settings: Settings,
    /// Whether the failure of one rank ends all.
    pub(super) end_all: bool,
    pub(super) linger: Duration,
    pub(super) grace: Duration,
    pub(super) generation: u64,
    /// The first rank reads this process's standard input; the others read nothing.
    pub(super) stdin: bool,
    /// Removed when the fleet ends.
    pub(super) directory: TempDir,
}

/// A request to the thread.
pub(super) enum Order {
    /// Start the rank again, after ending it if it runs.
    Restart(usize, Sender<Result<u64>>),
    /// Start all ranks again, after ending them.
    RestartAll(Sender<Result<u64>>),
    /// Pass a signal on, and reply when that is done.
    Signal(Option<usize>, Signal, Sender<()>),
    /// Reply with the ranks that take part in the world.
    Joined(Sender<Vec<usize>>),
    /// End all ranks by this signal.
    Stop(Signal),
    /// Kill all ranks.
    Kill,
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
    reply: Sender<Result<u64>>,
    /// When it is killed; after that, when it is given up.
    until: Instant,
    killed: bool,
}

pub(super) struct Watcher {
    board: Arc<Board>,
    orders: Receiver<Order>,
    wake: Arc<OwnedFd>,
    epoll: OwnedFd,
    pumps: Pumps,
    keeper: Option<Keeper>,
    control: Option<Control>,
    /// By rank.
    running: HashMap<usize, Running>,
    restarts: HashMap<usize, Restart>,
    restart_all: Option<Sender<Result<u64>>>,
    /// Streams of ended ranks that another process still holds open, or whose output this process's reader does not
    /// take.
    undrained: Vec<([Arc<AtomicBool>; 2], Instant)>,
    stage: Option<(Stage, Instant)>,
    begun: Instant,
    host: Arc<str>,
    generation: u64,
    leaving: bool,
    /// Last, because fields are dropped in this order: with it goes the directory, in which the observer may have a
    /// socket, and which the keeper removes when this process is killed.
    plan: Plan,
}

impl Watcher {
    /// Creates everything but the ranks. Called on the fleet's thread, whose end would kill the ranks.
    pub(super) fn new(
        plan: Plan,
        board: Arc<Board>,
        orders: Receiver<Order>,
        wake: Arc<OwnedFd>,
    ) -> std::io::Result<Self> {
        let begun = Instant::now();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &epoll,
            &wake,
            epoll::EventData::new_u64(WAKE),
            epoll::EventFlags::IN,
        )?;
        let world_size = plan.environment.world_size;
        let pumps = Pumps::start(&plan.settings.output, world_size, begun, &wake, &board)?;
        Ok(Self {
            generation: plan.generation,
            board,
            orders,
            wake,
            epoll,
            pumps,
            keeper: None,
            control: None,
            running: HashMap::new(),
            restarts: HashMap::new(),
            restart_all: None,
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
        self.attend();
        for rank in self.ranks() {
            if let Err(error) = self.start(rank, None) {
                self.abandon();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Joins the world of this generation as an observer, after leaving that of the last one.
    fn attend(&mut self) {
        // First: the old observer may stand in for a rank 0 that is gone, at the address where the new rank 0 will
        // listen.
        self.control = None;
        if self.plan.environment.observe {
            self.control = Some(Control::start(&self.plan.environment, self.generation));
        }
    }

    fn start(&mut self, rank: usize, alone: Option<&[String]>) -> Result<()> {
        let failed = |why: String| Error::launch(format!("rank {rank} cannot be started: {why}"));
        let mut command = (self.plan.command)(rank);
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
        self.guard();
        let door = match &self.keeper {
            Some(keeper) => Some(keeper.door().map_err(|error| failed(error.to_string()))?),
            None => None,
        };
        let output = (&self.pumps, &self.plan.settings);
        let running =
            Running::start(rank, self.generation, command, door, output).map_err(failed)?;
        if let Some(pidfd) = running.pidfd() {
            let data = epoll::EventData::new_u64(rank as u64);
            // If that is refused, the end is found by polling.
            let _ = epoll::add(&self.epoll, pidfd, data, epoll::EventFlags::IN);
        }
        let (pid, generation) = (running.id(), self.generation);
        let index = rank - self.ranks().start;
        self.running.insert(rank, running);
        if let Some(control) = &self.control {
            control.started(rank, pid);
        }
        self.board.post(
            Event::Started {
                rank,
                pid,
                generation,
            },
            |board| {
                board.generation = generation;
                board.running[index] = Some((pid, generation));
                board.failures.retain(|end| end.rank != rank);
                board.left.retain(|&left| left != rank);
                board.finished = false;
            },
        );
        Ok(())
    }

    /// Starts a keeper unless one runs.
    fn guard(&mut self) {
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
        if let Some(keeper) = &self.keeper {
            for running in self.running.values() {
                keeper.remember(running.group());
            }
        }
        let pid = self.keeper.as_ref().map(Keeper::id);
        self.board.post(None, |board| board.keeper = pid);
    }

    /// Runs until the fleet is dropped and no rank runs.
    pub(super) fn run(mut self) {
        loop {
            // In this order: an order sent after its wake-up was taken wakes the thread again.
            self.look();
            self.obey();
            self.collect();
            self.advance();
            if self.leaving && self.running.is_empty() {
                break;
            }
            self.sleep();
        }
        for (_, restart) in self.restarts.drain() {
            let _ = restart.reply.send(Err(over()));
        }
        self.board.post(None, |board| board.closed = true);
    }

    fn obey(&mut self) {
        loop {
            match self.orders.try_recv() {
                Ok(Order::Restart(rank, reply)) => self.restart(rank, reply),
                Ok(Order::RestartAll(reply)) => {
                    if !self.running.is_empty() && self.stage.is_none() {
                        self.ask(Signal::TERM);
                    }
                    self.restart_all = Some(reply);
                }
                Ok(Order::Signal(rank, signal, done)) => {
                    let wanted = |r: &&Running| rank.is_none_or(|rank| rank == r.rank());
                    for running in self.running.values().filter(wanted) {
                        let _ = running.signal(signal);
                    }
                    let _ = done.send(());
                }
                Ok(Order::Joined(reply)) => {
                    let control = self.control.as_ref();
                    let pids = control.map(Control::joined).unwrap_or_default();
                    let there = |r: &&Running| !r.has_ended() && pids.contains(&r.id());
                    let joined = self.running.values().filter(there).map(Running::rank);
                    let _ = reply.send(joined.collect());
                }
                Ok(Order::Stop(signal)) => {
                    // A stop that follows a failure is not an interruption.
                    if self.stage.is_none() {
                        self.board.post(None, |board| {
                            board.interrupted = board.interrupted.or(Some(signal));
                        });
                    }
                    if !matches!(self.stage, Some((Stage::Killed, _))) {
                        self.ask(signal);
                    }
                }
                Ok(Order::Kill) => self.kill(),
                Ok(Order::Leave) | Err(mpsc::TryRecvError::Disconnected) => {
                    if !self.leaving {
                        self.leaving = true;
                        self.kill();
                    }
                    return;
                }
                Err(mpsc::TryRecvError::Empty) => return,
            }
        }
    }

    /// Sends all running ranks a signal that asks them to end.
    fn ask(&mut self, signal: Signal) {
        if self.running.is_empty() {
            return;
        }
        for running in self.running.values_mut() {
            running.end(signal);
        }
        self.stage = Some((Stage::Asked, Instant::now() + self.plan.grace));
        self.board.post(Event::Ending(signal), |_| {});
    }

    fn kill(&mut self) {
        if self.running.is_empty() {
            return;
        }
        for running in self.running.values_mut() {
            running.end(Signal::KILL);
        }
        self.stage = Some((Stage::Killed, Instant::now() + KILL));
        self.board.post(Event::Ending(Signal::KILL), |_| {});
    }

    /// Notices ended ranks, in the order in which the kernel reports them.
    fn look(&mut self) {
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
                    WAKE => {
                        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
                    }
                    rank => self.notice(rank as usize),
                }
            }
        }
        let blind: Vec<usize> = self.blind().collect();
        for rank in blind {
            self.notice(rank);
        }
    }

    /// Running ranks whose end the kernel does not report.
    fn blind(&self) -> impl Iterator<Item = usize> {
        let blind = self.running.values().filter(|r| r.pidfd().is_none());
        blind.filter(|r| !r.has_ended()).map(Running::rank)
    }

    fn notice(&mut self, rank: usize) {
        let now = Instant::now();
        let Some(running) = self.running.get_mut(&rank) else {
            return;
        };
        let exit = running.notice(now);
        if let Some(pidfd) = running.pidfd() {
            let _ = epoll::delete(&self.epoll, pidfd);
        }
        let Some(exit) = exit else {
            // It has ended, and a debugger is to hear of it first. Until then the kernel would report the same end
            // again and again.
            running.close_pidfd();
            return;
        };
        if running.was_asked() || exit.is_success() || self.stage.is_some() {
            return;
        }
        for other in self.running.values_mut().filter(|r| !r.has_ended()) {
            other.look();
        }
        if self.plan.end_all {
            self.stage = Some((Stage::Settle, now + self.plan.linger));
        }
    }

    /// Reports the ends of ranks whose last output has been read, or has been waited for long enough.
    fn collect(&mut self) {
        let now = Instant::now();
        if let Some(control) = &self.control {
            for running in self.running.values_mut() {
                control.tell(running, now);
            }
        }
        let over = |r: &&Running| r.is_drained() || r.drain_until().is_some_and(|d| d <= now);
        let ended = self.running.values().filter(|r| r.has_ended());
        let mut ended: Vec<usize> = ended.filter(over).map(Running::rank).collect();
        // Ends noticed in the same round are reported in the order in which they happened.
        ended.sort_by_key(|rank| self.running.get(rank).and_then(Running::drain_until));
        for rank in ended {
            let Some(running) = self.running.remove(&rank) else {
                continue;
            };
            if !running.is_drained() {
                self.undrained.push((running.drains(), now + TICK));
            }
            let group = running.group();
            let Some(end) = running.collect(self.begun, &self.host) else {
                continue;
            };
            if let Some(keeper) = &self.keeper {
                keeper.forget(group);
            }
            let end = Arc::new(end);
            let index = rank - self.ranks().start;
            self.board.post(Event::Exited(Arc::clone(&end)), |board| {
                board.running[index] = None;
                board.ends[index] = Some(Arc::clone(&end));
                if end.is_failure() {
                    board.failures.push(end);
                    board.failures.sort_by_key(|end| end.at);
                }
            });
        }
        let writing = self.pumps.writing_since();
        let idle = self.running.is_empty() && self.restarts.is_empty();
        // A slow reader loses nothing, however long it takes. A reader that takes nothing does, once there is a failure
        // to report.
        let unread = idle
            && writing.is_some_and(|since| now >= since + UNREAD)
            && self.board.lock().has_failed();
        self.undrained.retain_mut(|(drained, until)| {
            if writing.is_some() {
                *until = now + PAUSE;
            }
            let done = drained.iter().all(|d| d.load(Ordering::Acquire));
            !(done || unread || *until <= now)
        });
        if unread {
            self.board.post(None, |board| board.unread = true);
        }
    }

    /// Goes on to the next stage when the current one is over.
    fn advance(&mut self) {
        let now = Instant::now();
        if self.running.is_empty() {
            self.stage = None;
        }
        match self.stage {
            Some((Stage::Settle, until)) if until <= now => self.ask(Signal::TERM),
            Some((Stage::Asked, until)) if until <= now => self.kill(),
            Some((Stage::Killed, until)) if until <= now => self.give_up(),
            _ => {}
        }
        self.advance_restarts(now);
        let idle = self.running.is_empty() && self.restarts.is_empty();
        if idle && let Some(reply) = self.restart_all.take() {
            self.generation += 1;
            self.board.post(None, |board| {
                board.failures.clear();
                board.interrupted = None;
                board.unread = false;
            });
            let _ = reply.send(self.start_all().map(|()| self.generation));
            return;
        }
        if idle && self.undrained.is_empty() && !self.board.lock().finished {
            self.board
                .post(Event::Finished, |board| board.finished = true);
        }
    }

    /// Gives up the processes that cannot be ended.
    fn give_up(&mut self) {
        let left: Vec<usize> = self.running.drain().map(|(rank, _)| rank).collect();
        let first = self.ranks().start;
        self.board.post(None, |board| {
            for rank in left {
                board.running[rank - first] = None;
                board.left.push(rank);
            }
        });
        self.stage = None;
    }

    /// Ends the started ranks, because not all could be started.
    fn abandon(&mut self) {
        self.kill();
        loop {
            self.look();
            self.collect();
            if matches!(self.stage, Some((Stage::Killed, until)) if until <= Instant::now()) {
                self.give_up();
            }
            if self.running.is_empty() {
                break;
            }
            self.sleep();
        }
        self.stage = None;
    }

    /// Waits until something happens, or until the next deadline.
    fn sleep(&self) {
        let now = Instant::now();
        let mut times: Vec<Instant> = self.restarts.values().map(|r| r.until).collect();
        times.extend(self.stage.map(|(_, until)| until));
        times.extend(self.running.values().filter_map(Running::drain_until));
        if self.control.is_some() {
            times.extend(self.running.values().filter_map(Running::tell_at));
        }
        if !self.undrained.is_empty() || self.blind().next().is_some() {
            times.push(now + TICK);
        }
        let next = times.into_iter().min();
        let limit = next.map(|at| at.saturating_duration_since(now));
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        if self.leaving && self.running.is_empty() {
            return;
        }
        // Polls without taking events: epoll keeps them.
        let mut polled = [rustix::event::PollFd::from_borrowed_fd(
            self.epoll.as_fd(),
            rustix::event::PollFlags::IN,
        )];
        let _ = rustix::event::poll(&mut polled, limit.as_ref());
    }
}

/// The error of a fleet whose thread has ended.
pub(super) fn over() -> Error {
    Error::launch("the fleet is over: its thread has ended")
}

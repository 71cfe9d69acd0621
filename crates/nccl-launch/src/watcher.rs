//! The thread of a fleet: it starts the ranks, notices their ends, and ends them.
//!
//! ```text
//!              a rank fails                linger over         grace over         still there
//!  (no stage) ───────────▶ Settle ────────────────▶ Asked ───────────▶ Killed ──────────▶ given up
//!       └─────────────── stop(signal) ────────────────┘▲
//!                                   kill() ────────────────────────────┘
//! ```
//!
//! In `Settle` ranks may say why *they* failed, and end by themselves. In every stage the end of the last rank
//! ends the stage. A rank that is restarted goes through the same alone.

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

/// How long after SIGKILL; what is still there then waits inside the kernel.
const KILL: Duration = Duration::from_secs(5);
/// A stream of an ended rank is at its end when nothing has been written for so long: two writes of one are closer.
const PAUSE: Duration = Duration::from_millis(100);
/// How often to look for ended ranks where the kernel does not tell (before Linux 5.3, and in some sandboxes).
const TICK: Duration = Duration::from_millis(20);
/// Not a rank: somebody has something for us.
const WAKE: u64 = u64::MAX;

/// What the thread is made from.
pub(super) struct Plan {
    pub(super) environment: Environment,
    pub(super) command: Box<dyn FnMut(usize) -> Command + Send>,
    pub(super) settings: Settings,
    /// Whether the failure of one rank ends all.
    pub(super) end_all: bool,
    pub(super) linger: Duration,
    pub(super) grace: Duration,
    pub(super) epoch: u64,
    /// The first rank reads this process's standard input; the others read nothing.
    pub(super) stdin: bool,
    /// Removed at the end.
    pub(super) directory: TempDir,
}

/// What the thread is asked to do.
pub(super) enum Order {
    /// Start the rank again, ending it first if it runs.
    Restart(usize, Sender<Result<u64>>),
    /// Start all ranks again, ending them first.
    RestartAll(Sender<Result<u64>>),
    /// Pass a signal on, and say when that is done.
    Signal(Option<usize>, Signal, Sender<()>),
    /// Say which ranks take part in the world.
    Joined(Sender<Vec<usize>>),
    /// End all.
    Stop(Signal),
    /// End all at once.
    Kill,
    /// End all at once, and leave.
    Leave,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Settle,
    Asked,
    Killed,
}

/// A rank that is ended in order to be started again.
struct Restart {
    reply: Sender<Result<u64>>,
    /// When it is killed, or after that, when it is given up.
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
    /// Streams of ended ranks that somebody still holds open, or that nobody reads on our side.
    undrained: Vec<([Arc<AtomicBool>; 2], Instant)>,
    stage: Option<(Stage, Instant)>,
    begun: Instant,
    host: Arc<str>,
    epoch: u64,
    leaving: bool,
    /// Last, because fields are dropped in this order: with it goes the directory, in which the observer may
    /// have a socket, and which the keeper removes when it is surprised.
    plan: Plan,
}

impl Watcher {
    /// Everything but the ranks. Called on the fleet's thread, which the ranks' lives hang on.
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
            epoch: plan.epoch,
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

    /// Takes part in the world of this epoch, and no more in that of the last one.
    fn attend(&mut self) {
        // First: it may stand in for a rank 0 that is gone, at the place of the one that will come.
        self.control = None;
        if self.plan.environment.observe {
            self.control = Some(Control::start(&self.plan.environment, self.epoch));
        }
    }

    fn start(&mut self, rank: usize, alone: Option<&[String]>) -> Result<()> {
        let failed = |why: String| Error::launch(format!("rank {rank} cannot be started: {why}"));
        let mut command = (self.plan.command)(rank);
        for (name, value) in self.plan.environment.of(rank, self.epoch, alone) {
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
        let running = Running::start(rank, self.epoch, command, door, output).map_err(failed)?;
        if let Some(pidfd) = running.pidfd() {
            let data = epoll::EventData::new_u64(rank as u64);
            // Refused, it is found by looking now and then.
            let _ = epoll::add(&self.epoll, pidfd, data, epoll::EventFlags::IN);
        }
        let (pid, epoch) = (running.id(), self.epoch);
        let index = rank - self.ranks().start;
        self.running.insert(rank, running);
        if let Some(control) = &self.control {
            control.started(rank, pid);
        }
        self.board
            .post(Event::Started { rank, pid, epoch }, |board| {
                board.epoch = epoch;
                board.running[index] = Some((pid, epoch));
                board.failures.retain(|end| end.rank != rank);
                board.left.retain(|&left| left != rank);
                board.finished = false;
            });
        Ok(())
    }

    /// Sees to it that a keeper is there.
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

    /// Until somebody tells it to leave.
    pub(super) fn run(mut self) {
        loop {
            // In this order: what is sent after its wake-up call was taken wakes again.
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
                    // What comes of a failure is not an interruption.
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

    /// Sends what runs a signal to end by.
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

    /// Notices who has ended, in the order in which the kernel says so.
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

    /// Ranks about which the kernel does not tell.
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
            // It has ended, and a debugger wants to be the first to hear of it. Until then the kernel would
            // tell us the same again and again.
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

    /// Says of ranks whose last words have been read how they ended.
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
        // Several at once are told in the order in which they ended.
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
        // A reader that is slow loses nothing, however long it takes. One that takes nothing does, where there is a failure to tell.
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

    /// Goes on to the next stage where it is time.
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
            self.epoch += 1;
            self.board.post(None, |board| {
                board.failures.clear();
                board.interrupted = None;
                board.unread = false;
            });
            let _ = reply.send(self.start_all().map(|()| self.epoch));
            return;
        }
        if idle && self.undrained.is_empty() && !self.board.lock().finished {
            self.board
                .post(Event::Finished, |board| board.finished = true);
        }
    }

    /// Lets go of what cannot be ended.
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

    /// Ends what was started, because not all could be.
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

    /// Until something happens, or it is time for something.
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
        // The list is asked for again, without taking anything from it: epoll keeps what is ready.
        let mut polled = [rustix::event::PollFd::from_borrowed_fd(
            self.epoll.as_fd(),
            rustix::event::PollFlags::IN,
        )];
        let _ = rustix::event::poll(&mut polled, limit.as_ref());
    }
}

/// That the fleet is gone.
pub(super) fn over() -> Error {
    Error::launch("the fleet is over: its thread has ended")
}

//! The ranks of this host, as their launcher sees them.

#[cfg(test)]
mod tests;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::environment::Environment;
use super::event::{Events, FleetState};
use super::exit_reporter;
use super::pumps::wake;
use super::report::{Report, first_of};
use super::watcher::{FleetCommand, FleetPlan, RestartReply, Watcher, over};
use crate::departure::Signal;
use crate::error::{Error, Result};
use crate::forked;
use crate::sync::Mutex;
use nccl_control::Rendezvous;

/// The processes of a world's ranks on this host.
///
/// [`FleetBuilder::start`](crate::FleetBuilder::start) starts the processes, and a thread watches them. The processes
/// do not outlive the fleet: they are killed when the fleet is dropped, and when this process ends for any reason.
///
/// ```
/// use std::process::Command;
/// use nccl::launch::{Fleet, Signal};
///
/// let fleet = Fleet::builder(2).start(|_| {
///     let mut command = Command::new("sleep");
///     command.arg("60");
///     command
/// })?;
/// assert_eq!(fleet.pids().iter().flatten().count(), 2);
/// fleet.stop(Signal::Term);
/// assert_eq!(fleet.wait().exit_code(), 128 + 15);
/// # Ok::<(), nccl::Error>(())
/// ```
pub struct Fleet {
    fleet_state: Arc<FleetState>,
    orders: Mutex<Sender<FleetCommand>>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    environment: Environment,
}

impl Fleet {
    pub(super) fn start(plan: FleetPlan) -> Result<Self> {
        let environment = plan.environment.clone();
        let fleet_state = Arc::new(FleetState::new(plan.environment.here));
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("starting ranks")(error.into()))?;
        let wake = Arc::new(wake);
        let (orders, inbox) = mpsc::channel();
        let (started, outcome) = mpsc::channel();
        let (its_board, its_wake) = (Arc::clone(&fleet_state), Arc::clone(&wake));
        // The thread that watches the ranks also starts them: the kernel treats the end of the thread that started a
        // process as the end of its parent.
        let thread = std::thread::Builder::new()
            .name(String::from("nccl fleet"))
            .spawn(move || {
                let watcher = Watcher::new(plan, its_board, inbox, its_wake);
                let watcher = watcher.map_err(Error::io("starting ranks"));
                match watcher.and_then(|mut w| w.start_all().map(|()| w)) {
                    Ok(watcher) => {
                        let _ = started.send(Ok(()));
                        watcher.run();
                    }
                    Err(error) => {
                        let _ = started.send(Err(error));
                    }
                }
            })
            .map_err(Error::io("starting the thread that watches the ranks"))?;
        let fleet = Self {
            fleet_state,
            orders: Mutex::new(orders),
            wake,
            thread: Some(thread),
            environment,
        };
        // No timeout is needed: the thread answers when all ranks have started; if one cannot be started, the thread
        // kills the others and waits at most 5 s for their ends. If the thread ends, the channel closes.
        outcome.recv().unwrap_or_else(|_| Err(over()))?;
        Ok(fleet)
    }

    fn send_command(&self, order: FleetCommand) {
        if forked::is_child() {
            return;
        }
        let orders = self.orders.lock();
        // If the thread has ended, the command has no effect.
        let _ = orders.send(order);
        drop(orders);
        wake(&self.wake);
    }

    fn send_and_wait(&self, order: impl FnOnce(RestartReply) -> FleetCommand) -> Result<u64> {
        forked::check()?;
        let (reply, outcome) = mpsc::channel();
        self.send_command(order(reply));
        // No timeout is needed: running ranks are killed after the grace period; a process that is still there 5 s
        // later is given up, and the thread replies. If the thread ends, the channel closes, even for a command that
        // the thread did not take.
        outcome.recv().unwrap_or_else(|_| Err(over()))
    }

    /// Returns a reader of the fleet's events since its start, including events to come. Each reader gets all of them.
    ///
    /// ```
    /// # use std::{process::Command, time::Duration};
    /// # use nccl::launch::{Event, Fleet};
    /// let fleet = Fleet::builder(2).start(|_| Command::new("true"))?;
    /// let mut events = fleet.events();
    /// while let Some(event) = events.next_within(Duration::from_secs(10)) {
    ///     if let Event::Exited(end) = event {
    ///         println!("{end}");
    ///     }
    /// }
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn events(&self) -> Events {
        Events::new(Arc::clone(&self.fleet_state))
    }

    /// The process of each rank of this host, in the order of ranks; `None` for a rank that does not run.
    ///
    /// ```
    /// # use std::process::Command;
    /// # use nccl::launch::Fleet;
    /// let fleet = Fleet::builder(2).start(|_| Command::new("true"))?;
    /// for (rank, pid) in fleet.pids().iter().enumerate() {
    ///     println!("rank {rank}: {pid:?}");
    /// }
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn pids(&self) -> Vec<Option<u32>> {
        let fleet_state = self.fleet_state.lock();
        let pids = fleet_state.running.iter();
        pids.map(|running| running.map(|(pid, _)| pid)).collect()
    }

    /// Returns the rendezvous of the generation that was started last, for an `Observer` in this process, which then
    /// sees the ranks join and what they do.
    ///
    /// # Errors
    /// Those of [`Rendezvous::from_env`], for example when the secret's file cannot be read.
    ///
    /// ```
    /// use std::process::Command;
    /// use nccl::{Observer, launch::Fleet};
    ///
    /// let fleet = Fleet::builder(2).start(|_| Command::new("true"))?;
    /// let observer = Observer::start(fleet.rendezvous()?)?;
    /// assert_eq!(observer.snapshot().ranks.len(), 2);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn rendezvous(&self) -> Result<Rendezvous> {
        let generation = self.fleet_state.lock().generation;
        exit_reporter::rendezvous(&self.environment, generation)
    }

    /// Returns the process id of the shell that kills the ranks' own children when this process is killed; `None` where
    /// there is no `/bin/sh`. See the [module](super).
    ///
    /// ```
    /// # use std::process::Command;
    /// # use nccl::launch::Fleet;
    /// let fleet = Fleet::builder(2).start(|_| Command::new("true"))?;
    /// println!("watched over by {:?}", fleet.keeper());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn keeper(&self) -> Option<u32> {
        self.fleet_state.lock().keeper
    }

    /// Whether this is the fleet's thread, on which the caller's function that makes a rank's command runs: it would wait for
    /// itself.
    fn is_own_thread(&self) -> bool {
        let current = std::thread::current().id();
        let is_current = |thread: &JoinHandle<()>| thread.thread().id() == current;
        self.thread.as_ref().is_some_and(is_current)
    }

    /// Sends an order, and waits until the thread has handled it.
    fn send_and_confirm(&self, order: impl FnOnce(Sender<()>) -> FleetCommand) {
        let (done, was_done) = mpsc::channel();
        self.send_command(order(done));
        if self.is_own_thread() {
            return;
        }
        // No timeout is needed: the thread waits only for commands and for ends of ranks, and both wake it.
        let _ = was_done.recv();
    }

    /// Passes a signal on to all ranks. SIGUSR1, SIGUSR2 and SIGALRM go to the ranks' first processes alone; other
    /// signals go to the process groups, as from a terminal. The fleet does not expect the signal to end the ranks.
    ///
    /// ```
    /// # use nccl::launch::{Fleet, Signal};
    /// # fn example(fleet: &Fleet) {
    /// fleet.signal_all(Signal::Usr1);
    /// # }
    /// ```
    pub fn signal_all(&self, signal: Signal) {
        self.pass_on(None, signal);
    }

    /// Passes a signal on to one rank, as [`signal_all`](Self::signal_all).
    ///
    /// ```
    /// use std::process::Command;
    /// use nccl::launch::{Fleet, Output, Signal};
    ///
    /// let fleet = Fleet::builder(2).with(|fleet| fleet.output = Output::Discard).start(|_| {
    ///     let mut command = Command::new("sleep");
    ///     command.arg("60");
    ///     command
    /// })?;
    /// fleet.signal(1, Signal::Usr1); // which ends `sleep`
    /// let report = fleet.wait();
    /// assert_eq!(report.first.map(|end| end.rank), Some(1));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn signal(&self, rank: usize, signal: Signal) {
        self.pass_on(Some(rank), signal);
    }

    /// Returns after the signal has been sent, because the caller may be about to stop itself.
    fn pass_on(&self, rank: Option<usize>, signal: Signal) {
        self.send_and_confirm(|done| FleetCommand::Signal(rank, signal, done));
    }

    /// Begins to end all ranks: by `signal`, and after the grace period by SIGKILL. Returns when the signal has been
    /// sent; [`wait`](Self::wait) waits for the ends.
    ///
    /// The function that makes a rank's command must not wait for another thread that calls this.
    ///
    /// Pending restarts fail, as does each restart until [`wait`](Self::wait) or [`wait_timeout`](Self::wait_timeout)
    /// has returned a report. So a thread that restarts failed ranks does not undo the stop of another thread, even if
    /// no rank ran at that moment.
    ///
    /// ```
    /// # use nccl::launch::{Fleet, Signal};
    /// # fn example(fleet: &Fleet) {
    /// fleet.stop(Signal::Term);
    /// # }
    /// ```
    pub fn stop(&self, signal: Signal) {
        // The thread has handled the stop when this returns, so that a later report covers it.
        self.send_and_confirm(|done| FleetCommand::Stop(signal, done));
    }

    /// Kills all ranks, and prevents restarts as [`stop`](Self::stop) does. Returns when the ranks have been sent
    /// SIGKILL.
    ///
    /// ```
    /// # fn example(fleet: &nccl::launch::Fleet) {
    /// fleet.kill();
    /// println!("{}", fleet.wait());
    /// # }
    /// ```
    pub fn kill(&self) {
        self.send_and_confirm(FleetCommand::Kill);
    }

    /// Restarts one rank in the next generation (`NCCL_RUN_GENERATION`), and returns that generation. A running rank is
    /// ended first, by SIGTERM, and after the grace period by SIGKILL.
    ///
    /// The rank enters the world of the others with `World::join_running`, as soon as they form the next generation
    /// (`World::next_generation`). Alternatively, all ranks leave their worlds and join a new world of that generation
    /// ([`Rendezvous::generation`](nccl_control::Rendezvous::generation)).
    ///
    /// # Errors
    /// [`ErrorKind::Launch`](crate::error::ErrorKind::Launch) when the rank cannot be started, this fleet has no such
    /// rank, all ranks are being restarted, or the fleet is being ended ([`stop`](Self::stop)).
    ///
    /// ```
    /// use std::process::Command;
    /// use nccl::launch::{Fleet, Output};
    ///
    /// let builder = Fleet::builder(2).with(|fleet| {
    ///     fleet.output = Output::Discard;
    ///     fleet.keep_others = true;
    /// });
    /// let fleet = builder.start(|_| {
    ///     let mut command = Command::new("sleep");
    ///     command.arg("60");
    ///     command
    /// })?;
    /// let before = fleet.pids();
    /// assert_eq!(fleet.restart(1)?, 1);
    /// assert_eq!(fleet.pids()[0], before[0]);
    /// assert_ne!(fleet.pids()[1], before[1]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn restart(&self, rank: usize) -> Result<u64> {
        let ranks =
            self.environment.first_rank..self.environment.first_rank + self.environment.here;
        if !ranks.contains(&rank) {
            return Err(Error::launch(format!(
                "rank {rank} is not one of this fleet, which has {} to {}",
                ranks.start,
                ranks.end - 1
            )));
        }
        self.send_and_wait(|reply| FleetCommand::Restart(rank, reply))
    }

    /// Returns the ranks whose processes are known to take part in the world. A rank that was restarted alone is among
    /// them once the other ranks have admitted it. The rank of a wrapper (`sh -c`, a profiler) is never known.
    ///
    /// ```
    /// # use std::process::Command;
    /// # use nccl::launch::Fleet;
    /// let fleet = Fleet::builder(1).start(|_| Command::new("true"))?;
    /// assert!(fleet.joined().is_empty());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn joined(&self) -> Vec<usize> {
        let (reply, joined) = mpsc::channel();
        self.send_command(FleetCommand::Joined(reply));
        if self.is_own_thread() {
            return Vec::new();
        }
        // No timeout is needed, as in `pass_on`.
        joined.recv().unwrap_or_default()
    }

    /// Restarts all ranks in the next generation, and returns that generation; running ranks are ended first.
    ///
    /// # Errors
    /// [`ErrorKind::Launch`](crate::error::ErrorKind::Launch) when a rank cannot be started; then none runs. Also when
    /// the fleet has been told to end ([`stop`](Self::stop)).
    ///
    /// ```
    /// # fn example(fleet: &nccl::launch::Fleet) -> nccl::Result<()> {
    /// let generation = fleet.restart_all()?;
    /// println!("attempt {generation} has begun");
    /// # Ok(())
    /// # }
    /// ```
    pub fn restart_all(&self) -> Result<u64> {
        self.send_and_wait(FleetCommand::RestartAll)
    }

    /// Waits, without a time limit, until no rank runs any more and all of their output has been passed on.
    ///
    /// ```
    /// # use std::process::Command;
    /// # use nccl::launch::Fleet;
    /// let fleet = Fleet::builder(2).start(|_| Command::new("true"))?;
    /// assert!(fleet.wait().is_success());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn wait(&self) -> Report {
        let report = self.wait_until(None);
        report.unwrap_or_else(|| unreachable!("waiting without a timeout ends with a report"))
    }

    /// As [`wait`](Self::wait), for at most `timeout`; returns `None` if ranks still run, or if their output is still
    /// being passed on.
    ///
    /// ```
    /// use std::{process::Command, time::Duration};
    /// use nccl::launch::Fleet;
    ///
    /// let fleet = Fleet::builder(1).start(|_| {
    ///     let mut command = Command::new("sleep");
    ///     command.arg("60");
    ///     command
    /// })?;
    /// assert!(fleet.wait_timeout(Duration::from_millis(50)).is_none());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Report> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Option<Report> {
        if forked::is_child() {
            // A forked child must not wait for its parent's children.
            let first = self.environment.first_rank;
            return Some(Report {
                first: None,
                ranks: Vec::new(),
                left_behind: (first..first + self.environment.here).collect(),
                interrupted: None,
                unread: false,
            });
        }
        self.fleet_state.wait(deadline, |fleet_state| {
            if !fleet_state.finished && !fleet_state.closed {
                return None;
            }
            fleet_state.unreported_stop = false;
            Some(Report {
                first: first_of(&fleet_state.failures),
                ranks: fleet_state.ends.iter().flatten().cloned().collect(),
                left_behind: fleet_state.left.clone(),
                interrupted: fleet_state.interrupted,
                unread: fleet_state.unread,
            })
        })
    }
}

impl Drop for Fleet {
    /// Kills the running ranks. If a process cannot be ended, this takes a few seconds at most.
    fn drop(&mut self) {
        // In a forked child, the ranks belong to the parent.
        if forked::is_child() {
            return;
        }
        self.send_command(FleetCommand::Leave);
        if let Some(thread) = self.thread.take() {
            // No timeout is needed: all ranks are killed, and the thread gives up those that are still there after 5 s.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fleet").field("pids", &self.pids()).finish()
    }
}

//! One process per rank, from start to the last one's end.

use std::fs::Permissions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

use super::environment::rank_variables;
use super::lifeline::DIRECTORY_PREFIX;
use super::output::{Forwarder, Output, Stream};
use super::report::{RankEnd, RankFailure, describe_process, is_stopped};

/// How long the other ranks may go on after one failed, to say what they know.
const GRACE: Duration = Duration::from_millis(500);
/// How long they may take to end after SIGTERM.
const TERM: Duration = Duration::from_secs(1);
/// How long after SIGKILL; what is still there then waits inside the kernel.
const KILL: Duration = Duration::from_secs(5);
/// How often to look for ended ranks where the kernel does not tell.
const TICK: Duration = Duration::from_millis(20);

/// The ranks of a world, a process each.
///
/// ```
/// use std::process::Command;
/// use nccl_tools::spawn::{Job, Outcome, Output};
///
/// let job = Job::new(2).output(Output::Collect);
/// let ended = job.run(|rank| {
///     let mut command = Command::new("sh");
///     command.args(["-c", &format!("echo $NCCL_RUN_RANK; exit {}", 3 * rank)]);
///     command
/// })?;
/// let Outcome::Failed(failure) = ended.outcome else { panic!("rank 1 ended with 3") };
/// assert_eq!((failure.end.rank, failure.code()), (1, 3));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Job {
    size: usize,
    output: Output,
    deadline: Option<Duration>,
}

/// How a job ended, and every rank of it.
#[derive(Debug)]
pub struct Ended {
    /// How the job ended.
    pub outcome: Outcome,
    /// Every rank, in order.
    pub ranks: Vec<RankEnd>,
}

/// How a job ended.
#[derive(Debug)]
pub enum Outcome {
    /// Every rank ended with exit code 0.
    Succeeded,
    /// A rank failed, and the others were ended.
    Failed(Box<RankFailure>),
    /// The deadline passed, and all ranks were ended; the text says what each was doing.
    TimedOut(String),
    /// Nobody reads our standard output any more; all ranks were ended.
    OutputClosed,
}

impl Job {
    /// A job of `size` ranks.
    #[must_use]
    pub fn new(size: usize) -> Self {
        Self {
            size,
            output: Output::Forward,
            deadline: None,
        }
    }

    /// Where the ranks' output goes; [`Output::Forward`] unless set.
    #[must_use]
    pub fn output(mut self, output: Output) -> Self {
        self.output = output;
        self
    }

    /// After this long everything is ended; without it, ranks that run well may run forever.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Starts the ranks by the commands that `command` returns, and waits for their end.
    ///
    /// Each rank finds the variables of [`rank_variables`] in its environment; their rendezvous lies in
    /// a directory that only this user can enter, and that is removed at the end. Standard input is the
    /// rank's [`lifeline`](super::lifeline).
    ///
    /// # Errors
    /// When a rank could not be started; those that were are ended. What goes wrong later is an
    /// [`Outcome`].
    pub fn run(self, command: impl FnMut(usize) -> Command) -> io::Result<Ended> {
        self.run_and(command, |_| {})
    }

    /// [`run`](Self::run), and calls `started` with the ranks' processes once all are there.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_and(
        self,
        mut command: impl FnMut(usize) -> Command,
        started: impl FnOnce(&[u32]),
    ) -> io::Result<Ended> {
        let directory = private_directory()?;
        let rendezvous = directory.path().join("world");
        // The writing end is closed on exec, so no rank keeps another's lifeline.
        let (lifeline, _our_end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let mut running = Running::new(self);
        for rank in 0..self.size {
            let mut command = command(rank);
            command
                .envs(rank_variables(rank, self.size, &rendezvous))
                .stdin(Stdio::from(lifeline.try_clone()?))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let child = command.spawn().map_err(|error| {
                let program = command.get_program().to_string_lossy();
                io::Error::new(
                    error.kind(),
                    format!("cannot start rank {rank}: {program}: {error}"),
                )
            })?;
            running.add(rank, child)?;
        }
        drop(lifeline);
        started(&running.pids());
        Ok(running.wait())
    }
}

/// A directory for the sockets of a job. Socket addresses hold some hundred bytes, so a deep temporary
/// directory does not do.
fn private_directory() -> io::Result<tempfile::TempDir> {
    let builder = || {
        let mut builder = tempfile::Builder::new();
        builder
            .prefix(DIRECTORY_PREFIX)
            .permissions(Permissions::from_mode(0o700));
        builder
    };
    if std::env::temp_dir().as_os_str().len() <= 64
        && let Ok(directory) = builder().tempdir()
    {
        return Ok(directory);
    }
    builder().tempdir_in("/tmp").map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("cannot make a directory for the ranks: {error}"),
        )
    })
}

struct Rank {
    child: Child,
    /// Becomes readable when the process ends; `None` on kernels without it.
    pidfd: Option<OwnedFd>,
    ended: Option<(ExitStatus, Duration)>,
    streams: [Stream; 2],
}

/// What is being done about the ranks; see the head of the parent module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Running,
    Grace,
    Term,
    Kill,
}

struct Running {
    job: Job,
    begun: Instant,
    ranks: Vec<Rank>,
    forwarder: Option<Forwarder>,
    stage: Stage,
    /// When the stage ends.
    until: Option<Instant>,
    /// The rank taken for the cause.
    cause: Option<usize>,
    /// Set before everything is ended for another reason than a rank's failure.
    verdict: Option<Outcome>,
    ended_by_us: Vec<usize>,
    /// Those of them that stood still before.
    stopped: Vec<usize>,
}

impl Running {
    fn new(job: Job) -> Self {
        Self {
            job,
            begun: Instant::now(),
            ranks: Vec::with_capacity(job.size),
            forwarder: (job.output == Output::Forward).then(Forwarder::default),
            stage: Stage::Running,
            until: job.deadline.map(|deadline| Instant::now() + deadline),
            cause: None,
            verdict: None,
            ended_by_us: Vec::new(),
            stopped: Vec::new(),
        }
    }

    fn add(&mut self, rank: usize, mut child: Child) -> io::Result<()> {
        let pipes = (child.stdout.take(), child.stderr.take());
        let (Some(stdout), Some(stderr)) = pipes else {
            unreachable!("both streams of a rank are pipes")
        };
        let pidfd = Pid::from_raw(child.id() as i32)
            .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
        let streams = [
            Stream::new(rank, true, stdout.into(), self.job.output),
            Stream::new(rank, false, stderr.into(), self.job.output),
        ];
        let [Ok(stdout), Ok(stderr)] = streams else {
            let _ = child.kill();
            let _ = child.wait();
            return Err(io::Error::other(
                "cannot read a rank's output without waiting",
            ));
        };
        self.ranks.push(Rank {
            child,
            pidfd,
            ended: None,
            streams: [stdout, stderr],
        });
        Ok(())
    }

    fn pids(&self) -> Vec<u32> {
        self.ranks.iter().map(|rank| rank.child.id()).collect()
    }

    fn all_ended(&self) -> bool {
        self.ranks.iter().all(|rank| rank.ended.is_some())
    }

    fn wait(mut self) -> Ended {
        loop {
            self.pump();
            self.reap();
            if self.all_ended() || !self.advance() {
                break;
            }
            self.sleep();
        }
        // What the last ones said before they ended.
        self.pump();
        self.summary()
    }

    /// Moves what the ranks printed.
    fn pump(&mut self) {
        for rank in &mut self.ranks {
            for stream in &mut rank.streams {
                let closed = stream.pump(self.forwarder.as_mut()).is_err();
                if closed && self.verdict.is_none() {
                    self.verdict = Some(Outcome::OutputClosed);
                    self.forwarder = None;
                }
            }
        }
    }

    /// Takes note of the ranks that ended.
    fn reap(&mut self) {
        let after = self.begun.elapsed();
        for index in 0..self.ranks.len() {
            let rank = &mut self.ranks[index];
            if rank.ended.is_some() {
                continue;
            }
            // An error would mean that somebody else waited for our child.
            let Ok(Some(status)) = rank.child.try_wait() else {
                continue;
            };
            rank.ended = Some((status, after));
            let on_its_own = matches!(self.stage, Stage::Running | Stage::Grace);
            if status.success() || !on_its_own {
                continue;
            }
            let by_signal = |rank: &Rank| rank.ended.is_some_and(|(s, _)| s.signal().is_some());
            match self.cause {
                None => self.cause = Some(index),
                Some(cause) if by_signal(&self.ranks[index]) && !by_signal(&self.ranks[cause]) => {
                    self.cause = Some(index);
                }
                Some(_) => {}
            }
        }
    }

    /// Goes on to the next stage when it is time. `false`: nothing more can be done.
    fn advance(&mut self) -> bool {
        let now = Instant::now();
        let over = self.until.is_some_and(|until| now >= until);
        let next = match self.stage {
            Stage::Running if self.verdict.is_some() => Stage::Term,
            Stage::Running if self.cause.is_some() => Stage::Grace,
            Stage::Running if over => {
                self.verdict = Some(Outcome::TimedOut(self.states()));
                Stage::Term
            }
            Stage::Grace if over || self.verdict.is_some() => Stage::Term,
            Stage::Term if over => Stage::Kill,
            Stage::Kill if over => return false,
            _ => return true,
        };
        let limit = match next {
            Stage::Grace => GRACE,
            Stage::Term => {
                self.signal(Signal::TERM);
                TERM
            }
            Stage::Kill => {
                self.signal(Signal::KILL);
                KILL
            }
            Stage::Running => return true,
        };
        self.stage = next;
        self.until = Some(now + limit);
        true
    }

    /// Signals every rank that has not ended. Its process cannot be another's by now, because nobody
    /// but us waits for it.
    fn signal(&mut self, signal: Signal) {
        for (index, rank) in self.ranks.iter().enumerate() {
            if rank.ended.is_none() {
                if signal == Signal::TERM && is_stopped(rank.child.id()) {
                    self.stopped.push(index);
                }
                if let Some(pid) = Pid::from_raw(rank.child.id() as i32) {
                    let _ = rustix::process::kill_process(pid, signal);
                }
                if !self.ended_by_us.contains(&index) {
                    self.ended_by_us.push(index);
                }
            }
        }
    }

    /// Waits for something to happen, at most until the stage is over.
    fn sleep(&self) {
        let mut fds = Vec::with_capacity(3 * self.ranks.len());
        let mut limit = Duration::from_secs(1);
        for rank in &self.ranks {
            for stream in &rank.streams {
                fds.extend(
                    stream
                        .fd()
                        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
                );
            }
            match (&rank.pidfd, rank.ended) {
                (Some(pidfd), None) => fds.push(PollFd::new(pidfd, PollFlags::IN)),
                (None, None) => limit = TICK,
                (_, Some(_)) => {}
            }
        }
        if let Some(until) = self.until {
            limit = limit.min(until.saturating_duration_since(Instant::now()));
        }
        let timeout = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        if rustix::event::poll(&mut fds, Some(&timeout)).is_err() {
            // Interrupted, most likely; anything else must not become a busy loop.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// What each rank is doing just now.
    fn states(&self) -> String {
        let mut text = String::new();
        for (index, rank) in self.ranks.iter().enumerate() {
            match rank.ended {
                Some((status, after)) => text.push_str(&format!(
                    "rank {index} (pid {}) had ended after {:.1} s: {status}\n",
                    rank.child.id(),
                    after.as_secs_f64()
                )),
                None => {
                    text.push_str(&format!(
                        "rank {index} (pid {}) was running:\n",
                        rank.child.id()
                    ));
                    for line in describe_process(rank.child.id()).lines() {
                        text.push_str(&format!("    {line}\n"));
                    }
                }
            }
            for (name, stream) in ["stdout", "stderr"].iter().zip(&rank.streams) {
                for line in stream.lines().iter().rev().take(12).rev() {
                    text.push_str(&format!("    {name}: {line}\n"));
                }
            }
        }
        text
    }

    fn summary(mut self) -> Ended {
        let mut ends = Vec::with_capacity(self.ranks.len());
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            for stream in &mut rank.streams {
                stream.finish(self.forwarder.as_mut());
            }
            ends.push(RankEnd {
                rank: index,
                pid: rank.child.id(),
                status: rank.ended.map(|(status, _)| status),
                after: rank.ended.map_or(self.begun.elapsed(), |(_, after)| after),
                stdout: rank.streams[0].lines(),
                stderr: rank.streams[1].lines(),
            });
        }
        if let Some(forwarder) = &mut self.forwarder {
            forwarder.hide_progress();
        }
        let outcome = match (self.verdict.take(), self.cause) {
            (Some(verdict), _) => verdict,
            (None, Some(cause)) => Outcome::Failed(Box::new(RankFailure {
                end: ends[cause].clone(),
                ended: std::mem::take(&mut self.ended_by_us),
                stopped: std::mem::take(&mut self.stopped),
            })),
            (None, None) => Outcome::Succeeded,
        };
        Ended {
            outcome,
            ranks: ends,
        }
    }
}

impl Drop for Running {
    /// Leaves nothing behind when starting failed half-way, or when something in here panicked.
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            if rank.ended.is_none() {
                let _ = rank.child.kill();
            }
        }
        let until = Instant::now() + TERM;
        while !self.all_ended() && Instant::now() < until {
            self.reap();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests;

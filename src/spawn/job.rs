//! A job, one process per rank: a [`Fleet`] with a deadline, which keeps the last output of each rank.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::launch::{self, Event, Fleet, Report, Signal, Stream};

use super::environment::JOB;
use super::output::{Output, Printed};
use super::report::{RankEnd, RankFailure, describe_process};

/// How long the other ranks may go on after one failed, to report what they know.
const LINGER: Duration = Duration::from_millis(500);
/// How long they may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(1);
/// How often to check whether standard output still has a reader.
const LOOK: Duration = Duration::from_millis(100);

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
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Job {
    size: usize,
    output: Output,
    deadline: Option<Duration>,
}

/// The ends of a job and of its ranks.
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
    /// The deadline passed, and all ranks were ended; the text has the state of each.
    TimedOut(String),
    /// Standard output has no reader any more; all ranks were ended.
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

    /// Sets the time after which all ranks are ended; without it, ranks may run forever.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Starts the ranks by the commands that `command` returns, and waits for their end.
    ///
    /// Each rank gets the variables that a [`Fleet`] sets, and an empty standard input.
    ///
    /// # Errors
    /// When a rank cannot be started; started ranks are ended. Later failures are an [`Outcome`].
    pub fn run(self, command: impl FnMut(usize) -> Command) -> nccl::Result<Ended> {
        let name = format!("tools-{}", std::process::id());
        let mut commands: Vec<Command> = (0..self.size).map(command).collect();
        for command in &mut commands {
            command.env(JOB, &name);
        }
        let printed = Arc::new(Printed::new(self.size, self.output));
        let sink = Arc::clone(&printed);
        let begun = Instant::now();
        let fleet = Fleet::builder(self.size)
            .with(|fleet| {
                fleet.job = Some(name);
                fleet.output = launch::Output::Lines(Arc::new(move |line| {
                    sink.take(line);
                }));
                fleet.linger = LINGER;
                fleet.grace = GRACE;
                // The ranks are to notice each other's ends as without a launcher.
                fleet.observe = false;
            })
            // No rank is started twice.
            .start(move |rank| std::mem::replace(&mut commands[rank], Command::new("false")))?;
        let verdict = self.wait(&fleet, &printed, begun);
        let report = fleet.wait();
        printed.hide_progress();
        Ok(summary(self.size, &report, &printed, verdict, begun))
    }

    /// Waits until all ranks have ended, or must be ended for another reason than a rank's failure; returns that
    /// reason.
    fn wait(&self, fleet: &Fleet, printed: &Printed, begun: Instant) -> Option<Outcome> {
        let pids = fleet.pids();
        loop {
            let left = self.deadline.map(|d| d.saturating_sub(begun.elapsed()));
            let timeout = match self.output {
                Output::Forward => left.map_or(LOOK, |left| left.min(LOOK)),
                Output::Collect => left.unwrap_or(Duration::MAX),
            };
            let ended = fleet.wait_timeout(timeout).is_some();
            if printed.is_closed() {
                fleet.stop(Signal::Term);
                return Some(Outcome::OutputClosed);
            }
            if ended {
                return None;
            }
            if left.is_some_and(|left| left <= timeout) {
                let states = states(fleet, &pids, printed);
                fleet.stop(Signal::Term);
                return Some(Outcome::TimedOut(states));
            }
        }
    }
}

/// The current state of each rank; `pids` are the processes that were started.
fn states(fleet: &Fleet, pids: &[Option<u32>], printed: &Printed) -> String {
    let mut ends = vec![None; pids.len()];
    let mut events = fleet.events();
    while let Some(event) = events.next_within(Duration::ZERO) {
        if let Event::Exited(end) = event {
            let rank = end.rank;
            ends[rank] = Some(end);
        }
    }
    let mut text = String::new();
    for (rank, (end, pid)) in ends.iter().zip(pids).enumerate() {
        match (end, pid) {
            (Some(end), _) => text.push_str(&format!(
                "rank {rank} (pid {}) had ended after {:.1} s: {}\n",
                end.pid,
                end.at.as_secs_f64(),
                end.exit,
            )),
            (None, Some(pid)) => {
                text.push_str(&format!("rank {rank} (pid {pid}) was running:\n"));
                for line in describe_process(*pid).lines() {
                    text.push_str(&format!("    {line}\n"));
                }
            }
            (None, None) => text.push_str(&format!("rank {rank} had ended\n")),
        }
        for stream in [Stream::Stdout, Stream::Stderr] {
            let lines = printed.lines(rank, stream);
            for line in lines.iter().rev().take(12).rev() {
                text.push_str(&format!("    {stream}: {line}\n"));
            }
        }
    }
    text
}

fn summary(
    size: usize,
    report: &Report,
    printed: &Printed,
    verdict: Option<Outcome>,
    begun: Instant,
) -> Ended {
    let end_of = |rank: usize| {
        let end = report.ranks.iter().find(|end| end.rank == rank);
        RankEnd {
            rank,
            pid: end.map_or(0, |end| end.pid),
            exit: end.map(|end| end.exit),
            after: end.map_or_else(|| begun.elapsed(), |end| end.at),
            stdout: printed.lines(rank, Stream::Stdout),
            stderr: printed.lines(rank, Stream::Stderr),
        }
    };
    // An error is often the consequence of another rank's death by a signal.
    let cause = report
        .ranks
        .iter()
        .filter(|end| end.is_failure())
        .min_by_key(|end| (end.exit.signal().is_none(), end.at));
    let outcome = match (verdict, cause) {
        (Some(Outcome::OutputClosed), _) => Outcome::OutputClosed,
        (_, Some(cause)) => {
            let of = |which: fn(&launch::RankEnd) -> bool| {
                let those = report.ranks.iter().filter(|end| which(end));
                those.map(|end| end.rank).collect()
            };
            Outcome::Failed(Box::new(RankFailure {
                end: end_of(cause.rank),
                ended: of(|end| end.asked_by.is_some()),
                stopped: of(|end| end.was_stopped),
            }))
        }
        (Some(verdict), None) => verdict,
        (None, None) => Outcome::Succeeded,
    };
    Ended {
        outcome,
        ranks: (0..size).map(end_of).collect(),
    }
}

#[cfg(test)]
mod tests;

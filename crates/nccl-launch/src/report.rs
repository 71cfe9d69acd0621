//! How ranks ended, and which rank is to blame.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::departure::OomKill;
use crate::departure::{Exit, Signal};

/// How long a fleet that has failed waits for a reader of its output that does not read.
pub(super) const UNREAD_OUTPUT_TIMEOUT: Duration = Duration::from_secs(3);

/// How one process of a rank ended.
///
/// Its `Display` is one line: rank, host, process, how it ended, and how long it ran.
///
/// ```
/// use std::process::Command;
/// use nccl::launch::Fleet;
///
/// let report = Fleet::builder(1)
///     .with(|fleet| fleet.output = nccl::launch::Output::Discard)
///     .start(|_| {
///         let mut command = Command::new("sh");
///         command.args(["-c", "echo no such weights >&2; exit 3"]);
///         command
///     })?
///     .wait();
/// let end = report.first.as_ref().expect("it failed");
/// assert_eq!((end.rank, end.exit.code()), (0, 3));
/// assert_eq!(end.stderr, ["no such weights"]);
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RankEnd {
    /// The rank.
    pub rank: usize,
    /// The number of its process.
    pub pid: u32,
    /// The host that the rank ran on.
    pub host: Arc<str>,
    /// The attempt that the process belonged to.
    pub generation: u64,
    /// How it ended.
    pub exit: Exit,
    /// How long it ran.
    pub ran: Duration,
    /// When it ended, since the start of the fleet.
    pub at: Duration,
    /// The last lines of its standard error, at most as many as
    /// [`FleetBuilder::stderr_tail`](super::FleetBuilder::stderr_tail) sets. Invalid UTF-8, control characters, and
    /// characters that change the direction of text are replaced by U+FFFD.
    pub stderr: Vec<String>,
    /// Whether the kernel's OOM killer ended the rank, according to its control group.
    pub oom: Option<OomKill>,
    /// The signal by which the fleet asked the rank to end.
    pub asked_by: Option<Signal>,
    /// Whether the rank had been stopped, by a signal or a debugger, when the first rank failed or the fleet was asked
    /// to end: other ranks may have waited for it.
    pub was_stopped: bool,
    pub(super) was_ending: bool,
}

impl RankEnd {
    /// Whether the rank failed, and the fleet had not asked it to end.
    ///
    /// ```
    /// # fn example(end: &nccl::launch::RankEnd) {
    /// if end.is_failure() {
    ///     eprintln!("{end}");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn is_failure(&self) -> bool {
        self.asked_by.is_none() && !self.exit.is_success()
    }
}

impl fmt::Display for RankEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rank {} ({}, pid {}): {} after {}",
            self.rank,
            self.host,
            self.pid,
            self.exit,
            seconds(self.ran)
        )?;
        if self.generation > 0 {
            write!(f, ", generation {}", self.generation)?;
        }
        Ok(())
    }
}

pub(super) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// How a fleet ended.
///
/// Its `Display` is a block of lines: which rank died first and how, its last output, and how the others ended.
///
/// ```
/// # use std::process::Command;
/// # use nccl::launch::{Fleet, Output};
/// let builder = Fleet::builder(3).with(|fleet| fleet.output = Output::Discard);
/// let report = builder.start(|rank| {
///     let mut command = Command::new("sh");
///     command.args(["-c", if rank == 1 { "kill -KILL $$" } else { "sleep 60" }]);
///     command
/// })?;
/// let report = report.wait();
/// assert_eq!(report.exit_code(), 137);
/// let text = report.to_string();
/// assert!(text.starts_with("rank 1 ("), "{text}");
/// assert!(text.contains("died first: killed by SIGKILL"), "{text}");
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The rank that died first without being asked to end, if one did. The order is that in which the kernel reported
    /// the ends, with one exception: a rank that was already dying from a signal when the first end was noticed
    /// precedes a rank that exited with an error code.
    pub first: Option<Arc<RankEnd>>,
    /// The last end of each rank, in the order of ranks.
    pub ranks: Vec<Arc<RankEnd>>,
    /// Ranks whose processes still existed, blocked inside the kernel, some time after they were killed.
    pub left_behind: Vec<usize>,
    /// The signal by which the fleet was asked to end, if it was.
    pub interrupted: Option<Signal>,
    /// Whether the last output of the ranks was not read and is lost.
    pub(super) unread: bool,
}

impl Report {
    /// Whether every rank returned 0, and no process was left behind.
    ///
    /// ```
    /// # fn example(report: &nccl::launch::Report) {
    /// println!("{}", if report.is_success() { "well" } else { "failed" });
    /// # }
    /// ```
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.left_behind.is_empty() && self.ranks.iter().all(|end| end.exit.is_success())
    }

    /// The exit code for the whole fleet: that of the rank that died first (128 plus the signal, if a signal ended it);
    /// else 0 if every rank returned 0; else 128 plus the signal by which the fleet was asked to end; else that of a
    /// rank that did not return 0.
    ///
    /// ```
    /// # fn example(report: &nccl::launch::Report) {
    /// std::process::exit(report.exit_code().into());
    /// # }
    /// ```
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        if let Some(first) = &self.first {
            return first.exit.code();
        }
        if self.is_success() {
            return 0;
        }
        let ended = self.ranks.iter().find(|end| !end.exit.is_success());
        self.interrupted
            .map(Signal::exit_code)
            .or_else(|| ended.map(|end| end.exit.code()))
            .unwrap_or(1)
    }
}

/// Returns the rank that died first; `failures` are in the order in which they were noticed.
pub(super) fn first_of(failures: &[Arc<RankEnd>]) -> Option<Arc<RankEnd>> {
    let first = failures.first()?;
    // A killed rank closes its connections some time before its end becomes visible. A rank that notices the closed
    // connections and gives up at once can end earlier.
    let killed_before = failures.iter().find(|end| {
        let deadly = |signal| !matches!(signal, Signal::Abrt | Signal::Term | Signal::Pipe);
        end.was_ending && end.exit.signal().is_some_and(deadly)
    });
    let first = match first.exit {
        Exit::Code(_) => killed_before.unwrap_or(first),
        _ => first,
    };
    Some(Arc::clone(first))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.first, self.interrupted) {
            (Some(first), _) => {
                write!(
                    f,
                    "rank {} ({}, pid {}) died first: {} after {}",
                    first.rank,
                    first.host,
                    first.pid,
                    first.exit,
                    seconds(first.ran)
                )?;
                if first.generation > 0 {
                    write!(f, ", generation {}", first.generation)?;
                }
                if let Some(oom) = &first.oom {
                    write!(f, "\n  {oom}")?;
                }
                if !first.stderr.is_empty() {
                    f.write_str("\n  the last it said on standard error:")?;
                    for line in &first.stderr {
                        write!(f, "\n    {line}")?;
                    }
                }
            }
            (None, Some(signal)) => write!(f, "ended by {signal}")?,
            (None, None) if self.is_success() => return f.write_str("every rank returned 0"),
            (None, None) => f.write_str("no rank failed of itself")?,
        }
        let first = self.first.as_ref().map(|first| first.rank);
        let others = self.ranks.iter().map(AsRef::as_ref);
        let mut others: Vec<&RankEnd> = others.filter(|e| Some(e.rank) != first).collect();
        others.sort_by_key(|end| end.at);
        // Ranks that ended alike share a line, so that a report on thousands of ranks stays short.
        let mut alike: Vec<(String, Vec<usize>)> = Vec::new();
        for end in others {
            let text = of_another(end, self.first.is_some() || self.interrupted.is_some());
            match alike.iter_mut().find(|(known, _)| *known == text) {
                Some((_, ranks)) => ranks.push(end.rank),
                None => alike.push((text, vec![end.rank])),
            }
        }
        for (text, mut ranks) in alike {
            ranks.sort_unstable();
            write!(f, "\n  {}: {text}", list(&ranks))?;
        }
        if !self.left_behind.is_empty() {
            let left = list(&self.left_behind);
            write!(
                f,
                "\n  {left}: still there after SIGKILL, waiting inside the kernel"
            )?;
        }
        if self.unread {
            write!(
                f,
                "\n  what the ranks printed last is lost: its reader took nothing for {}",
                seconds(UNREAD_OUTPUT_TIMEOUT)
            )?;
        }
        Ok(())
    }
}

/// Describes how a rank other than the first ended.
fn of_another(end: &RankEnd, ending: bool) -> String {
    let mut text = match end.asked_by {
        Some(sent) if end.exit.signal() == Some(sent) => format!("ended by {sent} from here"),
        Some(sent) => format!("{} after {sent} from here", end.exit),
        None if end.exit.is_success() || !ending => end.exit.to_string(),
        None => format!("{} as well", end.exit),
    };
    if end.was_stopped {
        text.push_str("; it had been stopped, by a signal or a debugger");
    }
    if let Some(oom) = &end.oom {
        text.push_str(&format!("; {oom}"));
    }
    text
}

/// `rank 3`, or `ranks 0-2, 5`
fn list(ranks: &[usize]) -> String {
    let mut spans: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match spans.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => spans.push((rank, rank)),
        }
    }
    let spans: Vec<String> = spans
        .into_iter()
        .map(|(from, to)| match to - from {
            0 => from.to_string(),
            1 => format!("{from}, {to}"),
            _ => format!("{from}-{to}"),
        })
        .collect();
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", spans.join(", "))
}

#[cfg(test)]
mod tests;

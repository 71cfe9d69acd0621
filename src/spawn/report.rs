//! Texts about how a rank ended, and about the state of a running one.

use std::fmt;
use std::time::Duration;

use nccl::launch::Exit;
use procfs::process::{Process, Status};

/// The end of a rank.
#[derive(Clone, Debug)]
pub struct RankEnd {
    /// The rank.
    pub rank: usize,
    /// Its process.
    pub pid: u32,
    /// How it ended; `None`: it could not be ended in time.
    pub exit: Option<Exit>,
    /// How long after the start of the job it ended.
    pub after: Duration,
    /// Its last lines on standard output.
    pub stdout: Vec<String>,
    /// Its last lines on standard error.
    pub stderr: Vec<String>,
}

/// The rank whose failure ended the others.
#[derive(Clone, Debug)]
pub struct RankFailure {
    /// The rank and how it ended.
    pub end: RankEnd,
    /// Ranks that were still running and were ended.
    pub ended: Vec<usize>,
    /// Ranks among `ended` that were stopped, which may be why others waited too long.
    pub stopped: Vec<usize>,
}

impl RankFailure {
    /// The exit code for the whole job: the rank's own, or 128 and its signal, as a shell has it.
    #[must_use]
    pub fn code(&self) -> u8 {
        self.end.exit.map_or(1, |exit| exit.code())
    }
}

impl std::error::Error for RankFailure {}

/// The alternate form leaves out what differs from run to run: the process and the time.
impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RankEnd {
            rank,
            pid,
            exit,
            after,
            stderr,
            ..
        } = &self.end;
        write!(f, "rank {rank} ")?;
        if !f.alternate() {
            write!(f, "(pid {pid}) ")?;
        }
        match exit {
            None => write!(f, "could not be ended")?,
            Some(Exit::Code(code)) => write!(f, "ended with exit code {code}")?,
            Some(exit) => match exit.signal() {
                Some(signal) => write!(f, "was killed by signal {} ({signal})", signal.number())?,
                None => write!(f, "ended: {exit}")?,
            },
        }
        if !f.alternate() {
            write!(f, " after {:.1} s", after.as_secs_f64())?;
        }
        match &self.ended[..] {
            [] => {}
            [one] => write!(f, "; rank {one} was ended with it")?,
            many => write!(f, "; ranks {} were ended with it", list(many))?,
        }
        match &self.stopped[..] {
            [] => {}
            [one] => write!(
                f,
                "; rank {one} had been stopped, by a signal or a debugger"
            )?,
            many => write!(
                f,
                "; ranks {} had been stopped, by a signal or a debugger",
                list(many)
            )?,
        }
        if !stderr.is_empty() {
            write!(f, "\n  the last it said on standard error:")?;
            for line in stderr {
                write!(f, "\n    {line}")?;
            }
        }
        Ok(())
    }
}

/// `0, 1 and 3`
fn list(ranks: &[usize]) -> String {
    let texts: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match texts.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => texts.concat(),
    }
}

/// The threads of a process, one line each: name, state, and the kernel function in which it waits, as far as the
/// kernel shows it.
#[must_use]
pub fn describe_process(pid: u32) -> String {
    let process = i32::try_from(pid).map(Process::new);
    let tasks = process.map(|process| process?.tasks());
    let Ok(Ok(tasks)) = tasks else {
        return format!("pid {pid} is gone");
    };
    let mut lines: Vec<String> = tasks
        .flatten()
        .filter_map(|task| {
            let Status { name, state, .. } = task.status().ok()?;
            let waits = std::fs::read_to_string(format!("/proc/{pid}/task/{}/wchan", task.tid));
            let waits = waits.unwrap_or_default();
            let waits = match waits.trim() {
                "" | "0" => "-",
                waits => waits,
            };
            Some(format!("thread {name:<16} {state}, kernel: {waits}"))
        })
        .collect();
    lines.sort();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use nccl::launch::Signal;

    use super::*;

    fn failure(exit: Exit, ended: &[usize], stderr: &[&str]) -> RankFailure {
        RankFailure {
            end: RankEnd {
                rank: 2,
                pid: 977,
                exit: Some(exit),
                after: Duration::from_millis(1234),
                stdout: Vec::new(),
                stderr: stderr.iter().map(|line| (*line).to_owned()).collect(),
            },
            ended: ended.to_vec(),
            stopped: Vec::new(),
        }
    }

    #[test]
    fn a_rank_that_stood_still_is_named() {
        let failure = RankFailure {
            stopped: vec![1],
            ..failure(Exit::Code(4), &[0, 1], &[])
        };
        assert_eq!(
            failure.to_string(),
            "rank 2 (pid 977) ended with exit code 4 after 1.2 s; ranks 0 and 1 were ended with it; \
             rank 1 had been stopped, by a signal or a debugger"
        );
    }

    #[test]
    fn a_signal_is_named_and_becomes_the_shells_exit_code() {
        let killed = Exit::Signal {
            signal: Signal::Kill,
            core_dumped: false,
        };
        let failure = failure(killed, &[0, 1, 3], &[]);
        assert_eq!(
            failure.to_string(),
            "rank 2 (pid 977) was killed by signal 9 (SIGKILL) after 1.2 s; \
             ranks 0, 1 and 3 were ended with it"
        );
        assert_eq!(failure.code(), 137);
    }

    #[test]
    fn an_exit_code_is_passed_on_with_the_last_words() {
        let failure = failure(Exit::Code(7), &[0], &["a", "b"]);
        assert_eq!(
            failure.to_string(),
            "rank 2 (pid 977) ended with exit code 7 after 1.2 s; rank 0 was ended with it\n  \
             the last it said on standard error:\n    a\n    b"
        );
        assert_eq!(failure.code(), 7);
        assert_eq!(
            format!("{failure:#}"),
            "rank 2 ended with exit code 7; rank 0 was ended with it\n  \
             the last it said on standard error:\n    a\n    b"
        );
    }

    #[test]
    fn a_process_is_described_by_its_threads() {
        let own = describe_process(std::process::id());
        assert!(own.contains("(running)"), "{own}");
        assert!(describe_process(u32::MAX - 1).ends_with("is gone"));
    }
}

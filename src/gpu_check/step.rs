//! One step: a process with a deadline, which leaves no process behind.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde_json::Value;

use super::RESULT;
use super::processes::Token;
use super::verdict::{VERDICTS, Verdict, left_at};
use crate::spawn::wait_within;

/// The outcome of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Passed.
    Passed,
    /// Failed, for this reason.
    Failed(String),
    /// Still running at its deadline.
    TimedOut(Duration),
    /// Left out, for this reason.
    Skipped(String),
}

impl Outcome {
    /// One word for tables and scripts.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed(_) => "FAILED",
            Self::TimedOut(_) => "TIMED OUT",
            Self::Skipped(_) => "skipped",
        }
    }

    /// The text beside the word.
    #[must_use]
    pub fn detail(&self) -> String {
        match self {
            Self::Passed => String::new(),
            Self::Failed(text) | Self::Skipped(text) => text.clone(),
            Self::TimedOut(timeout) => format!("not over after {} s", timeout.as_secs()),
        }
    }
}

/// The result of a step.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its name.
    pub name: String,
    /// The command, as a person would type it.
    pub command: String,
    /// Its outcome.
    pub outcome: Outcome,
    /// Whether a failure of the step is a failure of the check; otherwise it is a result.
    pub counts: bool,
    /// How long it took.
    pub took: Duration,
    /// The value that it wrote to [`RESULT`].
    pub result: Option<Value>,
    /// The end of its output.
    pub tail: Vec<String>,
    /// Its log.
    pub log: PathBuf,
}

/// A command about to be run as a step.
#[derive(Debug)]
pub struct Step {
    /// Its name, unique in a check.
    pub name: String,
    /// The command, without the environment of all steps.
    pub command: Command,
    /// How long it may take.
    pub deadline: Duration,
    /// See [`Record::counts`].
    pub counts: bool,
}

/// How long a step may take to end by itself after SIGTERM.
const TERM: Duration = Duration::from_secs(2);
/// How long the other processes of a step may take to end after the step's first process.
const REST: Duration = Duration::from_secs(2);
/// Lines of output that go into the report.
const TAIL: usize = 25;

impl Step {
    /// Runs it, with its output in a file in `logs`.
    ///
    /// # Errors
    /// When the log cannot be written. A command that cannot be started is a failed step.
    pub fn run(mut self, logs: &Path, token: &Token) -> io::Result<Record> {
        let file = self
            .name
            .replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
        let log = logs.join(format!("{file}.log"));
        let result = logs.join(format!("{file}.json"));
        let verdicts = logs.join(format!("{file}.verdicts"));
        for left in [&result, &verdicts] {
            let _ = fs::remove_file(left);
        }
        let output = File::create(&log)?;
        let line = shown(&self.command);
        self.command
            .env(RESULT, &result)
            .env(VERDICTS, &verdicts)
            .envs([token.variable()])
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0);
        // If the check itself is killed, its step is killed as well.
        // SAFETY: only makes a system call, as is allowed between fork and exec.
        unsafe {
            self.command.pre_exec(|| {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                Ok(())
            });
        }
        let begun = Instant::now();
        let mut outcome = match self.command.spawn() {
            Err(error) => Outcome::Failed(format!("cannot be started: {error}")),
            Ok(mut child) => match wait_within(&mut child, self.deadline)? {
                Some(status) if status.success() => Outcome::Passed,
                Some(status) => Outcome::Failed(described(status)),
                None => {
                    end(&mut child)?;
                    Outcome::TimedOut(self.deadline)
                }
            },
        };
        let left = token.end(REST);
        let took = begun.elapsed();
        if !left.is_empty() && outcome == Outcome::Passed {
            let commands: Vec<_> = left.iter().map(|process| &*process.command).collect();
            outcome = Outcome::Failed(format!(
                "it left {} behind: {}",
                if left.len() == 1 {
                    "a process"
                } else {
                    "processes"
                },
                commands.join("; ")
            ));
        }
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        let verdicts = left_at(&verdicts);
        let has_tested = |one: &Verdict| matches!(one, Verdict::Tested(_));
        if let (Outcome::Passed, Some(Verdict::NotTested(reason)), false) =
            (&outcome, verdicts.first(), verdicts.iter().any(has_tested))
        {
            outcome = Outcome::Skipped(reason.clone());
        }
        let result = fs::read_to_string(&result).ok();
        Ok(Record {
            name: self.name,
            command: line,
            outcome,
            counts: self.counts,
            took,
            result: result.and_then(|text| serde_json::from_str(&text).ok()),
            tail: lines[lines.len().saturating_sub(TAIL)..]
                .iter()
                .map(|&line| line.to_owned())
                .collect(),
            log,
        })
    }
}

/// Ends a child and its group: SIGTERM first, so that they can clean up.
fn end(child: &mut Child) -> io::Result<()> {
    let group = Pid::from_child(child);
    let _ = rustix::process::kill_process_group(group, Signal::TERM);
    if wait_within(child, TERM)?.is_none() {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        // A process in an uninterruptible system call is left to the token.
        wait_within(child, TERM)?;
    }
    Ok(())
}

fn described(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// The command with its variables.
fn shown(command: &Command) -> String {
    let mut words: Vec<String> = Vec::new();
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            words.push(format!(
                "{}={}",
                name.to_string_lossy(),
                value.to_string_lossy()
            ));
        }
    }
    words.push(command.get_program().to_string_lossy().into_owned());
    words.extend(
        command
            .get_args()
            .map(|word| word.to_string_lossy().into_owned()),
    );
    words.join(" ")
}

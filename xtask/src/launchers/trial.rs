//! The trials under a launcher, and their outcomes.

use std::fmt;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use super::hosts::Hosts;
use super::job::Job;
use crate::{Result, workspace};

/// The limit of a job, of a failover, and of a launcher's end: many times their usual duration on two busy cores.
const LIMIT: Duration = Duration::from_secs(90);

/// How long ranks must live after a failover: longer than a launcher takes to end them.
const HELD: Duration = Duration::from_secs(4);

/// The same after the loss of a host: Slurm notices after its `SlurmdTimeout`, 10 s here.
const HELD_AFTER_A_HOST: Duration = Duration::from_secs(40);

/// The rank that is killed. It is not the coordinator: launchers treat all ranks alike, and a failover works in the same way.
const VICTIM: usize = 1;

/// The kind of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Benchmark,
    /// A rank is killed by SIGKILL.
    Death,
    /// The last host ends, with all its processes.
    LostHost,
    Doctor,
}

impl What {
    /// The program, and its arguments.
    fn program(self) -> (PathBuf, &'static [&'static str]) {
        let built = workspace::target_directory().join("debug");
        match self {
            Self::Benchmark => (
                built.join("examples/all_to_all_perf"),
                &["-b", "1K", "-e", "4K", "-n", "5"],
            ),
            Self::Death | Self::LostHost => (built.join("examples/going_on"), &["rank"]),
            Self::Doctor => (built.join("nccl-doctor"), &["--emulator", "--communicate"]),
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Benchmark => "`all_to_all_perf`",
            Self::Death => "`going_on`, one rank killed",
            Self::LostHost => "`going_on`, one node lost",
            Self::Doctor => "`nccl-doctor`",
        })
    }
}

/// The source of the other ranks' knowledge of a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// From the launcher, which takes part in the world.
    Signal,
    /// From the kernel of their host.
    Ended,
    /// From the host of the rank, on which nothing listens any more.
    Refused,
    /// The host does not answer.
    Unreachable,
}

impl Cause {
    /// Returns whether a line of a survivor reports this cause.
    fn is_in(self, line: &str) -> bool {
        let words = match self {
            Self::Signal => "killed by SIGKILL",
            Self::Ended => "ended without goodbye: it died",
            Self::Refused => "its host refuses connections to the address at which it listened",
            // The reason follows this text: TCP has given up, no packet comes back, or no host has the address.
            Self::Unreachable => "its connection broke without goodbye",
        };
        line.contains("is gone: ") && line.contains(words)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Signal => "killed by SIGKILL",
            Self::Ended => "its process died",
            Self::Refused => "its process has ended",
            Self::Unreachable => "its host does not answer",
        })
    }
}

/// The outcome of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Right {
        ranks: usize,
    },
    GoOn {
        survivors: usize,
        cause: Cause,
    },
    /// The launcher ends the survivors, and reports the signal that killed the rank.
    Ended,
    /// The launcher ends the survivors after their failover: a node is lost.
    EndedLater,
    /// There is no error, and no warning except that the hosts share a kernel.
    Communicates {
        ranks: usize,
        one_kernel: bool,
    },
    /// The ranks end with an error that explains how to set the address.
    NoAddress,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Right { ranks } => write!(f, "right, {ranks} ranks"),
            Self::GoOn { survivors, cause } => {
                write!(f, "{survivors} ranks go on; cause: {cause}")
            }
            Self::Ended => f.write_str("the launcher ends the others"),
            Self::EndedLater => f.write_str("the others go on until the launcher ends them"),
            Self::Communicates {
                ranks,
                one_kernel: false,
            } => {
                write!(f, "communicates, {ranks} ranks; no warning")
            }
            Self::Communicates {
                ranks,
                one_kernel: true,
            } => {
                write!(
                    f,
                    "communicates, {ranks} ranks; warns that hosts share a kernel"
                )
            }
            Self::NoAddress => f.write_str("every rank names the variable to set"),
        }
    }
}

/// A trial under a launcher.
pub(super) struct Trial {
    pub(super) what: What,
    /// For each launcher, its host and its words, in which [`PROGRAM`], [`NCCL_RUN`], [`SECRET`] and [`BATCH_OUTPUT`] are
    /// replaced.
    pub(super) commands: Vec<(usize, Vec<&'static str>)>,
    pub(super) variables: Vec<(&'static str, &'static str)>,
    /// The flag that keeps survivors alive, as on the page.
    pub(super) flag: &'static str,
    pub(super) expected: Outcome,
    pub(super) ranks: usize,
    /// The launcher's words for the end of a rank by SIGKILL.
    pub(super) report: &'static str,
}

/// The program and its arguments.
pub(super) const PROGRAM: &str = "./server";
pub(super) const NCCL_RUN: &str = "nccl-run";
/// The file with the secret.
pub(super) const SECRET: &str = "job.secret";
/// The file with the output of a batch job.
const BATCH_OUTPUT: &str = "batch.out";

impl Trial {
    /// Returns the command line as on the page.
    pub(super) fn command_line(&self) -> String {
        let (_, words) = &self.commands[0];
        let quoted = |word: &&str| match word.contains(' ') {
            true => format!("'{word}'"),
            false => (*word).to_owned(),
        };
        let words: Vec<String> = words.iter().map(quoted).collect();
        let variables: Vec<String> = self
            .variables
            .iter()
            .map(|(name, value)| format!("{name}={value} "))
            .collect();
        let text = variables.concat() + &words.join(" ");
        text.replace("mpirun.openmpi", "mpirun")
            .replace("mpirun.mpich", "mpirun")
    }

    pub(super) fn run(&self, hosts: &Hosts, environment: &[(String, String)]) -> Result<Outcome> {
        let (program, arguments) = self.what.program();
        let run = workspace::target_directory().join("debug/nccl-run");
        let [secret, output] = [SECRET, BATCH_OUTPUT].map(|name| hosts.directory().join(name));
        let fill = |word: &&str| -> Vec<String> {
            let filled = match *word {
                PROGRAM => {
                    let mut words = vec![program.display().to_string()];
                    words.extend(arguments.iter().map(|word| (*word).to_owned()));
                    return words;
                }
                word => word.replace(NCCL_RUN, &run.display().to_string()),
            };
            let whole = format!("{} {}", program.display(), arguments.join(" "));
            vec![
                filled
                    .replace(PROGRAM, &whole)
                    .replace(SECRET, &secret.display().to_string())
                    .replace(BATCH_OUTPUT, &output.display().to_string()),
            ]
        };
        let commands: Vec<(usize, Vec<String>)> = self
            .commands
            .iter()
            .map(|(host, words)| (*host, words.iter().flat_map(fill).collect()))
            .collect();
        let mut variables = environment.to_vec();
        for (name, value) in &self.variables {
            variables.push(((*name).to_owned(), (*value).to_owned()));
        }
        let mut job = Job::start(hosts, &program, &commands, &variables)?;
        let found = match self.what {
            What::Benchmark => self.benchmark(&mut job),
            What::Death | What::LostHost => self.death(&mut job, hosts),
            What::Doctor => self.doctor(&mut job),
        };
        match found? {
            outcome if outcome == self.expected => Ok(outcome),
            outcome => {
                let (expected, said) = (self.expected, job.output());
                Err(format!("{outcome:?} instead of {expected:?}\n{said}").into())
            }
        }
    }

    fn benchmark(&self, job: &mut Job<'_>) -> Result<Outcome> {
        let codes = job.ended(LIMIT)?;
        let ended = codes.ok_or_else(|| overdue("the benchmark", job))?;
        let success = ended.iter().all(|code| *code == 0);
        if success && job.says("Out of bounds values : 0 OK") == 1 {
            let ranks = (1..=64).find(|ranks| {
                job.says(&format!("# Ranks                : {ranks} processes")) == 1
            });
            let ranks = ranks.ok_or("the benchmark does not say its number of ranks")?;
            return Ok(Outcome::Right { ranks });
        }
        if job.says("set NCCL_RUN_RENDEZVOUS=tcp:") >= self.ranks {
            return Ok(Outcome::NoAddress);
        }
        Err(format!("exit codes {ended:?}\n{}", job.output()).into())
    }

    fn death(&self, job: &mut Job<'_>, hosts: &Hosts) -> Result<Outcome> {
        let ranks = self.ranks;
        let work = format!("at work: {ranks} ranks in generation 0");
        if !job.await_words(&work, ranks, LIMIT)? {
            return Err(overdue("the work", job));
        }
        let mut held = HELD;
        match self.what {
            What::LostHost => {
                // The hosts of nodes come first, with a rank on each.
                hosts.lose(ranks - 1)?;
                held = HELD_AFTER_A_HOST;
            }
            _ => job.kill(VICTIM)?,
        }
        let survivors = ranks - 1;
        let right = format!("right: {survivors} ranks in generation 1");
        let went_on = job.await_words(&right, survivors, LIMIT)?;
        if went_on && job.ended(held)?.is_none() && job.ranks().len() == survivors {
            let causes = [
                Cause::Signal,
                Cause::Ended,
                Cause::Refused,
                Cause::Unreachable,
            ];
            let output = job.output();
            let said = |cause: &Cause| {
                output.lines().filter(|line| cause.is_in(line)).count() >= survivors
            };
            let cause = causes.into_iter().find(said);
            let cause = cause.ok_or_else(|| format!("no cause in\n{output}"))?;
            job.end(LIMIT)?;
            return Ok(Outcome::GoOn { survivors, cause });
        }
        job.ended(LIMIT)?
            .ok_or_else(|| overdue("the end of the launcher", job))?;
        // Processes that a daemon of the launcher ends take a moment longer.
        sleep(Duration::from_secs(1));
        let left = job.ranks().len();
        match (self.what, went_on) {
            _ if left > 0 => Err(format!("{left} ranks live on\n{}", job.output()).into()),
            (What::LostHost, true) => Ok(Outcome::EndedLater),
            _ if job.says(self.report) > 0 => Ok(Outcome::Ended),
            _ => Err(format!(
                "the launcher does not say {:?}\n{}",
                self.report,
                job.output()
            )
            .into()),
        }
    }

    fn doctor(&self, job: &mut Job<'_>) -> Result<Outcome> {
        job.ended(LIMIT)?
            .ok_or_else(|| overdue("the doctor", job))?;
        let said = job.output();
        let ranks =
            (1..=64).find(|ranks| said.contains(&format!("{ranks} ranks, seen from rank 0")));
        let (Some(ranks), true) = (ranks, said.contains("✓ communicate:")) else {
            return Err(format!("the doctor's ranks do not communicate\n{said}").into());
        };
        let starts = |mark: &str| said.lines().filter(|line| line.contains(mark)).count();
        if starts("✗ ") > 0 {
            return Err(format!("the doctor finds errors\n{said}").into());
        }
        // The number of these warnings varies, because process numbers may be equal in two namespaces.
        let namespaces = starts("! namespaces:");
        if starts("! ") != namespaces {
            return Err(format!("the doctor has other warnings\n{said}").into());
        }
        let one_kernel = namespaces > 0;
        Ok(Outcome::Communicates { ranks, one_kernel })
    }
}

fn overdue(what: &str, job: &Job<'_>) -> Box<dyn std::error::Error> {
    format!("{what}: not within {} s\n{}", LIMIT.as_secs(), job.output()).into()
}

//! A job that a launcher runs on [`Hosts`]: its processes, its output, and its end, each wait with a limit.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::hosts::{Hosts, Process};
use crate::Result;

const PAUSE: Duration = Duration::from_millis(50);

/// The variables with the rank of a process; those of inner launchers come first.
const RANKS: [&str; 4] = [
    "NCCL_RUN_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
];

/// A running job. Dropping it ends its ranks and its launchers.
pub(super) struct Job<'h> {
    hosts: &'h Hosts,
    program: PathBuf,
    launchers: Vec<Child>,
    output: PathBuf,
}

impl<'h> Job<'h> {
    /// Starts `commands`, each on its host, for ranks that run `program`.
    pub(super) fn start(
        hosts: &'h Hosts,
        program: &Path,
        commands: &[(usize, Vec<String>)],
        variables: &[(String, String)],
    ) -> Result<Self> {
        let output = hosts.directory().join("job.out");
        let file = File::create(&output)?;
        let mut job = Self {
            hosts,
            program: program.to_owned(),
            launchers: Vec::new(),
            output,
        };
        for (host, words) in commands {
            // Several launchers write to one file: each appends.
            let append = File::options().append(true).open(&job.output)?;
            let mut command = hosts.command(*host);
            command
                .args(words)
                .envs(variables.iter().map(|(name, value)| (name, value)))
                .stdout(append.try_clone()?)
                .stderr(append);
            job.launchers.push(command.spawn()?);
        }
        drop(file);
        Ok(job)
    }

    pub(super) fn output(&self) -> String {
        let bytes = fs::read(&self.output).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the number of lines that contain these words.
    pub(super) fn says(&self, words: &str) -> usize {
        let output = self.output();
        output.lines().filter(|line| line.contains(words)).count()
    }

    /// Returns the exit codes of all launchers, once all have ended within `limit`.
    pub(super) fn ended(&mut self, limit: Duration) -> Result<Option<Vec<i32>>> {
        let end = Instant::now() + limit;
        let mut codes = Vec::new();
        for launcher in &mut self.launchers {
            let Some(status) = wait(launcher, end)? else {
                return Ok(None);
            };
            // nsenter ends with the signal that ended its child.
            use std::os::unix::process::ExitStatusExt as _;
            codes.push(status.code().unwrap_or(128 + status.signal().unwrap_or(0)));
        }
        Ok(Some(codes))
    }

    /// Waits until `count` lines contain these words; returns `false` if the launchers end earlier, or at the limit.
    pub(super) fn await_words(
        &mut self,
        words: &str,
        count: usize,
        limit: Duration,
    ) -> Result<bool> {
        let end = Instant::now() + limit;
        loop {
            let is_over = self.ended(Duration::ZERO)?.is_some();
            if self.says(words) >= count {
                return Ok(true);
            }
            if is_over || Instant::now() >= end {
                return Ok(false);
            }
            sleep(PAUSE);
        }
    }

    /// Returns the living ranks.
    pub(super) fn ranks(&self) -> Vec<(usize, Process)> {
        let rank = |process: Process| {
            let value = RANKS.iter().find_map(|name| process.variables.get(*name))?;
            Some((value.parse().ok()?, process))
        };
        let processes = self.hosts.processes(&self.program);
        processes.into_iter().filter_map(rank).collect()
    }

    pub(super) fn kill(&self, rank: usize) -> Result {
        match self.ranks().iter().find(|(other, _)| *other == rank) {
            Some((_, process)) => {
                process.kill();
                Ok(())
            }
            None => Err(format!("rank {rank} does not run\n{}", self.output()).into()),
        }
    }

    /// Ends all ranks, and waits for the launchers.
    pub(super) fn end(&mut self, limit: Duration) -> Result<Option<Vec<i32>>> {
        for (_, process) in self.ranks() {
            process.kill();
        }
        self.ended(limit)
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        for process in self.hosts.processes(&self.program) {
            process.kill();
        }
        for launcher in &mut self.launchers {
            let _ = launcher.kill();
            let _ = launcher.wait();
        }
    }
}

/// Returns the status of a process that ends before `end`.
pub(super) fn wait(child: &mut Child, end: Instant) -> Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        sleep(PAUSE);
    }
}

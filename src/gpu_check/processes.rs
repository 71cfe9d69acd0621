//! Finds and ends all processes that a step started.
//!
//! Every process of a check inherits a variable with a unique value ([`Token`]), which finds daemons that leave their
//! process group, and orphans.

use std::ffi::OsStr;
use std::io;
use std::time::{Duration, Instant};

use procfs::process::all_processes;
use rustix::process::{Pid, Signal};

/// The variable.
const NAME: &str = "NCCL_TOOLS_GPU_CHECK";

/// The mark of all processes of one check.
#[derive(Clone, Debug)]
pub struct Token {
    value: String,
}

/// A process that was found by its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its number.
    pub pid: i32,
    /// Its command line.
    pub command: String,
}

impl Token {
    /// A unique token, for the processes that get [`variable`](Self::variable). Orphans become children of this process
    /// from now on.
    ///
    /// # Errors
    /// When the kernel refuses that.
    pub fn new() -> io::Result<Self> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanoseconds = now.map_or(0, |time| time.as_nanos());
        let value = format!("{}-{nanoseconds}", std::process::id());
        Ok(Self { value })
    }

    /// The variable for the environment of the check's processes.
    #[must_use]
    pub fn variable(&self) -> (&'static str, &str) {
        (NAME, &self.value)
    }

    /// The processes with this token, except this one and ended ones.
    #[must_use]
    pub fn processes(&self) -> Vec<Found> {
        let own = std::process::id() as i32;
        let processes = all_processes().into_iter().flatten().flatten();
        let of_the_check = processes.filter(|process| {
            // An ended process has no environment any more.
            let environment = process.environ().unwrap_or_default();
            let value = environment.get(OsStr::new(NAME));
            process.pid != own && value.is_some_and(|value| *value == *self.value)
        });
        of_the_check
            .map(|process| Found {
                pid: process.pid,
                command: process.cmdline().unwrap_or_default().join(" "),
            })
            .collect()
    }

    /// Waits for all processes to end, at most `patience`, then kills the remaining ones and returns them.
    pub fn end(&self, patience: Duration) -> Vec<Found> {
        let begun = Instant::now();
        let left = loop {
            let left = self.processes();
            if left.is_empty() || begun.elapsed() > patience {
                break left;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let begun = Instant::now();
        // A process may start another while it is being killed.
        while begun.elapsed() < KILL {
            let alive = self.processes();
            if alive.is_empty() {
                break;
            }
            for process in alive {
                if let Some(pid) = Pid::from_raw(process.pid) {
                    let _ = rustix::process::kill_process(pid, Signal::KILL);
                }
            }
            reap();
            std::thread::sleep(Duration::from_millis(10));
        }
        reap();
        left
    }
}

/// How long killed processes may take to end.
const KILL: Duration = Duration::from_secs(10);

/// Collects the exit codes of orphans. Children whose exit status other code needs must have been waited for.
fn reap() {
    use rustix::process::{WaitOptions, wait};
    while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
}

//! Runs the example, as a user does, with a limit on the duration.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// How long one run may take.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// All programs.
pub(crate) const PROGRAMS: [&str; 4] = [
    "all_to_all_perf",
    "all_to_all_v_perf",
    "sendrecv_perf",
    "all_reduce_perf",
];

/// Variables by which launchers mark a process as a rank, and others that change the behaviour.
pub(crate) const LAUNCHERS: [&str; 15] = [
    "NCCL_RUN_RANK",
    "NCCL_RUN_WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "NCCL_TOOLS_SELF_TEST",
    "NCCL_TESTS_ALLTOALLV_SPREAD",
    "NCCL_TESTS_ALLTOALLV_MATRIX_FILE",
    "NCCL_TESTS_ALLTOALLV_MATRIX_SCALE",
    "NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY",
];

/// `all_to_all_perf` on the emulator.
pub(crate) fn command(arguments: &str) -> Command {
    command_of("all_to_all_perf", arguments)
}

/// A program on the emulator, also on machines with GPUs: there the figures would differ.
pub(crate) fn command_of(program: &'static str, arguments: &str) -> Command {
    let mut command = Command::new(crate::programs::program(program));
    command
        .args(arguments.split_whitespace())
        .env("NCCL_EMULATOR", "1");
    for name in LAUNCHERS {
        command.env_remove(name);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// What a run printed, and how it ended.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn run(arguments: &str) -> Run {
    finish(command(arguments).spawn().unwrap())
}

pub(crate) fn run_with(arguments: &str, variables: &[(&str, &str)]) -> Run {
    run_of("all_to_all_perf", arguments, variables)
}

pub(crate) fn run_of(program: &'static str, arguments: &str, variables: &[(&str, &str)]) -> Run {
    finish(
        command_of(program, arguments)
            .envs(variables.iter().copied())
            .spawn()
            .unwrap(),
    )
}

/// Waits for the end, and kills the process at the deadline.
pub(crate) fn finish(mut child: Child) -> Run {
    let read = |stream: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut text = String::new();
            if let Some(mut stream) = stream {
                stream.read_to_string(&mut text).unwrap();
            }
            text
        })
    };
    let stdout = read(child.stdout.take().map(|stream| Box::new(stream) as _));
    let stderr = read(child.stderr.take().map(|stream| Box::new(stream) as _));
    let begun = Instant::now();
    let mut late = false;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > DEADLINE && !late {
            late = true;
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let run = Run {
        status,
        stdout: stdout.join().unwrap(),
        stderr: stderr.join().unwrap(),
    };
    assert!(!late, "killed after {DEADLINE:?}: {run:#?}");
    run
}

impl Run {
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.status.code(), Some(code), "{self:#?}");
        self
    }

    /// The rows of the table, cut into fields.
    pub(crate) fn rows(&self) -> Vec<Vec<&str>> {
        let rows = self
            .stdout
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty());
        rows.map(|row| row.split_whitespace().collect()).collect()
    }

    /// Asserts that all measurements were verified without errors.
    pub(crate) fn expect_nothing_wrong(&self) {
        assert!(!self.rows().is_empty(), "{self:#?}");
        for row in self.rows() {
            assert_eq!((row[8], row[12]), ("0", "0"), "{row:?}");
        }
    }

    /// The lines about devices.
    pub(crate) fn devices(&self) -> Vec<&str> {
        self.stdout
            .lines()
            .filter(|line| line.starts_with("#  Rank "))
            .collect()
    }
}

/// Few sizes and iterations, for tests of other things than figures.
pub(crate) const SHORT: &str = "-b 1K -e 64K -f 8 -n 3 --memcpy_ratio 0";

pub(crate) fn pid_of(line: &str) -> &str {
    line.split(" Pid ")
        .nth(1)
        .unwrap()
        .split_whitespace()
        .next()
        .unwrap()
}

/// A run without end, once it prints rows; and the processes of its ranks.
pub(crate) struct Endless {
    pub(crate) child: Child,
    pub(crate) pids: Vec<i32>,
    // Read no further, but kept open.
    pub(crate) _stdout: BufReader<std::process::ChildStdout>,
}

pub(crate) fn endless(arguments: &str) -> Endless {
    let mut child = command(&format!("{SHORT} -N 0 {arguments}"))
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut pids = Vec::new();
    let mut line = String::from("#");
    while line.starts_with('#') {
        line.clear();
        stdout.read_line(&mut line).unwrap();
        if line.starts_with("#  Rank ") {
            pids.push(pid_of(&line).parse().unwrap());
        }
    }
    if line.is_empty() {
        panic!("it ended by itself: {:#?}", finish(child));
    }
    Endless {
        child,
        pids,
        _stdout: stdout,
    }
}

pub(crate) fn signal(pid: i32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

pub(crate) fn gone(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status
        .lines()
        .any(|line| line.starts_with("State:") && !line.contains("Z (zombie)"))
}

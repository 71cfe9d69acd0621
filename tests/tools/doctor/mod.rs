//! `nccl-doctor`: on one host, among ranks that are processes, and over logs.

mod check;
mod logs;
mod timeline;

use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use nccl_tools::spawn::end_within;
use serde_json::Value;
use tempfile::TempDir;

use crate::programs;

/// How long a doctor may take, on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// `nccl-doctor ARGUMENTS`, without the test's own variables about ranks and NCCL.
fn doctor(arguments: &[&str]) -> Command {
    doctor_behind(&[], arguments)
}

/// As [`doctor`], run by the command `before`.
fn doctor_behind(before: &[&str], arguments: &[&str]) -> Command {
    let doctor = programs::program("nccl-doctor").display().to_string();
    let words = [before, &[&doctor], arguments].concat();
    let mut command = Command::new(words[0]);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        let launchers = ["NCCL_", "SLURM_", "OMPI_", "PMI_", "MPI_"];
        let others = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "NO_COLOR"];
        if launchers.iter().any(|prefix| name.starts_with(prefix)) || others.contains(&&name[..]) {
            command.env_remove(name);
        }
    }
    // What the kernel of this machine has said is not about the tests.
    command.env("NCCL_RUN_KMSG", "/dev/null");
    command.args(&words[1..]).stdin(Stdio::null());
    command
}

/// Runs the command to its end, which must come before the deadline.
fn run(mut command: Command) -> Output {
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    finish(child)
}

#[test]
fn a_standard_error_without_a_reader_is_no_panic() {
    let (reader, stderr) = std::io::pipe().unwrap();
    drop(reader);
    let mut doctor = doctor(&["--no-such-option"]);
    let status = doctor.stderr(stderr).status().unwrap();
    assert_eq!(status.code(), Some(3));
}

fn finish(mut child: Child) -> Output {
    // It may print more than a pipe holds.
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let stdout = std::thread::spawn(move || read_all(&mut out));
    let stderr = std::thread::spawn(move || read_all(&mut err));
    let ended = end_within(&mut child, DEADLINE).unwrap();
    let output = Output {
        status: child.wait().unwrap(),
        stdout: stdout.join().unwrap(),
        stderr: stderr.join().unwrap(),
    };
    assert!(ended.is_some(), "it did not end: {output:?}");
    output
}

fn read_all(from: &mut impl std::io::Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).unwrap();
    bytes
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[track_caller]
fn code(status: ExitStatus) -> i32 {
    status.code().expect("it was not killed")
}

/// The JSON output; its severities must fit the exit code.
#[track_caller]
fn json(output: &Output) -> Value {
    let stdout = text(&output.stdout);
    let value: Value = serde_json::from_str(&stdout)
        .unwrap_or_else(|error| panic!("{error:#} in {stdout}\n{}", text(&output.stderr)));
    let findings = value["findings"].as_array().unwrap();
    let has = |severity: &str| findings.iter().any(|one| one["severity"] == severity);
    let expected = match (has("error"), has("warning")) {
        (true, _) => ("error", 2),
        (_, true) => ("warning", 1),
        _ => ("ok", 0),
    };
    assert_eq!(value["worst"], expected.0, "{stdout}");
    assert_eq!(value["exit_code"], expected.1, "{stdout}");
    assert_eq!(code(output.status), expected.1, "{stdout}");
    value
}

/// The findings of this name.
fn named<'v>(value: &'v Value, check: &str) -> Vec<&'v Value> {
    let findings = value["findings"].as_array().unwrap();
    findings
        .iter()
        .filter(|one| one["check"] == check)
        .collect()
}

#[track_caller]
fn one<'v>(value: &'v Value, check: &str) -> &'v Value {
    let found = named(value, check);
    assert_eq!(found.len(), 1, "{check} in {value:#}");
    found[0]
}

fn log(name: &str) -> String {
    format!(
        "{}/../crates/nccl-diagnose/src/debug_log/tests/logs/{name}",
        env!("CARGO_MANIFEST_DIR")
    )
}

/// Doctors that run as ranks.
struct Ranks {
    directory: TempDir,
    size: usize,
    children: Vec<Child>,
}

impl Ranks {
    fn new(size: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let children = Vec::new();
        Self {
            directory,
            size,
            children,
        }
    }

    fn start(&mut self, rank: usize, arguments: &[&str], more: &[(&str, &str)]) {
        let mut command = doctor(arguments);
        let meeting = self.directory.path().join("world");
        let (number, size) = (rank.to_string(), self.size.to_string());
        command
            .env("NCCL_RUN_RANK", &number)
            .env("NCCL_RUN_WORLD_SIZE", &size)
            .env("NCCL_RUN_LOCAL_RANK", &number)
            .env("NCCL_RUN_LOCAL_WORLD_SIZE", &size)
            .env("NCCL_RUN_RENDEZVOUS", format!("unix:{}", meeting.display()))
            .envs(more.iter().copied());
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        self.children.push(child);
    }

    fn finish(self) -> Vec<Output> {
        self.children.into_iter().map(finish).collect()
    }
}

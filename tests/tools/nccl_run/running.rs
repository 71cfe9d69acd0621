//! Runs `nccl-run`, with a limit on the duration.

use std::fmt;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::LazyLock;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nccl::launch::Signal;
use nccl_tools::spawn::end_within;
use nccl_tools::testing::{eventually, lives};
use rustix::process::{Pid, kill_process};

use crate::programs::program;

/// How long one run may take.
const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) static PROGRAM: LazyLock<String> =
    LazyLock::new(|| program("nccl-run").display().to_string());

/// What a run printed, and how it ended.
pub(crate) struct Run {
    /// As a shell reports it.
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

impl fmt::Debug for Run {
    /// Of long output, the beginning.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = &self.stdout[..self.stdout.len().min(4000)];
        write!(
            f,
            "code {} after {:?}\nstdout ({} bytes):\n{}\nstderr:\n{}",
            self.code,
            self.took,
            self.stdout.len(),
            String::from_utf8_lossy(shown),
            self.stderr
        )
    }
}

impl Run {
    pub(crate) fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The report of `nccl-run` itself at the end, without its name.
    pub(crate) fn report(&self) -> &str {
        let at = self.stderr.rfind("nccl-run: ").unwrap_or_else(|| {
            panic!("there is no report: {self:?}");
        });
        self.stderr[at..].trim_start_matches("nccl-run: ")
    }
}

/// `nccl-run` with these options, and a shell script as the program.
pub(crate) fn script(options: &str, script: &str) -> Command {
    let mut command = options_only(options);
    command.args(["--", "sh", "-c", script]);
    command
}

/// Tests may run in the background of a shell, which ignores Ctrl-C for them and all their children; and a shell cannot
/// catch signals that were ignored when it began.
fn heed_the_keyboard(command: &mut Command) {
    // SAFETY: between fork and exec, `signal` may be called, and nothing else is done.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGINT, libc::SIGQUIT] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    };
}

pub(crate) fn options_only(options: &str) -> Command {
    let mut command = Command::new(&*PROGRAM);
    command.args(options.split_whitespace());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("NCCL_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    heed_the_keyboard(&mut command);
    command
}

pub(crate) fn run(options: &str, text: &str) -> Run {
    Running::start(script(options, text)).finish()
}

/// A running `nccl-run`.
pub(crate) struct Running {
    child: Child,
    pub(crate) begun: Instant,
    stdout: Option<ChildStdout>,
    stderr: JoinHandle<Vec<u8>>,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("nccl-run is there");
        let stdout = child.stdout.take();
        let stderr = child.stderr.take().expect("a pipe");
        Self {
            child,
            begun: Instant::now(),
            stdout,
            stderr: std::thread::spawn(move || read(stderr)),
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        send(self.id(), signal);
    }

    pub(crate) fn take_stdout(&mut self) -> ChildStdout {
        self.stdout.take().expect("it was not taken before")
    }

    pub(crate) fn finish(mut self) -> Run {
        let stdout = self.stdout.take();
        let stdout = std::thread::spawn(move || stdout.map(read).unwrap_or_default());
        let left = DEADLINE.saturating_sub(self.begun.elapsed());
        let ended = end_within(&mut self.child, left).expect("it is our child");
        let status = self.child.wait().expect("it is our child");
        let took = self.begun.elapsed();
        let run = Run {
            code: status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
            stdout: stdout.join().expect("a reader"),
            stderr: String::from_utf8_lossy(&self.stderr.join().expect("a reader")).into_owned(),
            took,
        };
        assert!(
            ended.is_some(),
            "it did not end within {DEADLINE:?}: {run:?}"
        );
        run
    }
}

fn read(mut stream: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("a pipe");
    bytes
}

pub(crate) fn send(pid: u32, signal: Signal) {
    let raw = rustix::process::Signal::from_named_raw(signal.number()).expect("a named signal");
    let pid = Pid::from_raw(pid.cast_signed()).expect("a process");
    kill_process(pid, raw).expect("it is there");
}

/// A directory in which the processes of a test report themselves.
pub(crate) struct Notes(tempfile::TempDir);

impl Notes {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// A line of shell that writes `text` under `name`, atomically.
    pub(crate) fn noting(&self, name: &str, text: &str) -> String {
        let file = self.file(name).display().to_string();
        format!("echo \"{text}\" > \"{file}.$$\"; mv \"{file}.$$\" \"{file}\";")
    }

    /// The text under `name`, once it is written.
    pub(crate) fn read(&self, name: &str) -> String {
        let file = self.file(name);
        eventually(&format!("{name} is noted"), || file.exists());
        let text = std::fs::read_to_string(file).expect("a note");
        text.trim().to_owned()
    }

    pub(crate) fn pid(&self, name: &str) -> u32 {
        self.read(name).parse().expect("the number of a process")
    }
}

/// Asserts that all of these processes end soon.
pub(crate) fn all_gone(pids: &[u32]) {
    let begun = Instant::now();
    eventually("nothing is left", || !pids.iter().any(|&pid| lives(pid)));
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(5), "it took {took:?}");
}

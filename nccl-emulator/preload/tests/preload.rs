//! Programs that are not written in Rust, with the shared object preloaded.

use std::env;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The clients' own deadline is a minute.
const DEADLINE: Duration = Duration::from_secs(90);

/// Cargo builds it for these tests, beside them.
fn shared_object() -> PathBuf {
    let tests = env::current_exe().unwrap();
    let file = tests.with_file_name("libnccl_emulator_preload.so");
    assert!(file.is_file(), "{} is not there", file.display());
    file
}

/// Python without settings of this machine's user; without Python, `None`, and prints a line about it.
fn python() -> Option<Command> {
    let found = Command::new("python3")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !found {
        // Not `eprintln!`, which the test harness would swallow.
        let message = b"NOT TESTED: there is no python3 to be a client of the emulator\n";
        std::io::stderr().write_all(message).unwrap();
        return None;
    }
    let mut command = Command::new("python3");
    for (variable, _) in env::vars_os() {
        let name = variable.to_string_lossy();
        if name.starts_with("NCCL_") || name.starts_with("PYTHON") {
            command.env_remove(variable);
        }
    }
    command
        // No compiled files beside the sources.
        .arg("-B")
        .env("LD_PRELOAD", shared_object());
    Some(command)
}

fn finish(command: &mut Command) -> Output {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.unwrap();
    let end = Instant::now() + DEADLINE;
    // The output fits into a pipe.
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("it has not ended after {DEADLINE:?}: {output:?}");
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn two_processes_that_use_ctypes_exchange_messages_and_sums() {
    let Some(mut python) = python() else { return };
    let client = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/ctypes_client.py");
    let output = finish(python.arg(client));
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    for rank in 0..2 {
        assert!(
            printed.contains(&format!("rank {rank}: passed")),
            "{output:?}"
        );
    }
}

/// Loads NCCL by its name and prints its version, and whether it has a function of 2.28.3, under both of
/// its names.
const ASK: &str = "import ctypes
nccl = ctypes.CDLL('libnccl.so.2')
version = ctypes.c_int()
assert nccl.ncclGetVersion(ctypes.byref(version)) == 0
print(version.value, hasattr(nccl, 'ncclAlltoAll'), hasattr(nccl, 'pncclAlltoAll'))
";

#[test]
fn the_release_is_chosen_by_the_environment() {
    let Some(mut python) = python() else { return };
    let output = finish(
        python
            .args(["-c", ASK])
            .env("NCCL_EMULATOR_VERSION", "2.27.7"),
    );
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "22707 False False\n",
        "{output:?}"
    );
}

#[test]
fn a_setting_that_makes_no_sense_ends_the_process_before_it_starts() {
    let Some(mut python) = python() else { return };
    let command = python.args(["-c", "print('went on')"]);
    let output = finish(command.env("NCCL_EMULATOR_DEVICES", "many"));
    assert_eq!(output.status.code(), Some(120), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("NCCL_EMULATOR_DEVICES"), "{told}");
}

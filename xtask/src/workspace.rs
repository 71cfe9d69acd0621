//! Paths of the workspace, and running other programs.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::Result;

/// The root of the workspace.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a directory of the workspace")
}

/// The directory of the package nccl-sys.
pub(crate) fn nccl_sys() -> PathBuf {
    root().join("nccl-sys")
}

/// The release of NCCL that nccl-sys binds: the part after the `+` in its own version.
pub(crate) fn nccl_release() -> Result<String> {
    let manifest = nccl_sys().join("Cargo.toml");
    let text = fs::read_to_string(&manifest)
        .map_err(|error| format!("cannot read {}: {error}", manifest.display()))?;
    let release = text
        .lines()
        .find_map(|line| {
            line.strip_prefix("version = \"")?
                .strip_suffix('"')?
                .split_once('+')
        })
        .map(|(_, release)| release.to_owned());
    release.ok_or_else(|| {
        format!(
            "{} should say `version = \"…+RELEASE OF NCCL\"`",
            manifest.display()
        )
        .into()
    })
}

/// The cargo that runs this program.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// Runs a command to its end. Its output goes to standard error: standard output is for the chore's result.
pub(crate) fn run(command: &mut Command) -> Result {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .status()
        .map_err(|error| format!("cannot run {program}: {error}"))?;
    if !status.success() {
        return Err(format!("{command:?} failed: {status}").into());
    }
    Ok(())
}

/// Does what [`run`] does, but stops the command after `limit`.
pub(crate) fn run_within(command: &mut Command, limit: Duration) -> Result {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .spawn()
        .map_err(|error| format!("cannot run {program}: {error}"))?;
    let end = Instant::now() + limit;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() < end => thread::sleep(Duration::from_millis(10)),
            None => {
                child.kill()?;
                child.wait()?;
                return Err(
                    format!("{command:?} has not ended after {} s", limit.as_secs()).into(),
                );
            }
        }
    };
    if !status.success() {
        return Err(format!("{command:?} failed: {status}").into());
    }
    Ok(())
}

/// The standard output of a command.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot run {program}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?} failed: {}", output.status).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The directory of cargo's builds.
pub(crate) fn target_directory() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

//! Runs a program under NVIDIA's MPS, which lets kernels of several processes run at the same time.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::gpu_check::not_tested;
use crate::raw::{Result, wait_until};
use crate::spawn::end_within;

/// The daemon.
const CONTROL: &str = "nvidia-cuda-mps-control";
/// How long the daemon may take to start, and to end.
const LIMIT: Duration = Duration::from_secs(20);

/// Runs `command` under a daemon of its own; returns the exit code.
///
/// # Errors
/// When the daemon or the command cannot be started.
pub fn run(command: &[String]) -> Result<u8> {
    let [program, arguments @ ..] = command else {
        return Err("which program?".into());
    };
    let directory = tempfile::Builder::new().prefix("mps-").tempdir()?;
    let environment = [
        ("CUDA_MPS_PIPE_DIRECTORY", directory.path().join("pipe")),
        ("CUDA_MPS_LOG_DIRECTORY", directory.path().join("log")),
    ];
    for (_, path) in &environment {
        std::fs::create_dir(path)?;
    }
    let daemon = Command::new(CONTROL)
        .arg("-f")
        .envs(environment.clone())
        .stdin(Stdio::null())
        .spawn();
    let mut daemon = match daemon {
        Ok(daemon) => daemon,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            not_tested(format_args!("{CONTROL} is not on this machine"));
            return Ok(0);
        }
        Err(error) => return Err(format!("{CONTROL}: {error}").into()),
    };
    let pipe = environment[0].1.join("control");
    let mut ended = None;
    wait_until(LIMIT, || {
        ended = daemon.try_wait().ok().flatten();
        ended.is_some() || pipe.exists()
    });
    let result = if pipe.exists() && ended.is_none() {
        Command::new(program)
            .args(arguments)
            .envs(environment.clone())
            .status()
            .map_err(|error| error.to_string())
    } else {
        Err(format!("{CONTROL} does not start"))
    };
    quit(&mut daemon, &environment)?;
    let status = result?;
    Ok(status
        .code()
        .and_then(|code| code.try_into().ok())
        .unwrap_or(1))
}

/// Asks the daemon to end, and kills it if it does not.
fn quit(daemon: &mut Child, environment: &[(&str, std::path::PathBuf)]) -> Result {
    if daemon.try_wait()?.is_none() {
        let asked = Command::new(CONTROL)
            .envs(environment.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        if let Ok(mut asked) = asked {
            if let Some(mut input) = asked.stdin.take() {
                let _ = input.write_all(b"quit\n");
            }
            end_within(&mut asked, LIMIT)?;
        }
    }
    end_within(daemon, LIMIT)?;
    Ok(())
}

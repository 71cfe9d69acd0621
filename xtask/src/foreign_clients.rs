//! `foreign-clients`: checks that NCCL's clients for Python find the emulator, and work on it.
//!
//! CuPy's `cupy.cuda.nccl` and NVIDIA's nccl4py come from the Python package index, at the versions below, into a
//! virtual environment in `.cache`. Each client is a script of two processes in `nccl-emulator/preload/clients`, with
//! the emulator preloaded. A failed download fails the chore.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::arguments::Arguments;
use crate::{Result, workspace};

/// The installed packages. Not NVIDIA's wheel of NCCL: nccl4py finds one before it asks the dynamic linker.
const PACKAGES: [&str; 5] = [
    "cupy-cuda13x==14.2.0",
    "nccl4py==0.6.0",
    "cuda-bindings==13.5.0",
    "cuda-core==1.2.2",
    "cuda-pathfinder==1.9.0",
];

/// The clients: their descriptions and their scripts.
const CLIENTS: [(&str, &str); 3] = [
    ("ctypes, by Python's own means", "ctypes_client.py"),
    ("CuPy's cupy.cuda.nccl", "cupy_client.py"),
    ("nccl4py with cuda.core", "nccl4py_client.py"),
];

/// Longer than the scripts' own limit of a minute.
const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    workspace::run(workspace::cargo().args([
        "build",
        "--quiet",
        "--release",
        "--package",
        "nccl-emulator-preload",
    ]))?;
    let emulator = workspace::target_directory().join("release/libnccl_emulator_preload.so");
    let python = environment()?;
    let clients = workspace::root().join("nccl-emulator/preload/clients");
    let mut failed = Vec::new();
    for (name, script) in CLIENTS {
        let mut command = Command::new(&python);
        command.arg("-B").arg(clients.join(script));
        for (variable, _) in env::vars_os() {
            let text = variable.to_string_lossy();
            if ["NCCL", "CUPY", "PYTHON", "CUDA"]
                .iter()
                .any(|start| text.starts_with(start))
            {
                command.env_remove(variable);
            }
        }
        let start = Instant::now();
        let outcome = workspace::run_within(command.env("LD_PRELOAD", &emulator), DEADLINE);
        let seconds = start.elapsed().as_secs_f32();
        match outcome {
            Ok(()) => println!("{name:<32} passed, {seconds:.1} s"),
            Err(error) => {
                println!("{name:<32} FAILED: {error}");
                failed.push(name);
            }
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("not served by the emulator: {}", failed.join(", ")).into())
    }
}

/// Returns the Python of the virtual environment, which is created if it is missing or has other packages.
fn environment() -> Result<PathBuf> {
    let directory = workspace::root().join(".cache").join("foreign-clients");
    let python = directory.join("bin").join("python");
    // Written last: without it the environment is not complete.
    let list = directory.join("packages.txt");
    let wanted = PACKAGES.join("\n");
    if fs::read_to_string(&list).is_ok_and(|found| found == wanted) && python.exists() {
        return Ok(python);
    }
    eprintln!(
        "installing {} in {}",
        PACKAGES.join(", "),
        directory.display()
    );
    make(&directory, &python).map_err(|error| {
        format!(
            "{error}\nNOT TESTED: the clients need Python 3.11 or newer with venv, and the packages"
        )
    })?;
    fs::write(&list, wanted)?;
    Ok(python)
}

fn make(directory: &Path, python: &Path) -> Result {
    workspace::run(
        Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(directory),
    )?;
    let mut pip = Command::new(python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ])
    .args(["--only-binary=:all:", "--no-cache-dir"])
    .args(PACKAGES);
    workspace::run(&mut pip)
}

//! `train-tiny`: trains the model of the example `inference_server` on the repository's own pages.
//!
//! A program of that package, so that building the chores needs no numeric crates.

use std::process::Stdio;

use crate::Result;
use crate::arguments::Arguments;
use crate::workspace::cargo;

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let program = ["--package", "inference-server", "--bin", "train-tiny"];
    let mut command = cargo();
    command
        .args(["run", "--quiet", "--release"])
        .args(program)
        .arg("--")
        .args(arguments.rest());
    // Uses one core, regardless of the machine, and keeps freed memory: each step needs as much as the previous one, and
    // zeroing new pages is a fifth of the time.
    command.env("RAYON_NUM_THREADS", "1");
    command.env("MALLOC_MMAP_THRESHOLD_", (1u64 << 30).to_string());
    command.env("MALLOC_TRIM_THRESHOLD_", (4u64 << 30).to_string());
    let status = command
        .stdin(Stdio::null())
        .status()
        .map_err(|error| format!("cannot run cargo: {error}"))?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("the training failed: {status}").into()),
    }
}

//! `check-candle-cuda`: checks that the CUDA part of `nccl-candle` compiles, with candle's feature `cuda`.
//!
//! That feature compiles hundreds of kernels with NVIDIA's compiler, for many minutes. None of them is needed to check
//! Rust code, so a script that makes empty files replaces that compiler. The result must never become a program: the
//! check has a target directory of its own, so that no other build finds the empty kernels.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use crate::arguments::Arguments;
use crate::{Result, workspace};

/// The replacement of `nvcc`: prints a version, in the line where cudarc looks for it, and makes the files that
/// candle's build expects, empty.
const NO_COMPILER: &str = r#"#!/bin/sh
if [ "$1" = --version ]; then
    printf 'not a compiler: makes empty files, to check Rust code without one\n\n\n'
    printf 'Cuda compilation tools, release 13.0, V13.0.0\n'
    exit
fi
directory= output= source=
while [ $# -gt 0 ]; do
    case "$1" in
    --output-directory) directory="$2"; shift ;;
    -o) output="$2"; shift ;;
    *) source="$1" ;;
    esac
    shift
done
if [ -n "$directory" ]; then : > "$directory/$(basename "$source" .cu).ptx"; fi
if [ -n "$output" ]; then : > "$output"; fi
"#;

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    let toolkit = tempfile::tempdir()?;
    let programs = toolkit.path().join("bin");
    fs::create_dir(&programs)?;
    let nvcc = programs.join("nvcc");
    fs::write(&nvcc, NO_COMPILER)?;
    fs::set_permissions(&nvcc, fs::Permissions::from_mode(0o755))?;
    let mut path: Vec<PathBuf> = vec![programs];
    path.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    workspace::run(
        workspace::cargo()
            .current_dir(workspace::root())
            .args(["clippy", "--quiet", "--package", "nccl-candle"])
            .args(["--features", "cuda", "--", "-D", "warnings"])
            .env("PATH", env::join_paths(path)?)
            .env(
                "CARGO_TARGET_DIR",
                workspace::target_directory().join("candle-cuda"),
            )
            .env("CUDA_COMPUTE_CAP", "90")
            .env_remove("NVCC")
            .env_remove("CUDARC_CUDA_VERSION"),
    )
}

//! `flight-recorder`: passes recordings of the flight recorder to PyTorch's own analyser (`torchfrtrace`).
//!
//! The analyser is pure Python, and part of PyTorch's wheel. pip downloads the smallest wheel, which is for another platform;
//! the analyser is extracted from it and kept in `.cache`. The tests are those of `tests/tools/pytorch_analyser.rs`.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::arguments::Arguments;
use crate::{Result, wheels, workspace};

/// A wheel of PyTorch: its release, its platform, and its SHA-256 as the package index states it.
struct Wheel {
    release: &'static str,
    platform: &'static str,
    sum: &'static str,
}

/// One of the first releases whose wheel has the analyser (2.10), and the newest.
const WHEELS: [Wheel; 2] = [
    Wheel {
        release: "2.11.0",
        platform: "macosx_11_0_arm64",
        sum: "4b5866312ee6e52ea625cd211dcb97d6a2cdc1131a5f15cc0d87eec948f6dd34",
    },
    Wheel {
        release: "2.15.0",
        platform: "macosx_14_0_arm64",
        sum: "593e5fd0c204284890d1c3dff643be34e549e1d24523e13402510f960d4da438",
    },
];

/// The analyser in a wheel.
const ANALYSER: &str = "torch/distributed/flight_recorder/";

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    let analysers: Vec<PathBuf> = WHEELS.iter().map(fetch).collect::<Result<_>>()?;
    workspace::run(
        workspace::cargo()
            .args(["test", "--package", "nccl-tests"])
            .args(["--test", "tools", "pytorch_analyser::"])
            .env("NCCL_TEST_PYTORCH", env::join_paths(&analysers)?),
    )?;
    for analyser in &analysers {
        eprintln!("read by {}", analyser.display());
    }
    Ok(())
}

/// The directory in which Python finds the analyser of a release, downloaded if it is missing.
fn fetch(wheel: &Wheel) -> Result<PathBuf> {
    let cache = workspace::root().join(".cache");
    let directory = cache.join(format!("torch-{}-flight-recorder", wheel.release));
    if directory.join(ANALYSER).join("fr_trace.py").is_file() {
        return Ok(directory);
    }
    eprintln!(
        "downloading the analyser of PyTorch {} to {}",
        wheel.release,
        directory.display()
    );
    let in_cache = |error| format!("cannot write to {}: {error}", cache.display());
    fs::create_dir_all(&cache).map_err(in_cache)?;
    // A directory with this name is always complete.
    let download = tempfile::tempdir_in(&cache).map_err(in_cache)?;
    let options = ["--platform", wheel.platform, "--python-version", "3.12"];
    wheels::download("torch", wheel.release, &options, download.path())?;
    let file = wheels::only_file(download.path())?;
    wheels::verify(&file, wheel.sum)?;
    let unpacked = download.path().join("unpacked");
    workspace::run(
        Command::new("python3")
            .args(["-c", UNPACK])
            .args([&file, &unpacked])
            .arg(ANALYSER),
    )?;
    if let Err(error) = fs::rename(&unpacked, &directory)
        // Another process was faster, or its copy is incomplete: this copy is complete.
        && let Err(_) = fs::remove_dir_all(&directory).and_then(|()| fs::rename(&unpacked, &directory))
    {
        return Err(format!("cannot move it to {}: {error}", directory.display()).into());
    }
    Ok(directory)
}

/// Extracts a folder of a wheel, and the wheel's terms.
const UNPACK: &str = r#"
import sys, zipfile
wheel, target, folder = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for member in archive.namelist():
        if member.startswith(folder) or ".dist-info/" in member and "licen" in member.lower():
            archive.extract(member, target)
"#;

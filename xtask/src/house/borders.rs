//! The dependencies that are allowed between crates of the workspace, and external dependencies that some must not have.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

use crate::{Result, workspace};

/// For each crate of the product, the workspace crates that it may use directly. Other crates of the workspace may use all.
const ALLOWED: &[(&str, &[&str])] = &[
    ("nccl-sys", &[]),
    ("lsa-protocol", &[]),
    ("stand-in-object", &[]),
    ("cuda-emulator", &["stand-in-object"]),
    ("nccl-plugin", &["nccl-sys", "stand-in-object"]),
    ("nccl-base", &["nccl-sys"]),
    ("nccl-control", &["nccl-base"]),
    ("nccl-control-sim", &["nccl-base", "nccl-control"]),
    ("nccl-launch", &["nccl-base", "nccl-control"]),
    ("nccl-core", &["nccl-base", "nccl-sys"]),
    ("nccl-lsa", &["lsa-protocol", "nccl-base", "nccl-core"]),
    ("nccl-moe", &["nccl-base", "nccl-core"]),
    (
        "nccl-diagnose",
        &["nccl-base", "nccl-control", "nccl-core", "nccl-sys"],
    ),
    (
        "nccl",
        &[
            "nccl-base",
            "nccl-control",
            "nccl-core",
            "nccl-diagnose",
            "nccl-launch",
            "nccl-lsa",
            "nccl-moe",
            "nccl-plugin",
            "nccl-sys",
        ],
    ),
    (
        "nccl-emulator",
        &["cuda-emulator", "lsa-protocol", "nccl-sys"],
    ),
    ("nccl-candle", &["nccl"]),
];

/// Forbidden dependencies: the control plane uses neither CUDA nor NCCL, the emulated driver no NCCL.
const UNKNOWN: &[(&str, &[&str])] = &[
    ("nccl-control", &["cudarc", "nccl-sys"]),
    ("nccl-launch", &["cudarc", "nccl-sys"]),
    ("cuda-emulator", &["nccl-sys"]),
];

/// The most packages that `nccl` may pull in without its default features, including itself: NCCL in a single process.
const MOST_OF_CORE: usize = 34;

/// Returns the packages of the table.
pub(super) fn packages() -> impl Iterator<Item = &'static str> {
    ALLOWED.iter().map(|(package, _)| *package)
}

/// Fails for every dependency that is not allowed, and every crate that is in no table.
pub(crate) fn check() -> Result {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version=1", "--offline"])
        .current_dir(workspace::root())
        .output()?;
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().ok_or("no packages")?;
    let ours: BTreeSet<&str> = packages
        .iter()
        .filter_map(|package| package["name"].as_str())
        .collect();
    let mut wrong = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let directory = package["manifest_path"].as_str().unwrap_or_default();
        let allowed = ALLOWED.iter().find(|(known, _)| *known == name);
        let unknown = UNKNOWN.iter().find(|(known, _)| *known == name);
        if allowed.is_none() && directory.contains("/crates/") {
            wrong.push(format!(
                "{name} is in no table of xtask/src/house/borders.rs"
            ));
        }
        // Dependencies of tests and build scripts are not part of a user's build.
        let used = package["dependencies"].as_array().into_iter().flatten();
        let used = used.filter(|dependency| dependency["kind"].is_null());
        for used in used.filter_map(|dependency| dependency["name"].as_str()) {
            let is_allowed = allowed.is_none_or(|(_, allowed)| allowed.contains(&used));
            if ours.contains(used) && !is_allowed {
                wrong.push(format!("{name} may not use {used}"));
            }
            if unknown.is_some_and(|(_, unknown)| unknown.contains(&used)) {
                wrong.push(format!("{name} is to know nothing of {used}"));
            }
        }
    }
    let core = packages_of_core()?;
    println!("packages of nccl without its default features: {core}");
    if core > MOST_OF_CORE {
        wrong.push(format!(
            "nccl without its default features is {core} packages, and may be {MOST_OF_CORE}"
        ));
    }
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(wrong.join("\n").into()),
    }
}

/// Returns the number of packages of a program that uses `nccl` without its default features.
fn packages_of_core() -> Result<usize> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--package=nccl", "--no-default-features"])
        .args([
            "--edges=normal",
            "--prefix=none",
            "--no-dedupe",
            "--offline",
        ])
        .current_dir(workspace::root())
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let text = String::from_utf8(output.stdout)?;
    let packages: BTreeSet<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    Ok(packages.len())
}

#[cfg(test)]
mod tests {
    #[test]
    fn crates_use_those_that_they_may() {
        super::check().unwrap_or_else(|error| panic!("{error}"));
    }
}

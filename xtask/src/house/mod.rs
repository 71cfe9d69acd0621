//! `cargo xtask house`: how the crates are built inside, as numbers. Run on another tree, it tells what has changed since.
//!
//! - `sources`: the files, their modules, and what in them is neither test nor comment;
//! - `graph`: which file uses which, and what is tied in circles.

mod graph;
mod sources;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::arguments::Arguments;
use crate::{Result, workspace};

/// The crates that are counted: the product, without tools, examples and tests.
const CRATES: &[&str] = &[
    "nccl-sys",
    "nccl",
    "crates/nccl-core",
    "crates/nccl-moe",
    "crates/nccl-control",
    "crates/nccl-launch",
    "crates/nccl-diagnose",
    "crates/cuda-emulator",
    "nccl-emulator",
    "nccl-candle",
];

/// Types whose methods are to be in few files.
const OWNERS: &[&str] = &["Communicator", "Inner", "World"];

/// Prints the numbers of this workspace, or of the one at `--tree DIRECTORY`.
pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let tree: Option<PathBuf> = arguments.path("--tree")?;
    arguments.finish()?;
    let root = tree.unwrap_or_else(|| workspace::root().to_owned());
    println!(
        "| crate | files | lines of code | rooms | largest knot of rooms | circles of files | largest circle |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|");
    let mut owners: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut code = 0;
    for name in CRATES {
        let directory = root.join(name).join("src");
        if !directory.join("lib.rs").is_file() {
            continue;
        }
        let sources = sources::read(&directory)?;
        let graph = graph::of(&sources);
        let lines: usize = sources.files.iter().map(|file| file.code).sum();
        code += lines;
        let knots = graph.rooms_in_knots();
        let circles = graph.circles();
        let largest = |sizes: &[Vec<String>]| sizes.iter().map(Vec::len).max().unwrap_or(1);
        println!(
            "| {name} | {} | {lines} | {} | {} | {} | {} |",
            sources.files.len(),
            graph.rooms(),
            largest(&knots),
            circles.len(),
            largest(&circles),
        );
        for file in &sources.files {
            for &owner in OWNERS {
                if file.inherent.contains(owner) {
                    let path = format!("{name}/src/{}", file.path);
                    owners.entry(owner).or_default().insert(path);
                }
            }
        }
    }
    println!("\nlines of code in all: {code}");
    for (owner, files) in owners {
        println!("files with an `impl {owner}`: {}", files.len());
    }
    Ok(())
}

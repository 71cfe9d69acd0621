//! `cargo xtask house`: the structure of the crates, in numbers. Run on another tree, it shows the changes since then.
//!
//! - `sources`: the files, their modules, and their code without tests and comments;
//! - `graph`: which file uses which, and cycles;
//! - `borders`: which crate may use which;
//! - `targets`: checks that Cargo knows each test and each benchmark.

mod borders;
mod graph;
mod sources;
mod targets;

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::arguments::Arguments;
use crate::{Result, workspace};

/// The crates that are counted: the product, without tools, examples and tests.
const CRATES: &[&str] = &[
    "nccl-sys",
    "nccl",
    "crates/lsa-protocol",
    "crates/nccl-base",
    "crates/nccl-core",
    "crates/nccl-lsa",
    "crates/nccl-moe",
    "crates/nccl-control",
    "crates/nccl-launch",
    "crates/nccl-diagnose",
    "crates/cuda-emulator",
    "nccl-emulator",
    "nccl-candle",
];

/// Types whose methods should be in few files: their crates, and paths to them.
const OWNERS: &[(&str, &str)] = &[
    ("nccl", "Communicator"),
    ("crates/nccl-core", "Communicator"),
    ("nccl", "communicator::Inner"),
    ("crates/nccl-core", "communicator::Inner"),
    ("nccl", "World"),
];

/// The most files with methods of a `Communicator`.
const MOST_FILES_OF_COMMUNICATOR: usize = 8;

/// The most circles of files in all crates together, and the most files in one of them. No rooms may be in a cycle.
const MOST_CIRCLES: usize = 4;
const LARGEST_CIRCLE: usize = 6;

/// Prints the numbers of this workspace, or of the one at `--tree DIRECTORY`; with `--circles` also which file of a
/// cycle uses which, one line for each, and which files tie a cycle of rooms.
///
/// Fails in this workspace if the borders between crates are crossed, rooms of a crate use each other in a cycle, there are too
/// many circles of files, or the methods of a communicator are in too many files.
pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let tree: Option<PathBuf> = arguments.path("--tree")?;
    let lists_circles = arguments.flag("--circles");
    arguments.finish()?;
    if tree.is_none() {
        borders::check()?;
        targets::check()?;
    }
    let is_own = tree.is_none();
    let root = tree.unwrap_or_else(|| workspace::root().to_owned());
    println!(
        "| crate | files | lines of code | rooms | largest knot of rooms | circles of files | largest circle |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|");
    let mut owners: BTreeMap<&str, usize> = BTreeMap::new();
    let mut code = 0;
    let (mut all_circles, mut all_knots) = (Vec::new(), Vec::new());
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
        if lists_circles {
            for (from, to) in graph.ties() {
                println!("  {name}: {from} uses {to}");
            }
            for (from, to) in graph.room_ties() {
                println!("  {name}, between rooms: {from} uses {to}");
            }
        }
        let of_crate = |names: Vec<String>| (name, names);
        all_circles.extend(circles.into_iter().map(of_crate));
        all_knots.extend(knots.into_iter().map(of_crate));
        let modules = graph::Modules::of(&sources);
        for &(_, owner) in OWNERS.iter().filter(|(of, _)| of == name) {
            let path: Vec<String> = owner.split("::").map(str::to_owned).collect();
            let defined = modules.resolve(&path);
            let has_methods = |file: &&sources::File| {
                let mut types = file.inherent.iter();
                defined.is_some() && types.any(|path| modules.resolve(path) == defined)
            };
            let count = sources.files.iter().filter(has_methods).count();
            *owners.entry(owner).or_default() += count;
        }
    }
    println!("\nlines of code in all: {code}");
    for (owner, files) in &owners {
        println!("files with an `impl {owner}`: {files}");
    }
    if is_own
        && owners
            .get("Communicator")
            .is_some_and(|&files| files > MOST_FILES_OF_COMMUNICATOR)
    {
        return Err(format!(
            "the methods of a `Communicator` may be in {MOST_FILES_OF_COMMUNICATOR} files: `communicator.rs` of a room has the \
             public ones"
        )
        .into());
    }
    if is_own && !all_knots.is_empty() {
        return Err(format!(
            "top-level modules use each other in a cycle: {all_knots:?}; `cargo xtask house --circles` lists the uses"
        )
        .into());
    }
    let is_large = |(_, circle): &(&&str, Vec<String>)| circle.len() > LARGEST_CIRCLE;
    if is_own && (all_circles.len() > MOST_CIRCLES || all_circles.iter().any(is_large)) {
        return Err(format!(
            "all crates together may have {MOST_CIRCLES} cycles of at most {LARGEST_CIRCLE} files each, and have {all_circles:?}; \
             `cargo xtask house --circles` lists the uses"
        )
        .into());
    }
    Ok(())
}

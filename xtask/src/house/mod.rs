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
use std::path::{Path, PathBuf};

use crate::arguments::Arguments;
use crate::{Result, workspace};

/// The crates that are counted: the product, without tools, examples and tests.
pub(crate) const CRATES: &[&str] = &[
    "nccl-sys",
    "nccl",
    "crates/lsa-protocol",
    "crates/stand-in-object",
    "crates/nccl-plugin",
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

/// Packages with a row in the table of [`borders`] that are not counted: a simulator for tests.
const NOT_COUNTED: &[&str] = &["nccl-control-sim"];

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
/// Fails in this workspace if the borders between crates are crossed, a crate is missing or is not counted, rooms of a crate
/// use each other in a cycle, there are too many circles of files, or the methods of a communicator are in too many files.
pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let tree: Option<PathBuf> = arguments.path("--tree")?;
    let lists_circles = arguments.flag("--circles");
    arguments.finish()?;
    if tree.is_none() {
        borders::check()?;
        targets::check()?;
        let missing = uncounted(borders::packages());
        if !missing.is_empty() {
            return Err(format!("CRATES in xtask/src/house/mod.rs lacks {missing:?}").into());
        }
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
        let Some(directory) = sources_of(&root, name, is_own)? else {
            continue;
        };
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

/// Returns the directory of a crate's sources. Another tree may lack a crate that this one has.
fn sources_of(root: &Path, name: &str, is_own: bool) -> Result<Option<PathBuf>> {
    let directory = root.join(name).join("src");
    match directory.join("lib.rs").is_file() {
        true => Ok(Some(directory)),
        false if is_own => {
            Err(format!("there is no {}", directory.join("lib.rs").display()).into())
        }
        false => Ok(None),
    }
}

/// Returns the package of a path of [`CRATES`].
pub(crate) fn package_of(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

/// Returns those of the packages that are neither in [`CRATES`] nor in [`NOT_COUNTED`].
fn uncounted<'a>(packages: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let is_counted = |package: &str| CRATES.iter().any(|path| package_of(path) == package);
    let mut packages: Vec<&str> = packages.into_iter().collect();
    packages.retain(|package| !NOT_COUNTED.contains(package) && !is_counted(package));
    packages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crate_with_a_row_in_the_table_of_borders_is_counted() {
        assert_eq!(uncounted(borders::packages()), [""; 0]);
        assert_eq!(uncounted(["nccl", "absent"]), ["absent"]);
    }

    #[test]
    fn a_crate_that_is_listed_is_there_and_may_be_missing_in_another_tree() {
        for name in CRATES {
            let found = sources_of(workspace::root(), name, true).unwrap();
            assert!(found.is_some(), "{name}");
        }
        let root = workspace::root();
        let error = sources_of(root, "crates/absent", true).unwrap_err();
        assert!(
            error.to_string().contains("crates/absent/src/lib.rs"),
            "{error}"
        );
        assert_eq!(sources_of(root, "crates/absent", false).unwrap(), None);
    }
}

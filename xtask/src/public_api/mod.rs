//! `public-api`: the public items of the library crates, compared with `docs/results/public_api/CRATE.txt`.
//!
//! A line is a path by which users name an item, with its signature, as `cargo public-api` prints it. The list is
//! sorted and has each line once. It covers the default features, without `doc(hidden)` items, without blanket
//! implementations, and without implementations of marker traits that stable Rust cannot name.
//!
//! The crate `public-api` makes the lines from rustdoc's JSON. Of an item from another crate it only knows the name. So this
//! chore also documents the workspace crates that a listed crate depends on, and joins their JSON into one ([`joined`]). An
//! item that moves to such a crate, and is re-exported in its old place, keeps its lines:
//!
//! - A re-export of an item, a module or `*` from a crate of the workspace is resolved, through any number of crates:
//!   the item and its methods, fields and implementations are listed under the public path.
//! - A signature names a type by its shortest public path in the listed crate, else by that in the first of [`LISTED`]
//!   that has one, and never by the module that defines it. A type without a public path has its name alone.
//! - A whole crate that is itself listed (`pub use nccl`) is one line: its own list has the rest.
//!
//! Not resolved: an item below a `doc(hidden)` module of another crate is not in the JSON, and its re-export is a line
//! without methods. The same holds for items of crates outside the workspace.
//!
//! Beside the lines, the chore prints the number of items ([`count`]).
//!
//! `nccl-sys` is listed with its bindings, which are a few hundred lines.

mod count;
mod document;
mod joined;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::arguments::Arguments;
use crate::{Result, workspace};

use document::Documented;

/// The packages with a list, in the order of preference for the path of a type that has several.
const LISTED: &[&str] = &[
    "nccl",
    "nccl-sys",
    "cuda-emulator",
    "nccl-emulator",
    "nccl-candle",
];

/// The directory of the lists, from the root of the workspace.
const DIRECTORY: &str = "docs/results/public_api";

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let write = arguments.flag("--write");
    arguments.finish()?;
    let scratch = workspace::target_directory().join("public-api");
    fs::create_dir_all(&scratch)
        .map_err(|error| format!("cannot write to {}: {error}", scratch.display()))?;
    let packages = document::packages()?;
    let documented = LISTED
        .iter()
        .map(|package| document::document(&packages, package, LISTED, &scratch))
        .collect::<Result<Vec<_>>>()?;
    let mut differences = String::new();
    for (package, own) in LISTED.iter().zip(&documented) {
        let needs = document::closure(&packages, package)?;
        let others: Vec<&Documented> = LISTED
            .iter()
            .zip(&documented)
            .filter(|(other, _)| *other != package && needs.contains(**other))
            .map(|(_, documented)| documented)
            .collect();
        let json = joined::join(own, &others)?;
        let lines = lines(&json, &scratch.join(format!("{package}.json")))?;
        let file = workspace::root()
            .join(DIRECTORY)
            .join(format!("{package}.txt"));
        if write {
            write_list(&file, &lines)?;
        } else {
            differences += &compare(&file, &lines)?;
        }
        println!(
            "{package:<14} {:>5} lines, {:>4} items",
            lines.len(),
            count::items(&json)
        );
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the public API differs from {DIRECTORY}; if that is meant, `cargo xtask public-api --write` writes it \
         there:\n{differences}"
    )
    .into())
}

/// Returns the lines of a crate; writes the joined JSON to `file`.
fn lines(json: &Value, file: &Path) -> Result<BTreeSet<String>> {
    fs::write(file, json.to_string())
        .map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    let api = public_api::Builder::from_rustdoc_json(file)
        .omit_blanket_impls(true)
        .build()
        .map_err(|error| format!("cannot list the items of {}: {error}", file.display()))?;
    Ok(api.items().map(ToString::to_string).collect())
}

fn write_list(file: &Path, lines: &BTreeSet<String>) -> Result {
    let directory = file.parent().map(PathBuf::from).unwrap_or_default();
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::create_dir_all(directory)
        .and_then(|()| fs::write(file, text))
        .map_err(|error| format!("cannot write {}: {error}", file.display()).into())
}

fn compare(file: &Path, lines: &BTreeSet<String>) -> Result<String> {
    let text = fs::read_to_string(file).map_err(|error| {
        format!(
            "cannot read {}: {error}: `cargo xtask public-api --write` writes it",
            file.display()
        )
    })?;
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    Ok(differences(&name, &text, lines))
}

/// Returns the lines that are only in `written`, after a `-`, and those that are only in `lines`, after a `+`; empty if there
/// are none.
fn differences(name: &str, written: &str, lines: &BTreeSet<String>) -> String {
    let written: BTreeSet<&str> = written.lines().collect();
    let lines: BTreeSet<&str> = lines.iter().map(String::as_str).collect();
    let removed: Vec<&str> = written.difference(&lines).copied().collect();
    let added: Vec<&str> = lines.difference(&written).copied().collect();
    if removed.is_empty() && added.is_empty() {
        return String::new();
    }
    let mut text = format!("{name}: {} removed, {} added\n", removed.len(), added.len());
    for line in removed {
        text += &format!("- {line}\n");
    }
    for line in added {
        text += &format!("+ {line}\n");
    }
    text
}

#[cfg(test)]
mod tests;

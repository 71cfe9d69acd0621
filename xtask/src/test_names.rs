//! `test-names`: compares the names of all tests with `docs/results/test_names.txt`, so that a test that is lost when a file
//! moves, or because a module is no longer declared, does not go unnoticed.
//!
//! A line is a package, a target and a test. Documentation tests are not listed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::arguments::Arguments;
use crate::{Result, workspace};

/// The list, from the root of the workspace.
const LIST: &str = "docs/results/test_names.txt";

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let write = arguments.flag("--write");
    arguments.finish()?;
    let found = found()?;
    let list = workspace::root().join(LIST);
    let in_list = |error| format!("{}: {error}", list.display());
    if write {
        let text: String = found.iter().map(|line| format!("{line}\n")).collect();
        fs::write(&list, text).map_err(in_list)?;
    } else {
        let text = fs::read_to_string(&list).map_err(in_list)?;
        compare(&text.lines().map(str::to_owned).collect(), &found)?;
    }
    println!("{} tests", found.len());
    Ok(())
}

/// Lists the tests of each test binary of the workspace, built as for `cargo test --workspace`.
fn found() -> Result<BTreeSet<String>> {
    let mut command = workspace::cargo();
    command.args(["test", "--workspace", "--no-run"]);
    command.arg("--message-format=json-render-diagnostics");
    let messages = workspace::output(&mut command)?;
    let messages = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut names = BTreeSet::new();
    for message in messages {
        let Some(executable) = message["executable"].as_str() else {
            continue;
        };
        if message["profile"]["test"] != true {
            continue;
        }
        let manifest = PathBuf::from(message["manifest_path"].as_str().unwrap_or_default());
        let directory = manifest.parent().unwrap_or(Path::new(""));
        let package = package(message["package_id"].as_str().unwrap_or_default());
        let target = message["target"]["name"].as_str().unwrap_or_default();
        let mut list = Command::new(executable);
        list.args(["--list", "--format", "terse"])
            .current_dir(directory);
        let said = workspace::output(&mut list)?;
        let tests = said.lines().filter_map(|line| line.strip_suffix(": test"));
        names.extend(tests.map(|test| format!("{package} {target} {test}")));
    }
    Ok(names)
}

/// Returns the package name in `path+file:///…/directory#name@version`, or `…/name#version`.
fn package(id: &str) -> &str {
    let (path, fragment) = id.rsplit_once('#').unwrap_or((id, ""));
    match fragment.split_once('@') {
        Some((name, _)) => name,
        None => path.rsplit_once('/').map_or(path, |(_, name)| name),
    }
}

fn compare(listed: &BTreeSet<String>, found: &BTreeSet<String>) -> Result {
    let mut text = String::new();
    for name in listed.difference(found) {
        text += &format!("\nthere is no test {name}");
    }
    for name in found.difference(listed) {
        text += &format!("\nnew: {name}");
    }
    match text.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "the tests are not those of {LIST}; if that is meant, run `cargo xtask test-names --write`:{text}"
        )
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(lines: &[&str]) -> BTreeSet<String> {
        lines.iter().map(|&line| line.to_owned()).collect()
    }

    #[test]
    fn a_test_that_is_gone_and_one_that_is_new_are_named() {
        let listed = set(&["a lib one", "a lib two"]);
        assert!(compare(&listed, &listed).is_ok());
        let error = compare(&listed, &set(&["a lib two", "a lib three"])).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("there is no test a lib one\n"), "{error}");
        assert!(error.contains("new: a lib three") && error.contains("--write"));
        assert!(!error.contains("a lib two"));
    }

    #[test]
    fn a_package_has_its_name_whether_or_not_its_directory_has_another() {
        assert_eq!(package("path+file:///work/nccl#0.1.0"), "nccl");
        assert_eq!(
            package("path+file:///work/tests#nccl-tests@0.1.0"),
            "nccl-tests"
        );
        assert_eq!(
            package("path+file:///work/nccl-sys#0.1.0+2.32.3"),
            "nccl-sys"
        );
    }
}

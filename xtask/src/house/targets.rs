//! The files of `tests/` and `benches/` that must be named in the manifest beside them: Cargo finds tests and benchmarks
//! automatically only in folders with these names within a package. Also checks the files of test binaries with many files: the
//! compiler does not report a file that no module declares.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::test_files::modules;
use crate::{Result, workspace};

const FOLDERS: [&str; 2] = ["tests", "benches"];

/// Fails for every file that is not a target, and so would never run.
pub(crate) fn check() -> Result {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version=1", "--offline"])
        .current_dir(workspace::root())
        .output()?;
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().ok_or("no packages")?;
    let targets = packages
        .iter()
        .flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let known: BTreeSet<PathBuf> = targets
        .filter_map(|target| target["src_path"].as_str().map(PathBuf::from))
        .collect();
    let mut unknown = Vec::new();
    for folder in FOLDERS {
        let files = files(&workspace::root().join(folder))?;
        unknown.extend(files.into_iter().filter(|file| !known.contains(file)));
    }
    for main in known.iter().filter(|file| file.ends_with("main.rs")) {
        let folder = main.parent().ok_or("a file without a folder")?;
        if folder.starts_with(workspace::root().join("tests")) {
            unknown.extend(unnamed(folder, &std::fs::read_to_string(main)?)?);
        }
    }
    match unknown.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "no target of the manifest beside them, or no module of the main.rs: {unknown:?}"
        )
        .into()),
    }
}

/// Returns the files and folders of a binary that its `main.rs` does not declare as modules.
fn unnamed(folder: &Path, main: &str) -> Result<Vec<PathBuf>> {
    let modules = modules(main);
    let mut unnamed = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        if (is_source && name != "main" || path.join("mod.rs").is_file())
            && !modules.iter().any(|module| **module == name)
        {
            unnamed.push(path);
        }
    }
    Ok(unnamed)
}

/// The files and the folders with a `main.rs`, as Cargo finds them.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let main = path.join("main.rs");
        if main.is_file() {
            files.push(main);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_test_and_every_benchmark_is_a_target() {
        check().unwrap_or_else(|error| panic!("{error}"));
    }

    #[test]
    fn a_file_that_no_module_names_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(path("several")).unwrap();
        std::fs::create_dir_all(path("other")).unwrap();
        for name in ["main.rs", "one.rs", "two.rs", "several/mod.rs", "data.json"] {
            std::fs::write(path(name), "").unwrap();
        }
        let missing = unnamed(folder.path(), "mod one;\nmod several;\n").unwrap();
        assert_eq!(missing, [path("two.rs")]);
    }

    #[test]
    fn files_and_folders_with_a_main_file_are_found_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(path("several")).unwrap();
        std::fs::create_dir_all(path("support")).unwrap();
        for name in ["one.rs", "several/main.rs", "support/mod.rs", "Cargo.toml"] {
            std::fs::write(path(name), "").unwrap();
        }
        let found: BTreeSet<_> = files(folder.path()).unwrap().into_iter().collect();
        assert_eq!(
            found,
            BTreeSet::from([path("one.rs"), path("several/main.rs")])
        );
    }
}

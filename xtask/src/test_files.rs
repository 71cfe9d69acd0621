//! The test files of some packages: test binaries, and the modules of test binaries with many files. Chores select tests by
//! these files.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::{Result, workspace};

/// The package with binaries that consist of many files, and the names of these binaries.
const MERGED: (&str, [&str; 3]) = ("nccl-tests", ["api", "failures", "tools"]);

/// A file of tests.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TestFile {
    pub(crate) package: String,
    /// The binary.
    pub(crate) target: String,
    /// The module, for a binary with many files.
    pub(crate) module: Option<String>,
}

impl TestFile {
    /// Returns the name of the file: that of the module, if it is one.
    pub(crate) fn name(&self) -> &str {
        self.module.as_deref().unwrap_or(&self.target)
    }

    /// Returns the prefix of the names of the file's tests within the binary.
    pub(crate) fn prefix(&self) -> String {
        let module = self.module.as_deref();
        module.map_or_else(String::new, |module| format!("{module}::"))
    }
}

/// The files of tests of these packages, in the order of Cargo's metadata.
pub(crate) fn of_packages(packages: &[&str]) -> Result<Vec<TestFile>> {
    let mut command = workspace::cargo();
    command.args(["metadata", "--no-deps", "--format-version", "1"]);
    let metadata: Value = serde_json::from_str(&workspace::output(&mut command)?)?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut files = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = text(&package["name"]);
        if !packages.contains(&&*name) {
            continue;
        }
        for target in package["targets"].as_array().into_iter().flatten() {
            if target["kind"][0] == "test" {
                let path = text(&target["src_path"]);
                files.extend(of_target(&name, &text(&target["name"]), Path::new(&path))?);
            }
        }
    }
    Ok(files)
}

fn of_target(package: &str, target: &str, path: &Path) -> Result<Vec<TestFile>> {
    let file = |module| TestFile {
        package: package.to_owned(),
        target: target.to_owned(),
        module,
    };
    if package != MERGED.0 || !MERGED.1.contains(&target) {
        return Ok(vec![file(None)]);
    }
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let modules = modules(&text);
    Ok(modules
        .into_iter()
        .map(|module| file(Some(module)))
        .collect())
}

/// Returns the modules in a binary's own folder; modules from elsewhere, by `#[path]`, are helpers.
pub(crate) fn modules(main: &str) -> Vec<String> {
    let mut before = "";
    let mut modules = Vec::new();
    for line in main.lines() {
        let module = line
            .strip_prefix("mod ")
            .and_then(|rest| rest.strip_suffix(';'));
        if let Some(module) = module
            && !before.starts_with("#[path")
        {
            modules.push(module.to_owned());
        }
        before = line;
    }
    modules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binary_of_many_files_has_each_of_them_and_no_helper() {
        let main = "#[path = \"../support/mod.rs\"]\nmod support;\n\nmod plans;\nmod splits;\n";
        assert_eq!(modules(main), ["plans", "splits"]);
    }

    #[test]
    fn files_have_the_names_of_their_modules() {
        let all = of_packages(&["nccl-tests", "inference-server"]).unwrap();
        let named = |name: &str| all.iter().find(|file| file.name() == name).unwrap();
        let plans = named("plans");
        assert_eq!((&*plans.target, &*plans.prefix()), ("api", "plans::"));
        let alone = named("fault_matrix");
        assert_eq!((&*alone.target, &*alone.prefix()), ("fault_matrix", ""));
        assert!(all.iter().any(|file| file.package == "inference-server"));
        assert!(!all.iter().any(|file| file.name() == "support"));
    }
}

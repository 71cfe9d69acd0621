//! rustdoc's JSON of a package and of the workspace crates that it consists of.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{Result, workspace};

/// The format version that the crate `public-api` reads, which depends on its release.
const FORMAT: u64 = 57;

/// A crate's JSON.
pub(super) struct Json {
    pub(super) value: Value,
    /// Whether it has a list of its own.
    pub(super) is_listed: bool,
}

/// A listed package with the unlisted crates that it depends on, and the features that it requests of them.
pub(super) struct Documented {
    pub(super) own: Json,
    pub(super) parts: Vec<Json>,
}

/// A package of the workspace with a library.
pub(super) struct Package {
    /// The name of the library's crate.
    library: String,
    dependencies: Vec<String>,
}

/// Returns the packages of the workspace that have a library, by name.
pub(super) fn packages() -> Result<BTreeMap<String, Package>> {
    let metadata = workspace::output(workspace::cargo().args([
        "metadata",
        "--no-deps",
        "--format-version=1",
    ]))?;
    Ok(packages_of(&serde_json::from_str(&metadata)?))
}

fn packages_of(metadata: &Value) -> BTreeMap<String, Package> {
    let package = |package: &Value| {
        let is_library = |target: &&Value| list(&target["kind"]).iter().any(|kind| kind == "lib");
        let library = list(&package["targets"]).iter().find(is_library)?;
        let is_used =
            |dependency: &&Value| dependency["kind"].is_null() && dependency["path"].is_string();
        let dependencies = list(&package["dependencies"]).iter().filter(is_used);
        let made = Package {
            library: text(&library["name"]).replace('-', "_"),
            dependencies: dependencies.map(|one| text(&one["name"])).collect(),
        };
        Some((text(&package["name"]), made))
    };
    list(&metadata["packages"])
        .iter()
        .filter_map(package)
        .collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Returns the packages of the workspace that a package depends on, directly or indirectly.
pub(super) fn closure(
    packages: &BTreeMap<String, Package>,
    package: &str,
) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut left = vec![package.to_owned()];
    while let Some(name) = left.pop() {
        let package = packages
            .get(&name)
            .ok_or_else(|| format!("the workspace has no package `{name}` with a library"))?;
        for dependency in &package.dependencies {
            if packages.contains_key(dependency) && found.insert(dependency.clone()) {
                left.push(dependency.clone());
            }
        }
    }
    Ok(found)
}

/// Documents `package` and the packages that it depends on and that are not `listed`.
pub(super) fn document(
    packages: &BTreeMap<String, Package>,
    package: &str,
    listed: &[&str],
    scratch: &Path,
) -> Result<Documented> {
    let mut names = vec![package.to_owned()];
    let needed = closure(packages, package)?;
    names.extend(
        needed
            .into_iter()
            .filter(|name| !listed.contains(&name.as_str())),
    );
    // Reuses builds of other chores, but keeps the JSON apart from the pages of `cargo doc`.
    let target = scratch.join(package);
    let mut cargo = workspace::cargo();
    cargo
        .args(["doc", "--quiet", "--no-deps", "--lib"])
        .args(names.iter().map(|name| format!("--package={name}")))
        .env("CARGO_BUILD_BUILD_DIR", workspace::target_directory())
        .env("CARGO_TARGET_DIR", &target)
        .env("RUSTDOC", rustdoc(scratch)?)
        .env("RUSTDOCFLAGS", "-Zunstable-options --output-format=json");
    workspace::run(&mut cargo)?;
    let mut made = names.iter().map(|name| {
        let file = target
            .join("doc")
            .join(format!("{}.json", packages[name].library));
        read(&file, listed.contains(&name.as_str()))
    });
    let own = made.next().ok_or("no package to document")??;
    let parts = made.collect::<Result<_>>()?;
    Ok(Documented { own, parts })
}

/// Returns a rustdoc that accepts unstable flags. If the variable for that were set for a whole build, cargo would rerun build
/// scripts and rebuild their dependents.
fn rustdoc(scratch: &Path) -> Result<PathBuf> {
    let script = scratch.join("rustdoc");
    let program = env::var("RUSTDOC").unwrap_or_else(|_| "rustdoc".to_owned());
    let text = format!("#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec '{program}' \"$@\"\n");
    fs::write(&script, text)
        .and_then(|()| fs::set_permissions(&script, fs::Permissions::from_mode(0o755)))
        .map_err(|error| format!("cannot write {}: {error}", script.display()))?;
    Ok(script)
}

/// Reads a file that rustdoc has written.
pub(super) fn read(file: &Path, is_listed: bool) -> Result<Json> {
    let text = fs::read_to_string(file)
        .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let value: Value = serde_json::from_str(&text)
        .map_err(|error| format!("{} is not JSON: {error}", file.display()))?;
    check_format(&value)?;
    Ok(Json { value, is_listed })
}

fn check_format(json: &Value) -> Result {
    match json["format_version"].as_u64() {
        Some(FORMAT) => Ok(()),
        format => Err(format!(
            "this rustdoc writes JSON of format {}, and the crate public-api in Cargo.toml reads {FORMAT}: take the \
             release of public-api that reads it, and set FORMAT in {}",
            format.map_or("unknown".to_owned(), |format| format.to_string()),
            file!()
        )
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_package_needs_the_libraries_of_the_workspace_that_its_dependencies_need() {
        let package = |name: &str, kind: &str, dependencies: Value| {
            json!({
                "name": name,
                "targets": [{ "kind": [kind], "name": name }],
                "dependencies": dependencies,
            })
        };
        let on = |name: &str, kind: Value| json!({ "name": name, "kind": kind, "path": "/here" });
        let packages = packages_of(&json!({ "packages": [
            package("top", "lib", json!([on("middle", Value::Null), on("tests", json!("dev"))])),
            package("middle", "lib", json!([
                on("low-core", Value::Null),
                { "name": "libc", "kind": null, "path": null },
            ])),
            package("low-core", "lib", json!([])),
            package("tests", "lib", json!([])),
            package("program", "bin", json!([])),
        ] }));
        let needed: Vec<_> = closure(&packages, "top").unwrap().into_iter().collect();
        assert_eq!(needed, ["low-core", "middle"]);
        assert_eq!(packages["low-core"].library, "low_core");
        assert!(closure(&packages, "program").is_err());
    }

    #[test]
    fn another_format_is_refused_with_both_numbers() {
        check_format(&json!({ "format_version": FORMAT })).unwrap();
        let error = check_format(&json!({ "format_version": 99 })).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("99") && error.contains("57"), "{error}");
    }
}

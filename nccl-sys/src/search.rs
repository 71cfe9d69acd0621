//! The places where NCCL is searched for when no library was named.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::Origin;

/// Files in a directory `lib`, in the order of preference: wheels and the runtime packages of
/// distributions have only the first.
const FILES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The file of NVIDIA's wheels, below `site-packages`.
const IN_SITE_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// A place to try.
#[derive(Debug, PartialEq)]
pub(crate) struct Place {
    /// A file, or a name for the linker to search.
    pub(crate) file: PathBuf,
    /// Why it is tried.
    pub(crate) origin: Origin,
}

/// Returns all places, in order.
pub(crate) fn places(pip_layout: bool) -> Vec<Place> {
    let place = |origin| move |file: PathBuf| Place { file, origin };
    let mut places: Vec<Place> = FILES
        .iter()
        .map(PathBuf::from)
        .map(place(Origin::LinkerPath))
        .collect();
    if let Some(home) = variable("NCCL_HOME") {
        places.extend(
            FILES
                .iter()
                .map(|file| home.join("lib").join(file))
                .map(place(Origin::NcclHome)),
        );
    }
    if pip_layout {
        places.extend(
            wheels_with(IN_SITE_PACKAGES)
                .into_iter()
                .map(place(Origin::Pip)),
        );
    }
    places
}

/// Returns an environment variable that holds a path; an empty one counts as not set.
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// Returns where `file` of a wheel would be in the Python packages of this machine; see [`wheels`].
pub(crate) fn wheels_with(file: &str) -> Vec<PathBuf> {
    wheels(file, &python_prefixes(), &python_path())
}

/// Returns where `wanted` of a wheel would be below each of `prefixes` (`PREFIX/lib/python3.12/site-packages/…`) and in
/// each of `directories`, newest Python first. Without any Python, one path with a `*`
/// stands for all, so that an error can show what was searched for.
fn wheels(wanted: &str, prefixes: &[PathBuf], directories: &[PathBuf]) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    let mut add = |file: PathBuf| {
        if !found.contains(&file) {
            found.push(file);
        }
    };
    for directory in directories {
        add(directory.join(wanted));
    }
    for prefix in prefixes {
        let mut any = false;
        for python in pythons(prefix) {
            for packages in ["site-packages", "dist-packages"] {
                let packages = python.join(packages);
                if packages.is_dir() {
                    any = true;
                    add(packages.join(wanted));
                }
            }
        }
        if !any {
            add(prefix.join("lib/python3*/site-packages").join(wanted));
        }
    }
    found
}

/// Returns the directories `PREFIX/lib/python3*`, newest first.
fn pythons(prefix: &Path) -> Vec<PathBuf> {
    let mut pythons = Vec::new();
    for library in ["lib", "lib64"] {
        for entry in fs::read_dir(prefix.join(library))
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            let minor = name.to_str().and_then(|name| name.strip_prefix("python3"));
            if let Some(minor) = minor {
                let minor: u32 = minor.trim_start_matches('.').parse().unwrap_or(0);
                pythons.push((minor, entry.path()));
            }
        }
    }
    pythons.sort_by(|a, b| b.cmp(a));
    pythons.into_iter().map(|(_, path)| path).collect()
}

/// Returns where Python environments are installed, the one in use first.
fn python_prefixes() -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .into_iter()
        .filter_map(variable)
        .collect();
    let path = env::var_os("PATH").unwrap_or_default();
    if let Some(directory) = env::split_paths(&path).find(|dir| dir.join("python3").is_file()) {
        // For a link in /usr/bin or ~/bin, both its own place and its target's.
        let target = fs::canonicalize(directory.join("python3")).ok();
        let prefix = |bin: &Path| bin.parent().map(Path::to_owned);
        prefixes.extend(prefix(&directory));
        prefixes.extend(target.and_then(|file| file.parent().and_then(prefix)));
    }
    prefixes.extend(variable("HOME").map(|home| home.join(".local")));
    prefixes.push("/usr/local".into());
    prefixes.push("/usr".into());
    prefixes
}

fn python_path() -> Vec<PathBuf> {
    let path = env::var_os("PYTHONPATH").unwrap_or_default();
    env::split_paths(&path)
        .filter(|path| path.is_absolute())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_of_every_python_are_listed_newest_first() {
        let prefix = tempfile::tempdir().unwrap();
        for python in ["python3.9", "python3.12", "python3.10"] {
            fs::create_dir_all(prefix.path().join("lib").join(python).join("site-packages"))
                .unwrap();
        }
        let pythons: Vec<_> = wheels(IN_SITE_PACKAGES, &[prefix.path().into()], &[])
            .iter()
            .map(|file| {
                assert!(
                    file.ends_with("site-packages/nvidia/nccl/lib/libnccl.so.2"),
                    "{file:?}"
                );
                file.strip_prefix(prefix.path().join("lib"))
                    .unwrap()
                    .iter()
                    .next()
                    .unwrap()
                    .to_owned()
            })
            .collect();
        assert_eq!(pythons, ["python3.12", "python3.10", "python3.9"]);
    }

    #[test]
    fn a_prefix_without_python_is_still_named() {
        let prefix = tempfile::tempdir().unwrap();
        let expected = prefix
            .path()
            .join("lib/python3*/site-packages")
            .join(IN_SITE_PACKAGES);
        assert_eq!(
            wheels(IN_SITE_PACKAGES, &[prefix.path().into()], &[]),
            [expected]
        );
    }

    #[test]
    fn a_prefix_given_twice_is_tried_once() {
        let prefix = tempfile::tempdir().unwrap();
        let twice = [prefix.path().into(), prefix.path().into()];
        assert_eq!(wheels(IN_SITE_PACKAGES, &twice, &[]).len(), 1);
    }
}

//! `header`: the NCCL release that nccl-sys binds, as NVIDIA packs it for Python; and older releases, for
//! the chores that compare.
//!
//! A wheel is downloaded with pip, and what is needed of it is kept in `.cache/nccl-RELEASE`, which git
//! does not know: the directory `include` and `libnccl.so.2`. Another release is another directory.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::Result;
use crate::arguments::Arguments;
use crate::workspace::{self, run as run_command};

/// What is taken from a wheel.
const HEADERS: &str = "nvidia/nccl/include/";
const LIBRARY: &str = "nvidia/nccl/lib/libnccl.so.2";

/// The releases that are looked at beside the one that nccl-sys binds, oldest first: the oldest that the
/// safe crate accepts and that can be had, the one that CuPy is built for, and one between.
const OLDER: [&str; 3] = ["2.18.3", "2.27.7", "2.30.7"];

/// One release of NCCL on this disk.
pub(crate) struct Release {
    /// Which one.
    pub(crate) version: String,
    /// The directory of its headers.
    pub(crate) include: PathBuf,
    /// Its `nccl.h`.
    pub(crate) header: PathBuf,
    /// Its `libnccl.so.2`.
    pub(crate) library: PathBuf,
}

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    println!("{}", release()?.header.display());
    Ok(())
}

/// The releases that a command line asks for: `--oldest-and-newest`, `--release X.Y.Z`, or `--all`, which
/// is meant if nothing is said.
pub(crate) fn asked_for(arguments: &mut Arguments) -> Result<Vec<Release>> {
    let bound = workspace::nccl_release()?;
    let versions = if arguments.flag("--oldest-and-newest") {
        vec![OLDER[0].to_owned(), bound]
    } else if let Some(version) = arguments.value("--release")? {
        vec![version]
    } else {
        arguments.flag("--all");
        OLDER
            .iter()
            .map(|&version| version.to_owned())
            .chain([bound])
            .collect()
    };
    arguments.finish()?;
    versions.iter().map(|version| fetch(version)).collect()
}

/// The release that nccl-sys binds, downloaded if it is not there yet.
pub(crate) fn release() -> Result<Release> {
    fetch(&workspace::nccl_release()?)
}

/// NVIDIA's package of a release: it is named after the CUDA version that the library is for.
fn package(version: &str) -> &'static str {
    let minor = version
        .split('.')
        .nth(1)
        .and_then(|minor| minor.parse().ok());
    match minor {
        Some(0..27) => "nvidia-nccl-cu12",
        _ => "nvidia-nccl-cu13",
    }
}

/// A release, downloaded if it is not there yet.
fn fetch(version: &str) -> Result<Release> {
    let package = package(version);
    let cache = workspace::root().join(".cache");
    let directory = cache.join(format!("nccl-{version}"));
    let release = Release {
        version: version.to_owned(),
        include: directory.join("include"),
        header: directory.join("include").join("nccl.h"),
        library: directory.join("libnccl.so.2"),
    };
    if release.header.is_file() && release.library.is_file() {
        return Ok(release);
    }

    eprintln!("downloading NCCL {version} to {}", directory.display());
    let in_cache = |error| format!("cannot write to {}: {error}", cache.display());
    fs::create_dir_all(&cache).map_err(in_cache)?;
    // Complete, or not under that name.
    let download = tempfile::tempdir_in(&cache).map_err(in_cache)?;
    run_command(
        Command::new("python3")
            .args([
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--only-binary=:all:",
                "--quiet",
            ])
            .args(["--disable-pip-version-check", "--no-cache-dir", "--dest"])
            .arg(download.path())
            .arg(format!("{package}=={version}")),
    )
    .map_err(|error| format!("{error}\nPython 3 with pip is needed to download {package}"))?;
    run_command(
        Command::new("python3")
            .args(["-c", UNPACK])
            .arg(download.path())
            .args([HEADERS, LIBRARY]),
    )?;
    let unpacked = download.path().join("unpacked");
    if let Err(error) = fs::rename(&unpacked, &directory)
        // Somebody else was faster, or a part of it is missing: ours is whole.
        && let Err(_) = fs::remove_dir_all(&directory).and_then(|()| fs::rename(&unpacked, &directory))
    {
        return Err(format!("cannot move NCCL to {}: {error}", directory.display()).into());
    }
    Ok(release)
}

/// Takes the headers and the library out of the one wheel in a directory, into its `unpacked`.
const UNPACK: &str = r#"
import glob, os, shutil, sys, zipfile
directory, headers, library = sys.argv[1:]
(wheel,) = glob.glob(os.path.join(directory, "*.whl"))
target = os.path.join(directory, "unpacked")
with zipfile.ZipFile(wheel) as archive:
    for member in archive.namelist():
        if member == library:
            path = os.path.join(target, os.path.basename(member))
        elif member.startswith(headers) and not member.endswith("/"):
            path = os.path.join(target, "include", *member[len(headers):].split("/"))
        else:
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with archive.open(member) as source, open(path, "wb") as file:
            shutil.copyfileobj(source, file)
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_releases_are_packed_for_an_older_cuda() {
        assert_eq!(package("2.18.3"), "nvidia-nccl-cu12");
        assert_eq!(package("2.27.7"), "nvidia-nccl-cu13");
        assert_eq!(package("2.32.3"), "nvidia-nccl-cu13");
    }
}

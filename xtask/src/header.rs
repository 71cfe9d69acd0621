//! `header`: the NCCL release that nccl-sys binds, as NVIDIA packs it for Python.
//!
//! The wheel is downloaded with pip, and what is needed of it is kept in `.cache/nccl-RELEASE`, which git
//! does not know: the directory `include` and `libnccl.so.2`. Another release is another directory.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::Result;
use crate::arguments::Arguments;
use crate::workspace::{self, run as run_command};

/// The wheel, and what is taken from it.
const PACKAGE: &str = "nvidia-nccl-cu13";
const HEADERS: &str = "nvidia/nccl/include/";
const LIBRARY: &str = "nvidia/nccl/lib/libnccl.so.2";

/// One release of NCCL on this disk.
pub(crate) struct Release {
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

/// The release that nccl-sys binds, downloaded if it is not there yet.
pub(crate) fn release() -> Result<Release> {
    let version = workspace::nccl_release()?;
    let cache = workspace::root().join(".cache");
    let directory = cache.join(format!("nccl-{version}"));
    let release = Release {
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
            .arg(format!("{PACKAGE}=={version}")),
    )
    .map_err(|error| format!("{error}\nPython 3 with pip is needed to download {PACKAGE}"))?;
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

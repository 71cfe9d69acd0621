//! NVIDIA's NCCL EP library (`libnccl_ep.so`) for the chores that need its header or its libraries: the wheel
//! `nccl-extensions`, which pip downloads as it does NCCL's ([`wheels`]).
//!
//! The wheel is the one for CPython 3.11: the files that are taken from it are the same for every Python.

mod generate;

use std::env::consts::ARCH;
use std::fs;
use std::path::PathBuf;

use crate::wheels;
use crate::{Result, workspace};

pub(crate) use generate::generate;

const PACKAGE: &str = "nccl-extensions";

/// The release of the package whose header is bound. The version of the library is in the header.
const RELEASE: &str = "0.1.0";

/// SHA-256 of the wheel for x86-64, as the package index states it.
const CHECKSUM: &str = "30d42d0218f46e394a21c5663f09ee9bb8a90caf4d69f0040e5a9eb2fef7b8ad";

/// The parts that are taken from the wheel: the headers, and for each CUDA its library and where it is kept.
const HEADERS: &str = "nccl/ep/include/";
const LIBRARIES: [(&str, &str); 2] = [
    ("nccl/ep/lib/cu12/libnccl_ep.so", "cu12/libnccl_ep.so"),
    ("nccl/ep/lib/cu13/libnccl_ep.so", "cu13/libnccl_ep.so"),
];

/// The wheel's files on this disk.
#[derive(Debug)]
pub(crate) struct Release {
    /// Its `nccl_ep.h`.
    pub(crate) header: PathBuf,
    /// Its libraries, for CUDA 12 and for CUDA 13.
    pub(crate) libraries: [PathBuf; 2],
}

impl Release {
    /// The libraries for an environment variable.
    pub(crate) fn list(&self) -> String {
        self.libraries
            .each_ref()
            .map(|library| library.display().to_string())
            .join(":")
    }
}

/// Returns the release that nccl-sys binds, downloaded if it is missing.
///
/// # Errors
/// [`wheels::Unavailable`], a wheel with another checksum, a disk that cannot be written to.
pub(crate) fn release() -> Result<Release> {
    let cache = workspace::root().join(".cache");
    let directory = cache.join(format!("{PACKAGE}-{RELEASE}"));
    let release = Release {
        header: directory.join("include/nccl_ep.h"),
        libraries: LIBRARIES.map(|(_, name)| directory.join(name)),
    };
    if directory.is_dir() {
        return Ok(release);
    }
    eprintln!(
        "downloading NCCL EP ({PACKAGE} {RELEASE}) to {}",
        directory.display()
    );
    let in_cache = |error| format!("cannot write to {}: {error}", cache.display());
    fs::create_dir_all(&cache).map_err(in_cache)?;
    let download = tempfile::tempdir_in(&cache).map_err(in_cache)?;
    let python = [
        "--python-version=3.11",
        "--implementation=cp",
        "--abi=cp311",
    ];
    wheels::download(PACKAGE, RELEASE, &python, download.path())?;
    let wheel = wheels::only_file(download.path())?;
    if ARCH == "x86_64" {
        wheels::verify(&wheel, CHECKSUM)?;
    }
    wheels::unpack(&wheel, &directory, HEADERS, &LIBRARIES)?;
    Ok(release)
}

//! NVIDIA's releases of NCCL as Python wheels, for all chores that need a header or a library.
//!
//! pip downloads a wheel, from the package index or from the source in pip's own settings (`PIP_INDEX_URL`, `PIP_FIND_LINKS`).
//! The needed parts are kept in `.cache`, which git ignores, one directory for each wheel: its headers, `libnccl.so.2`, and its
//! terms. A wheel in [`PINNED`] with a wrong checksum is refused, and nothing of it is kept.

use std::env::consts::ARCH;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::workspace;
use crate::{Result, workspace::run as run_command};

/// The parts that are taken from a wheel.
const HEADERS: &str = "nvidia/nccl/include/";
const LIBRARY: &str = "nvidia/nccl/lib/libnccl.so.2";

/// The CUDA version that a library is built for, which is a part of the package's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cuda {
    Twelve,
    Thirteen,
}

use Cuda::{Thirteen, Twelve};

impl Cuda {
    /// Parses its number.
    pub(crate) fn numbered(number: &str) -> Option<Self> {
        match number {
            "12" => Some(Twelve),
            "13" => Some(Thirteen),
            _ => None,
        }
    }

    /// The newest CUDA that NVIDIA packed this release for.
    pub(crate) fn newest_for(version: &str) -> Self {
        let minor = version.split('.').nth(1);
        match minor.and_then(|minor| minor.parse().ok()) {
            Some(0..27) => Twelve,
            _ => Thirteen,
        }
    }

    /// NVIDIA's package of NCCL for it.
    pub(crate) fn package(self) -> &'static str {
        match self {
            Twelve => "nvidia-nccl-cu12",
            Thirteen => "nvidia-nccl-cu13",
        }
    }
}

impl fmt::Display for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Twelve => "12",
            Thirteen => "13",
        })
    }
}

/// SHA-256 of the wheels, as the package index states it: release, CUDA, processor, checksum.
const PINNED: &[(&str, Cuda, &str, &str)] = &[
    (
        "2.18.3",
        Twelve,
        "x86_64",
        "89cf220910c43e53df992f54f7aa2a35c6d606b077c9ae95b1f17c544d3ad3f3",
    ),
    (
        "2.27.7",
        Twelve,
        "x86_64",
        "de5ba5562f08029a19cb1cd659404b18411ed0d6c90ac5f52f30bf99ad5809aa",
    ),
    (
        "2.27.7",
        Twelve,
        "aarch64",
        "4617839f3bb730c3845bf9adf92dbe0e009bc53ca5022ed941f2e23fb76e6f17",
    ),
    (
        "2.27.7",
        Thirteen,
        "x86_64",
        "b28a524abd8389b76a4a3f133c76a7aaa7005e47fcaa9d9603b90103927a3f93",
    ),
    (
        "2.27.7",
        Thirteen,
        "aarch64",
        "5e3cc863e52bf9dd1e3ab1941bddb414098f489ae7342f6b3a274602303da123",
    ),
    (
        "2.30.7",
        Twelve,
        "x86_64",
        "8ce1b8213f61f2bfac132e6df890af6450b77cbd140c6ce4e98cb0c2d8e678c9",
    ),
    (
        "2.30.7",
        Twelve,
        "aarch64",
        "03ecd776fd1d58fd2c9a0a687dcf8db9ecd0057382dba646fa3d65786d4a9ea1",
    ),
    (
        "2.30.7",
        Thirteen,
        "x86_64",
        "cefa7fdb9710efd0f39c5f1be1d61ff6fc9a996c451265bd7fbdcf9455ed4b50",
    ),
    (
        "2.30.7",
        Thirteen,
        "aarch64",
        "ca786ffa5a647c75d4d1f5cc72a6c4f537947e2ba8823d7c8aaf768e7a7b9f77",
    ),
    (
        "2.32.3",
        Twelve,
        "x86_64",
        "bb94b2348e4861d5e8aa00b36c3d12d9bdf9c6369b82cbb723de0b582280a21c",
    ),
    (
        "2.32.3",
        Twelve,
        "aarch64",
        "061af42ae1044816820e16b872075e243d1ac0656f51860fbc8e106c257aa83a",
    ),
    (
        "2.32.3",
        Thirteen,
        "x86_64",
        "1459723080ac889d73a26edfa3e04383a7928ab31ac8f0ec43b3ea9548b04ff3",
    ),
    (
        "2.32.3",
        Thirteen,
        "aarch64",
        "a5bee92b2f4af218c109f8d221c3c9adcc752b94ae0ffcb0ed5abf9341a7724c",
    ),
];

/// The checksum that the wheel must have; `None` for a release that was requested by number and is not in the table.
fn pinned(version: &str, cuda: Cuda, processor: &str) -> Option<&'static str> {
    PINNED
        .iter()
        .find(|entry| (entry.0, entry.1, entry.2) == (version, cuda, processor))
        .map(|entry| entry.3)
}

/// A wheel is not available: pip, the network or the release is missing. Distinct from the error of a wrong wheel.
#[derive(Debug)]
pub(crate) struct Unavailable(pub(crate) String);

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// One release of NCCL on this disk.
#[derive(Debug)]
pub(crate) struct Release {
    /// The version.
    pub(crate) version: String,
    /// The CUDA version that its library is for.
    pub(crate) cuda: Cuda,
    /// The directory of its headers.
    pub(crate) include: PathBuf,
    /// Its `nccl.h`.
    pub(crate) header: PathBuf,
    /// Its `libnccl.so.2`.
    pub(crate) library: PathBuf,
    /// The metadata file of the wheel.
    metadata: PathBuf,
    /// The directory of the licences in the wheel.
    licences: PathBuf,
}

/// The terms of a wheel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    /// The licence in its metadata, line by line.
    pub(crate) stated: Vec<String>,
    /// The licence files in it, by name, with their text.
    pub(crate) files: Vec<(String, String)>,
}

impl Release {
    pub(crate) fn new(version: &str, cuda: Cuda) -> Self {
        let cache = workspace::root().join(".cache");
        let directory = cache.join(format!("nccl-{version}-cu{cuda}"));
        Self {
            version: version.to_owned(),
            cuda,
            include: directory.join("include"),
            header: directory.join("include/nccl.h"),
            library: directory.join("libnccl.so.2"),
            metadata: directory.join("METADATA"),
            licences: directory.join("licences"),
        }
    }

    fn is_complete(&self) -> bool {
        let files = [&self.header, &self.library, &self.metadata];
        files.iter().all(|file| file.is_file())
    }

    /// The terms of its wheel.
    pub(crate) fn terms(&self) -> Result<Terms> {
        let unreadable =
            |path: &Path, error| format!("cannot read the terms in {}: {error}", path.display());
        let metadata = fs::read_to_string(&self.metadata)
            .map_err(|error| unreadable(&self.metadata, error))?;
        let mut files = Vec::new();
        if self.licences.is_dir() {
            for entry in fs::read_dir(&self.licences)? {
                let path = entry?.path();
                let text = fs::read_to_string(&path).map_err(|error| unreadable(&path, error))?;
                let name = path.file_name().unwrap_or_default();
                files.push((name.to_string_lossy().into_owned(), text));
            }
        }
        files.sort();
        Ok(Terms {
            stated: stated_terms(&metadata),
            files,
        })
    }
}

/// The lines of a wheel's metadata about its licence. The fields end at the first empty line.
fn stated_terms(metadata: &str) -> Vec<String> {
    let fields = metadata.lines().take_while(|line| !line.is_empty());
    let licence = |line: &&str| {
        ["License:", "License-Expression:", "Classifier: License ::"]
            .iter()
            .any(|field| line.starts_with(field))
    };
    fields.filter(licence).map(str::to_owned).collect()
}

/// A release for its newest CUDA, downloaded if it is missing.
pub(crate) fn fetch_newest(version: &str) -> Result<Release> {
    fetch(version, Cuda::newest_for(version))
}

/// A release, downloaded if it is missing.
///
/// # Errors
/// [`Unavailable`], a wheel with another checksum than the pinned one, a disk that cannot be written to.
pub(crate) fn fetch(version: &str, cuda: Cuda) -> Result<Release> {
    let release = Release::new(version, cuda);
    if release.is_complete() {
        return Ok(release);
    }
    let cache = workspace::root().join(".cache");
    let directory = release.library.parent().unwrap_or(&cache);
    eprintln!(
        "downloading NCCL {version} for CUDA {cuda} to {}",
        directory.display()
    );
    let in_cache = |error| format!("cannot write to {}: {error}", cache.display());
    fs::create_dir_all(&cache).map_err(in_cache)?;
    // A directory with this name is always complete.
    let download = tempfile::tempdir_in(&cache).map_err(in_cache)?;
    download_wheel(version, cuda, download.path())?;
    let wheel = only_file(download.path())?;
    if let Some(expected) = pinned(version, cuda, ARCH) {
        verify(&wheel, expected)?;
    }
    unpack(&wheel, directory, HEADERS, &[(LIBRARY, "libnccl.so.2")])?;
    Ok(release)
}

/// Unpacks the headers below `headers`, the terms, and `libraries` (a member, and its name here) of a wheel into a directory,
/// which exists only if that is complete. The wheel is in a directory of its own beside it.
pub(crate) fn unpack(
    wheel: &Path,
    directory: &Path,
    headers: &str,
    libraries: &[(&str, &str)],
) -> Result {
    let unpacked = wheel.with_file_name("unpacked");
    let mut command = Command::new("python3");
    command
        .args(["-c", UNPACK])
        .args([wheel, &unpacked])
        .arg(headers);
    for (member, name) in libraries {
        command.arg(format!("{member}={name}"));
    }
    run_command(&mut command)?;
    if let Err(error) = fs::rename(&unpacked, directory)
        // Another process was faster, or its copy is incomplete: this copy is complete.
        && let Err(_) = fs::remove_dir_all(directory).and_then(|()| fs::rename(&unpacked, directory))
    {
        return Err(format!(
            "cannot move the wheel's files to {}: {error}",
            directory.display()
        )
        .into());
    }
    Ok(())
}

fn download_wheel(version: &str, cuda: Cuda, directory: &Path) -> Result {
    download(cuda.package(), version, &[], directory)
}

/// Downloads one wheel with pip, using these additional options.
///
/// # Errors
/// [`Unavailable`].
pub(crate) fn download(package: &str, version: &str, options: &[&str], directory: &Path) -> Result {
    let unavailable = |why: &str| {
        Unavailable(format!(
            "{package} {version} cannot be downloaded ({why}): it takes Python 3 with pip, and the package index or \
             a directory with the wheel in PIP_FIND_LINKS"
        ))
    };
    let output = Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--no-deps"])
        .args(["--only-binary=:all:", "--disable-pip-version-check"])
        .args(["--no-cache-dir", "--dest"])
        .arg(directory)
        .args(options)
        .arg(format!("{package}=={version}"))
        .stdin(Stdio::null())
        .output()
        .map_err(|error| unavailable(&format!("cannot run python3: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty());
    Err(unavailable(last.unwrap_or("pip does not say why").trim()).into())
}

/// Returns the wheel that pip has put into a directory.
pub(crate) fn only_file(directory: &Path) -> Result<PathBuf> {
    let mut files = fs::read_dir(directory)?;
    match (files.next(), files.next()) {
        (Some(file), None) => Ok(file?.path()),
        _ => Err("pip has not left one wheel where it was told to".into()),
    }
}

/// Checks that a file has this SHA-256.
pub(crate) fn verify(file: &Path, expected: &str) -> Result {
    let said = workspace::output(Command::new("sha256sum").arg("--").arg(file))?;
    let found = said.trim_start_matches('\\').split_whitespace().next();
    let found = found.unwrap_or_default();
    if found == expected {
        return Ok(());
    }
    Err(format!(
        "{} is not the file that is expected: its SHA-256 is {found}, not {expected}; nothing of it was kept",
        file.file_name().unwrap_or_default().to_string_lossy()
    )
    .into())
}

/// Extracts the headers, the libraries and the terms from a wheel, into a directory.
const UNPACK: &str = r#"
import os, shutil, sys, zipfile
wheel, target, headers, *libraries = sys.argv[1:]
libraries = dict(library.split("=") for library in libraries)
with zipfile.ZipFile(wheel) as archive:
    for member in archive.namelist():
        name = os.path.basename(member)
        if not name:
            continue
        if member in libraries:
            path = os.path.join(target, *libraries[member].split("/"))
        elif member.startswith(headers):
            path = os.path.join(target, "include", *member[len(headers):].split("/"))
        elif ".dist-info/" in member and name == "METADATA":
            path = os.path.join(target, name)
        elif ".dist-info/" in member and "licen" in name.lower():
            path = os.path.join(target, "licences", name)
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
        assert_eq!(Cuda::newest_for("2.18.3"), Twelve);
        assert_eq!(Cuda::newest_for("2.27.7"), Thirteen);
        assert_eq!(Cuda::newest_for("2.32.3"), Thirteen);
    }

    #[test]
    fn the_release_that_nccl_sys_binds_has_a_checksum_for_each_cuda_and_processor() {
        let bound = workspace::nccl_release().unwrap();
        for cuda in [Twelve, Thirteen] {
            for processor in ["x86_64", "aarch64"] {
                assert!(
                    pinned(&bound, cuda, processor).is_some(),
                    "{bound} for CUDA {cuda} on {processor}"
                );
            }
        }
    }

    #[test]
    fn each_wheel_has_a_checksum_of_its_own() {
        let mut sums: Vec<_> = PINNED.iter().map(|entry| entry.3).collect();
        sums.sort_unstable();
        sums.dedup();
        assert_eq!(sums.len(), PINNED.len());
        let is_sum =
            |sum: &str| sum.len() == 64 && sum.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(sums.iter().all(|sum| is_sum(sum)));
    }

    #[test]
    fn a_file_with_another_checksum_is_refused_with_both_of_them() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("x.whl");
        fs::write(&file, "abc").unwrap();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        verify(&file, abc).unwrap();
        fs::write(&file, "abd").unwrap();
        let error = verify(&file, abc).unwrap_err().to_string();
        assert!(error.starts_with("x.whl is not the file"), "{error}");
        assert!(error.contains(&format!("not {abc}")), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }

    #[test]
    fn a_wheel_that_pip_cannot_find_is_unavailable_in_one_sentence() {
        let directory = tempfile::tempdir().unwrap();
        let error = download_wheel("0.0.1.dev0.of.nobody", Thirteen, directory.path()).unwrap_err();
        assert!(error.is::<Unavailable>());
        let text = error.to_string();
        assert!(text.starts_with("nvidia-nccl-cu13 0.0.1"), "{text}");
        assert!(!text.contains('\n'), "{text}");
    }

    #[test]
    fn the_licence_is_what_the_fields_say_and_not_the_text_below_them() {
        let metadata = "Name: x\nLicense-Expression: LicenseRef-Y\nLicense-File: License.txt\n\
                        Classifier: License :: Other\n\nLicense: nothing of this\n";
        assert_eq!(
            stated_terms(metadata),
            [
                "License-Expression: LicenseRef-Y",
                "Classifier: License :: Other"
            ]
        );
    }
}

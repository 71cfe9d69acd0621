//! A cache of the analyses of libraries, in files shared between processes.
//!
//! Each build ID has a file, `BUILD_ID.layout`: a line with a SHA-256 sum, then JSON. A file is used if its owner, its
//! directory and its sum are valid, and if this version of the reader made it for a library of the same length; otherwise it is
//! recreated. A file is written under another name and renamed, so a reader sees a whole file or none. While one process reads
//! a library, other processes of the same user wait for it, at most [`PATIENCE`]. A failure of the cache is not an error: the
//! library is then read each time.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::calls::Calls;
use super::error::LoadError;
use super::types::Table;
use super::wanted;

/// The version of the format. Raise it when the meaning of the contents changes.
const FORMAT: u32 = 3;
/// A first read takes 0.3 s, or seconds on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(10);

/// Everything that is read of a library's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Analysis {
    pub(crate) calls: Calls,
    pub(crate) table: Table,
}

/// How the cache was used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CacheUse {
    /// The analysis came from this file.
    Found(PathBuf),
    /// The library was read, and the analysis was written to this file.
    Written(PathBuf),
    /// The library was read, and the analysis could not be stored for this reason.
    None(String),
}

/// The library that a file belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Key {
    /// The build ID of the library.
    pub(crate) build_id: String,
    /// The length of the library in bytes.
    pub(crate) length: u64,
}

#[derive(Serialize, Deserialize)]
struct Entry<A> {
    key: Key,
    /// The requested names, and the version of the reader.
    request: String,
    analysis: A,
}

/// A directory for cache files, private to this user.
#[derive(Debug)]
pub(crate) struct Cache {
    directory: Result<PathBuf, String>,
}

impl Cache {
    /// Returns the cache that the environment selects: `NCCL_EMULATOR_CACHE`, or else the user's cache
    /// directory, or else a directory of the user among the temporary files.
    pub(crate) fn of_environment() -> Self {
        Self::choose(|name| std::env::var_os(name), &std::env::temp_dir())
    }

    pub(crate) fn choose(variable: impl Fn(&str) -> Option<OsString>, temporary: &Path) -> Self {
        let path = |name: &str| {
            let value = variable(name).filter(|value| !value.is_empty());
            value
                .map(PathBuf::from)
                .filter(|path| path.is_absolute() || name == "NCCL_EMULATOR_CACHE")
        };
        let candidates = match path("NCCL_EMULATOR_CACHE") {
            Some(path) => vec![path],
            None => {
                let home = path("HOME").map(|home| home.join(".cache"));
                let user = rustix::process::geteuid().as_raw();
                path("XDG_CACHE_HOME")
                    .or(home)
                    .map(|cache| cache.join("nccl-emulator"))
                    .into_iter()
                    .chain([temporary.join(format!("nccl-emulator-{user}"))])
                    .collect()
            }
        };
        let mut troubles = Vec::new();
        for candidate in candidates {
            match prepare(&candidate) {
                Ok(()) => {
                    return Self {
                        directory: Ok(candidate),
                    };
                }
                Err(error) => troubles.push(format!("{}: {error}", candidate.display())),
            }
        }
        Self {
            directory: Err(troubles.join("; ")),
        }
    }

    /// Returns the entry for `key`, or else makes it with `make`.
    pub(crate) fn get(
        &self,
        key: &Key,
        make: impl FnOnce() -> Result<Analysis, LoadError>,
    ) -> Result<(Analysis, CacheUse), LoadError> {
        let directory = match &self.directory {
            Ok(directory) => directory,
            Err(trouble) => return Ok((make()?, CacheUse::None(trouble.clone()))),
        };
        let path = directory.join(format!("{}.layout", key.build_id));
        if let Some(analysis) = read(&path, key) {
            return Ok((analysis, CacheUse::Found(path)));
        }
        // Held until the file is written.
        let lock = lock(&directory.join(format!("{}.lock", key.build_id)));
        if lock.is_ok()
            && let Some(analysis) = read(&path, key)
        {
            return Ok((analysis, CacheUse::Found(path)));
        }
        let analysis = make()?;
        let used = match write(&path, directory, key, &analysis) {
            Ok(()) => CacheUse::Written(path),
            Err(error) => CacheUse::None(format!("{}: {error}", path.display())),
        };
        Ok((analysis, used))
    }
}

/// Creates the directory, or checks that no other user can write in it.
fn prepare(directory: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700).create(directory)?;
    // For a symbolic link, the metadata of its target.
    private(&fs::metadata(directory)?, "directory")
}

fn private(metadata: &fs::Metadata, what: &str) -> io::Result<()> {
    let user = rustix::process::geteuid().as_raw();
    if metadata.uid() != user || metadata.mode() & 0o022 != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "{what} of user {}, mode {:o}; expected one that only user {user} can write",
                metadata.uid(),
                metadata.mode() & 0o7777
            ),
        ));
    }
    Ok(())
}

fn lock(path: &Path) -> io::Result<File> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(POLL);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the request that a file must match.
fn request() -> String {
    let lists = [wanted::TYPES.join(" "), wanted::DATA.join(" ")].join("\n");
    format!(
        "{} {FORMAT} {}",
        env!("CARGO_PKG_VERSION"),
        sum(lists.as_bytes())
    )
}

fn sum(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read(path: &Path, key: &Key) -> Option<Analysis> {
    let file = File::open(path).ok()?;
    private(&file.metadata().ok()?, "file").ok()?;
    let text = io::read_to_string(file).ok()?;
    let (found, json) = text.split_once('\n')?;
    if found != sum(json.as_bytes()) {
        return None;
    }
    let entry: Entry<Analysis> = serde_json::from_str(json).ok()?;
    (entry.key == *key && entry.request == request()).then_some(entry.analysis)
}

fn write(path: &Path, directory: &Path, key: &Key, analysis: &Analysis) -> io::Result<()> {
    let json = serde_json::to_string(&Entry {
        key: key.clone(),
        request: request(),
        analysis,
    })?;
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    writeln!(file, "{}", sum(json.as_bytes()))?;
    file.write_all(json.as_bytes())?;
    file.persist(path)?;
    Ok(())
}

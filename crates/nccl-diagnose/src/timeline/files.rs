//! Recordings from files.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::Timeline;
use crate::error::{Error, Result};
use crate::regular_file;
use nccl_core::recorder::Snapshot;

/// The largest file that is read: a thousand full recordings.
const LARGEST: u64 = 256 << 20;

/// The content of a file.
enum FileContent {
    One(Box<Snapshot>),
    All(Timeline),
}

impl Timeline {
    /// The recordings in these files, merged on one time axis as by [`merge`](Self::merge). For a directory, reads the
    /// files `rank-*.json` in it. A file with a whole timeline, if it is the only one, is returned unchanged.
    ///
    /// Files that cannot be read, and what is no regular file, are named in [`left_out`](Self::left_out).
    ///
    /// # Errors
    /// [`ErrorKind::Io`](nccl_core::ErrorKind::Io) when there is no recording in any of them, with the reasons.
    ///
    /// ```
    /// use nccl::recorder::{self, Timeline};
    ///
    /// let directory = std::env::temp_dir().join(format!("nccl-doc-record-{}", std::process::id()));
    /// std::fs::create_dir_all(&directory).unwrap();
    /// std::fs::write(directory.join("rank-0.json"), recorder::snapshot().to_json()).unwrap();
    /// let timeline = Timeline::read(&[&directory])?;
    /// assert_eq!(timeline.ranks[0].snapshot.pid, std::process::id());
    /// # std::fs::remove_dir_all(directory).unwrap();
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn read(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let mut files = Vec::new();
        let mut left_out = Vec::new();
        for path in paths {
            let path = path.as_ref();
            match inside(path) {
                Ok(found) if found.is_empty() => {
                    left_out.push(format!("{}: no rank-*.json is in it", path.display()));
                }
                Ok(found) => files.extend(found),
                Err(error) => left_out.push(format!("{}: {error}", path.display())),
            }
        }
        let mut snapshots = Vec::new();
        let mut whole = Vec::new();
        for path in &files {
            match load(path) {
                Ok(FileContent::One(snapshot)) => snapshots.push(*snapshot),
                Ok(FileContent::All(timeline)) => whole.push(timeline),
                Err(error) => left_out.push(format!("{}: {error}", path.display())),
            }
        }
        let alone = snapshots.is_empty() && whole.len() == 1;
        let mut timeline = match whole.pop() {
            Some(timeline) if alone => timeline,
            last => {
                let more = whole.into_iter().chain(last);
                snapshots.extend(
                    more.flat_map(|timeline| timeline.ranks)
                        .map(|rank| rank.snapshot),
                );
                if snapshots.is_empty() {
                    let why = left_out.join("; ");
                    let error = std::io::Error::new(std::io::ErrorKind::NotFound, why);
                    return Err(Error::io("looking for recordings")(error));
                }
                Self::merge(snapshots)?
            }
        };
        timeline.left_out.extend(left_out);
        Ok(timeline)
    }
}

fn inside(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("rank-") && name.ends_with(".json") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn load(path: &Path) -> Result<FileContent, String> {
    let file = regular_file::open(path).map_err(|error| error.to_string())?;
    let mut text = String::new();
    let read = file.take(LARGEST + 1).read_to_string(&mut text);
    read.map_err(|error| error.to_string())?;
    if text.len() as u64 > LARGEST {
        return Err(format!("it has more than {} MiB", LARGEST >> 20));
    }
    let held = match Timeline::is_meant(&text) {
        true => Timeline::from_json(&text).map(FileContent::All),
        false => Snapshot::from_json(&text).map(|snapshot| FileContent::One(Box::new(snapshot))),
    };
    held.map_err(|error| error.to_string())
}

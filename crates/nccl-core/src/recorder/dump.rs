//! Writes a recording to a file when a communicator is aborted, if that is configured.
//!
//! The abort only triggers the recording. A separate thread waits a moment, so that the process's other communicators
//! are aborted as well, takes the snapshot and writes it. The file appears under its name when it is
//! complete. The exit of the process waits for that thread as it does for aborts.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use nccl_base::variables::RECORD_DIR as VARIABLE;

use super::snapshot::{Snapshot, of_place, snapshot};
use super::track::TrackHandle;
use crate::identity::RecorderScope;
use crate::{atomic_file, drop_queue};

/// How long after the first abort the recording is taken.
const SETTLE: Duration = Duration::from_millis(30);

/// The maximum number of recordings of one process. A program that continues after each fault must not fill a disk.
const MOST: usize = 16;

impl TrackHandle {
    /// Writes a recording of the calls before the abort, if that is configured. Does not wait.
    pub(crate) fn aborted(&self, reason: &str) {
        let identity = &self.track().identity;
        aborted(identity.scope.as_ref(), identity.rank, reason);
    }
}

/// Writes a recording, in the background, when a communicator of `scope`, or of no world, is aborted because
/// of `reason`. Never waits.
fn aborted(scope: Option<&Arc<RecorderScope>>, rank: usize, reason: &str) {
    aborted_by(scope, rank, reason, |write| {
        drop_queue::run_on_thread((), |()| write())
    });
}

/// As [`aborted`]; `start` runs what it is given on a thread.
fn aborted_by(
    scope: Option<&Arc<RecorderScope>>,
    rank: usize,
    reason: &str,
    start: impl FnOnce(Box<dyn FnOnce() + Send>) -> Result<(), ()>,
) {
    static OF_NO_WORLD: AtomicBool = AtomicBool::new(false);
    static WARNED: AtomicBool = AtomicBool::new(false);
    /// How many recordings were written, or are about to be.
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);
    let own = scope.and_then(|scope| scope.directory());
    let Some(directory) = own.or_else(from_environment) else {
        return;
    };
    let is_recording_due = scope.map_or(&OF_NO_WORLD, |scope| &scope.is_recording_due);
    // A recording that is already due will include this abort.
    if is_recording_due.swap(true, Ordering::AcqRel) {
        return;
    }
    let take_place = |written: usize| (written < MOST).then_some(written + 1);
    let taken = WRITTEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take_place);
    if taken.is_err() {
        is_recording_due.store(false, Ordering::Release);
        if !WARNED.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                name: "nccl.recording.no_more",
                target: "nccl",
                "{MOST} recordings of faults were written; this process writes no more"
            );
        }
        return;
    }
    let (own_scope, own_directory) = (scope.cloned(), directory.to_owned());
    let reason = reason.to_owned();
    let write = move || {
        let (scope, directory) = (own_scope, own_directory);
        std::thread::sleep(SETTLE);
        let is_recording_due = scope
            .as_ref()
            .map_or(&OF_NO_WORLD, |scope| &scope.is_recording_due);
        // Acquires what each abort did that found `true`, so that the snapshot includes it.
        is_recording_due.swap(false, Ordering::AcqRel);
        let mut recording = match &scope {
            Some(scope) => of_place(scope.place()),
            None => snapshot(),
        };
        recording.reason = Some(reason);
        recording.clock = scope.as_ref().and_then(|scope| scope.clock());
        let rank = recording.place.as_ref().map_or(rank, |place| place.rank);
        if !keep(&directory, rank, &recording) {
            // When there is space again, the next fault is recorded.
            WRITTEN.fetch_sub(1, Ordering::Relaxed);
        }
    };
    if start(Box::new(write)).is_err() {
        // The abort continues without a recording, and the next one tries again.
        WRITTEN.fetch_sub(1, Ordering::Relaxed);
        is_recording_due.store(false, Ordering::Release);
        let why = "no thread can be started, or the process ends";
        not_written(directory, &io::Error::other(why));
    }
}

fn from_environment<'a>() -> Option<&'a Path> {
    static DIRECTORY: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
        let value = std::env::var_os(VARIABLE)?;
        (!value.is_empty()).then(|| value.into())
    });
    DIRECTORY.as_deref()
}

/// Whether faults of `scope` are to be recorded.
#[doc(hidden)]
pub fn is_enabled(scope: &RecorderScope) -> bool {
    scope.directory().is_some() || from_environment().is_some()
}

/// Returns whether the recording was written.
fn keep(directory: &Path, rank: usize, recording: &Snapshot) -> bool {
    match write(directory, rank, recording) {
        Ok(path) => {
            let launcher_rank = recording.launcher_rank();
            tracing::warn!(name: "nccl.recording.written", target: "nccl", rank, launcher_rank, path = %path.display(), "recorded what led to a fault");
            true
        }
        Err(error) => {
            not_written(directory, &error);
            false
        }
    }
}

fn not_written(directory: &Path, error: &io::Error) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if WARNED.swap(true, Ordering::Relaxed) {
        tracing::debug!(name: "nccl.recording.failed", target: "nccl", directory = %directory.display(), %error, "another recording of a fault could not be written");
    } else {
        tracing::warn!(
            name: "nccl.recording.failed",
            target: "nccl",
            directory = %directory.display(), %error,
            "a recording of a fault could not be written; further ones are reported at level debug"
        );
    }
}

/// Writes the recording under a name that is not taken.
fn write(directory: &Path, rank: usize, recording: &Snapshot) -> io::Result<PathBuf> {
    std::fs::create_dir_all(directory)?;
    let name = format!("rank-{rank}.pid-{}", recording.pid);
    let path = reserve(directory, &name)?;
    let content = recording.to_json() + "\n";
    // Replaces only the file that was reserved above.
    atomic_file::write(&path, content.as_bytes()).inspect_err(|_| {
        let _ = std::fs::remove_file(&path);
    })?;
    Ok(path)
}

/// Creates an empty file under a free name.
fn reserve(directory: &Path, name: &str) -> io::Result<PathBuf> {
    for number in 1..10_000 {
        let name = match number {
            1 => format!("{name}.json"),
            number => format!("{name}.{number}.json"),
        };
        let path = directory.join(name);
        match File::create_new(&path) {
            Ok(_) => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_recording_gets_a_name_of_its_own_and_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("new/one");
        let recording = snapshot();
        let pid = std::process::id();
        for name in [
            format!("rank-3.pid-{pid}.json"),
            format!("rank-3.pid-{pid}.2.json"),
        ] {
            let path = write(&place, 3, &recording).unwrap();
            assert_eq!(path, place.join(name));
            let text = std::fs::read_to_string(path).unwrap();
            assert_eq!(Snapshot::from_json(&text).unwrap(), recording);
        }
        assert_eq!(std::fs::read_dir(place).unwrap().count(), 2);
    }

    #[test]
    fn a_lack_of_threads_costs_the_recordings_of_that_time_and_no_later_one() {
        let directory = tempfile::tempdir().unwrap();
        let scope = RecorderScope::new("job", 0, 2, 4);
        scope.set_directory(directory.path().to_owned());
        for _ in 0..2 * MOST {
            aborted_by(Some(&scope), 2, "no thread", |_| Err(()));
        }
        aborted_by(Some(&scope), 2, "there is a thread", |write| {
            write();
            Ok(())
        });
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn recordings_that_could_not_be_written_cost_no_later_one() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("place");
        File::create(&place).unwrap();
        let scope = RecorderScope::new("job", 0, 3, 4);
        scope.set_directory(place.clone());
        let abort = || {
            aborted_by(Some(&scope), 3, "a fault", |write| {
                write();
                Ok(())
            });
        };
        for _ in 0..=MOST {
            abort();
        }
        std::fs::remove_file(&place).unwrap();
        abort();
        assert_eq!(std::fs::read_dir(place).unwrap().count(), 1);
    }

    #[test]
    fn where_nothing_can_be_written_nothing_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        File::create(&file).unwrap();
        assert!(write(&file, 0, &snapshot()).is_err());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn links_of_others_under_foreseeable_names_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let precious = directory.path().join("precious");
        std::fs::write(&precious, "mine").unwrap();
        let name = format!("rank-0.pid-{}.json", std::process::id());
        for taken in [format!("{name}.part"), name] {
            symlink(&precious, directory.path().join(taken)).unwrap();
        }
        let path = write(directory.path(), 0, &snapshot()).unwrap();
        assert!(path.symlink_metadata().unwrap().is_file());
        assert_eq!(std::fs::read(&precious).unwrap(), b"mine");
    }
}

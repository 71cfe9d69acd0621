//! The rank of a world to which a communicator belongs. It distinguishes the records of several ranks, within one
//! process and between processes.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::clock::Clock;
use super::world_rank::WorldRank;
use crate::sync::{Mutex, MutexGuard};

/// A rank of a world. Lives as long as the rank's connection, and as the records of its communicators.
#[derive(Debug)]
#[doc(hidden)]
pub struct RecorderScope {
    pub(crate) place: WorldRank,
    /// The directory in which a recording is written when a communicator is aborted.
    directory: OnceLock<PathBuf>,
    /// Whether a recording is about to be taken.
    pub(crate) is_recording_due: AtomicBool,
    /// The offset of this process's clock to that of rank 0, if it was measured.
    clock: OnceLock<Clock>,
    /// The time of the first fault from which this rank has not recovered yet.
    broken: Mutex<Option<Instant>>,
    /// The scope of the previous generation, until a communicator is made in this one.
    past: Mutex<Option<Arc<Self>>>,
}

impl RecorderScope {
    #[doc(hidden)]
    pub fn new(job: &str, generation: u64, rank: usize, world_size: usize) -> Arc<Self> {
        let scope = Arc::new(Self {
            place: WorldRank {
                job: job.to_owned(),
                generation,
                rank,
                world_size,
            },
            directory: OnceLock::new(),
            is_recording_due: AtomicBool::new(false),
            clock: OnceLock::new(),
            broken: Mutex::new(None),
            past: Mutex::new(None),
        });
        let mut all = all();
        all.retain(|scope| scope.strong_count() > 0);
        all.push(Arc::downgrade(&scope));
        scope
    }

    #[doc(hidden)]
    pub fn place(&self) -> &WorldRank {
        &self.place
    }

    /// Sets the directory; later calls have no effect.
    #[doc(hidden)]
    pub fn set_directory(&self, directory: PathBuf) {
        let _ = self.directory.set(directory);
    }

    pub(crate) fn directory(&self) -> Option<&Path> {
        self.directory.get().map(PathBuf::as_path)
    }

    /// Records that a fault was reported to this rank. Later faults are ignored until the rank has recovered.
    #[doc(hidden)]
    pub fn record_fault(&self) {
        self.broken().get_or_insert_with(Instant::now);
    }

    /// Makes this scope the successor of `past` in the next generation: a fault that was reported to `past`, or will be,
    /// counts as recovered when a communicator is made here.
    #[doc(hidden)]
    pub fn set_previous_generation(&self, past: &Arc<Self>) {
        let since = past.since();
        *past.broken() = since;
        *self.past() = Some(Arc::clone(past));
    }

    /// Records that a communicator was made after a fault. Returns the time since the fault.
    pub(crate) fn record_recovery(&self) -> Option<Duration> {
        self.since().map(|since| since.elapsed())
    }

    fn since(&self) -> Option<Instant> {
        let past = self.past().take();
        let before = past.and_then(|past| past.broken().take());
        let own = self.broken().take();
        before.into_iter().chain(own).min()
    }

    fn past(&self) -> MutexGuard<'_, Option<Arc<Self>>> {
        self.past.lock()
    }

    fn broken(&self) -> MutexGuard<'_, Option<Instant>> {
        self.broken.lock()
    }

    #[doc(hidden)]
    pub fn set_clock(&self, clock: Clock) {
        let _ = self.clock.set(clock);
    }

    pub(crate) fn clock(&self) -> Option<Clock> {
        self.clock.get().copied()
    }
}

fn all() -> MutexGuard<'static, Vec<Weak<RecorderScope>>> {
    static ALL: Mutex<Vec<Weak<RecorderScope>>> = Mutex::new(Vec::new());
    ALL.lock()
}

/// Returns the world rank of this process; `None` if the process has none, or several.
pub(crate) fn single_place() -> Option<WorldRank> {
    let scopes: Vec<_> = all().iter().filter_map(Weak::upgrade).collect();
    let (first, others) = scopes.split_first()?;
    let same = others.iter().all(|scope| scope.place == first.place);
    same.then(|| first.place.clone())
}

//! The count of a communicator's launches in graphs: see [`super::captured`].

use std::sync::atomic::{AtomicBool, Ordering};

use cuda_emulator::sync::{Condvar, Mutex};

/// The number of captured launches of a communicator.
#[derive(Default)]
pub(crate) struct Count {
    pub(super) launches: Mutex<usize>,
    pub(super) none: Condvar,
    /// Whether the communicator is gone.
    pub(super) freed: AtomicBool,
}

impl Count {
    /// Marks the communicator as gone.
    pub(super) fn mark_freed(&self) {
        self.freed.store(true, Ordering::Release);
    }

    /// Waits until no graph has a launch of the communicator.
    pub(super) fn wait(&self) {
        let mut launches = self.launches.lock();
        self.none
            .wait_while(&mut launches, |launches| *launches > 0);
    }
}

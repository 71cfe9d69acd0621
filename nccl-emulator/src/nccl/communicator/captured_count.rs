//! How many launches of a communicator are in graphs: see [`super::captured`].

use std::sync::atomic::{AtomicBool, Ordering};

use cuda_emulator::sync::{Condvar, Mutex};

/// How many captured launches a communicator has.
#[derive(Default)]
pub(crate) struct Count {
    pub(super) launches: Mutex<usize>,
    pub(super) none: Condvar,
    /// The communicator is gone.
    pub(super) freed: AtomicBool,
}

impl Count {
    /// Notes that the communicator is gone.
    pub(super) fn mark_freed(&self) {
        self.freed.store(true, Ordering::Release);
    }

    /// Returns when no graph has a launch of the communicator.
    pub(super) fn wait(&self) {
        let mut launches = self.launches.lock();
        self.none
            .wait_while(&mut launches, |launches| *launches > 0);
    }
}

//! Launches that were captured into graphs.
//!
//! A graph can replay its launches until it is destroyed, so their communicator must live until
//! then: finalize, destroy and abort wait for all such graphs, as in NCCL. Only the end of a
//! communicator that was finalized by a revoke does not wait for them; a later replay
//! uses memory that NCCL has freed, and is recorded as a violation.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::state::Communicator;

/// One captured launch. The graph's node holds it, and each replay until its end.
pub(crate) struct Captured(Arc<Communicator>);

impl Captured {
    /// Counts a captured launch.
    pub(crate) fn new(communicator: &Arc<Communicator>) -> Arc<Self> {
        let count = &communicator.captured;
        *count.launches.lock() += 1;
        Arc::new(Self(Arc::clone(communicator)))
    }

    /// Records a violation if the communicator is gone. Called before each replay.
    pub(crate) fn check(&self) {
        if self.0.captured.freed.load(Ordering::Acquire) {
            self.0.violation(
                "a graph runs an operation of this communicator, which was destroyed or aborted: in NCCL a use after \
                 free",
            );
        }
    }

    /// Returns the communicator of the launch.
    pub(crate) fn communicator(&self) -> &Arc<Communicator> {
        &self.0
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        let count = &self.0.captured;
        let mut launches = count.launches.lock();
        *launches -= 1;
        if *launches == 0 {
            count.none.notify_all();
        }
    }
}

//! Launches that were captured into graphs.
//!
//! A graph can run them again until it is destroyed, so its communicator has to be there until
//! then: finalize, destroy and abort wait for all such graphs, as in NCCL, and an abort is no
//! exception. Only a communicator that was finalized by a revoke goes without them; a replay after
//! that uses what NCCL has freed, and is recorded.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::state::Communicator;

/// One captured launch. Held by the graph's node, and by each of its replays until it is over.
pub(crate) struct Captured(Arc<Communicator>);

impl Captured {
    /// Counts one more.
    pub(crate) fn new(communicator: &Arc<Communicator>) -> Arc<Self> {
        let count = &communicator.captured;
        *count.launches.lock() += 1;
        Arc::new(Self(Arc::clone(communicator)))
    }

    /// A graph is about to run the launch again.
    pub(crate) fn check(&self) {
        if self.0.captured.freed.load(Ordering::Acquire) {
            self.0.violation(
                "a graph runs an operation of this communicator, which was destroyed or aborted: in NCCL a use after \
                 free",
            );
        }
    }

    /// Whose launch it is.
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

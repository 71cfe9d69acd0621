//! The ranks of one communicator in this process.
//!
//! NCCL frees no resources of these ranks before the last of them is destroyed or aborted: until
//! then destroy and abort only count, and return. The emulator does the same.

use std::sync::Arc;

use cuda_emulator::sync::{Mutex, MutexGuard};

/// See the module; `C` is one rank's end of the communicator.
pub(super) struct Clique<C> {
    members: Mutex<Members<C>>,
}

struct Members<C> {
    all: Vec<Arc<C>>,
    /// The number of members that were destroyed or aborted.
    reclaimed: usize,
}

impl<C> Default for Clique<C> {
    fn default() -> Self {
        let members = Members {
            all: Vec::new(),
            reclaimed: 0,
        };
        Self {
            members: Mutex::new(members),
        }
    }
}

impl<C> Clique<C> {
    /// Adds a rank that has met the others. Called before its init ends, so that no rank can be
    /// reclaimed before all have joined.
    pub(super) fn join(&self, communicator: &Arc<C>) {
        self.lock().all.push(Arc::clone(communicator));
    }

    /// Counts a rank that is destroyed or aborted. For the last of `local` ranks, returns all of
    /// them, to be freed together.
    pub(super) fn reclaim(&self, local: usize) -> Option<Vec<Arc<C>>> {
        let mut members = self.lock();
        members.reclaimed += 1;
        // A rank whose init failed early never joined, and is not waited for.
        if members.reclaimed < local.min(members.all.len()) {
            return None;
        }
        members.reclaimed = 0;
        Some(std::mem::take(&mut members.all))
    }

    fn lock(&self) -> MutexGuard<'_, Members<C>> {
        self.members.lock()
    }
}

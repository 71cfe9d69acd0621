//! The ranks of one communicator that live in this process.
//!
//! NCCL frees nothing of a communicator before the last of them is destroyed or aborted: until then
//! destroy and abort only count, and return. The emulator does the same.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};

use cuda_emulator::sync::Mutex;

use super::{Communicator, Session};

/// See the module.
#[derive(Default)]
pub(super) struct Clique {
    members: Mutex<Members>,
}

#[derive(Default)]
struct Members {
    all: Vec<Arc<Communicator>>,
    /// How many of them were destroyed or aborted.
    reclaimed: usize,
}

static CLIQUES: LazyLock<Mutex<HashMap<u64, Weak<Clique>>>> = LazyLock::new(Mutex::default);

/// The clique of a session's communicator in this process.
pub(super) fn of(session: &Session) -> Arc<Clique> {
    let mut cliques = CLIQUES.lock();
    cliques.retain(|_, clique| clique.strong_count() > 0);
    if let Some(clique) = cliques.get(&session.token).and_then(Weak::upgrade) {
        return clique;
    }
    let clique = Arc::new(Clique::default());
    cliques.insert(session.token, Arc::downgrade(&clique));
    clique
}

impl Clique {
    /// A rank has met the others. Before its init ends, so that no rank can be reclaimed before all
    /// have joined.
    pub(super) fn join(&self, communicator: &Arc<Communicator>) {
        self.lock().all.push(Arc::clone(communicator));
    }

    /// A rank is destroyed or aborted. For the last of `local` ranks: all of them, to be freed
    /// together.
    pub(super) fn reclaim(&self, local: usize) -> Option<Vec<Arc<Communicator>>> {
        let mut members = self.lock();
        members.reclaimed += 1;
        // A rank whose init failed early never joined, and is not waited for.
        if members.reclaimed < local.min(members.all.len()) {
            return None;
        }
        members.reclaimed = 0;
        Some(std::mem::take(&mut members.all))
    }

    fn lock(&self) -> cuda_emulator::sync::MutexGuard<'_, Members> {
        self.members.lock()
    }
}

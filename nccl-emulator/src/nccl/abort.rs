//! The abort flag: seen by everything that waits on a communicator's behalf. An abort raises it for
//! good; a revoke, and a shrink that aborts, lower it again when nothing of the communicator runs any
//! more.
//!
//! An `Arc`, because communicators that share resources share one flag: raising it breaks them all.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_emulator::sync::Mutex;

use super::communicator::Session;

/// How often a wait that no bell can end looks at the flag.
pub(crate) const TICK: std::time::Duration = std::time::Duration::from_millis(5);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct AbortFlag {
    raised: AtomicBool,
    sessions: Mutex<Vec<Weak<Session>>>,
}

impl AbortFlag {
    /// Whether it is raised.
    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }

    /// Raises it and wakes who sleeps on a bell of this process's ranks.
    pub(crate) fn raise(&self) {
        self.raised.store(true, Ordering::SeqCst);
        let sessions = self.sessions.lock();
        for session in sessions.iter().filter_map(Weak::upgrade) {
            session.own().bell.ring();
        }
    }

    /// Lowers it: whoever has not seen it by now never will.
    pub(crate) fn lower(&self) {
        self.raised.store(false, Ordering::SeqCst);
    }

    /// From now on [`AbortFlag::raise`] wakes who sleeps on the bell of that rank.
    pub(crate) fn wakes(&self, session: Weak<Session>) {
        let mut sessions = self.sessions.lock();
        sessions.retain(|session| session.strong_count() > 0);
        sessions.push(session);
    }
}

//! The abort flag, which every wait on a communicator's behalf checks. An abort raises it for good; a
//! revoke, and a shrink that aborts, lower it again once no work of the communicator runs.
//!
//! The flag is in an `Arc`, because communicators that share resources share one flag: raising it
//! aborts them all.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_emulator::sync::Mutex;

use super::communicator::Session;

/// The interval at which a wait that no bell ends checks the flag.
pub(crate) const TICK: std::time::Duration = std::time::Duration::from_millis(5);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct AbortFlag {
    raised: AtomicBool,
    sessions: Mutex<Vec<Weak<Session>>>,
}

impl AbortFlag {
    /// Whether the flag is raised.
    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }

    /// Raises the flag and wakes the threads that sleep on the bells of this process's ranks.
    pub(crate) fn raise(&self) {
        self.raised.store(true, Ordering::SeqCst);
        let sessions = self.sessions.lock();
        for session in sessions.iter().filter_map(Weak::upgrade) {
            session.own().bell.ring();
        }
    }

    /// Lowers the flag. A waiter that has not seen it by now never will.
    pub(crate) fn lower(&self) {
        self.raised.store(false, Ordering::SeqCst);
    }

    /// Makes [`AbortFlag::raise`] wake the threads that sleep on the bell of the session's rank.
    pub(crate) fn wakes(&self, session: Weak<Session>) {
        let mut sessions = self.sessions.lock();
        sessions.retain(|session| session.strong_count() > 0);
        sessions.push(session);
    }
}

//! How a rank leaves the others: with its world, with its communicators, or with its process.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::handle::{RankSession, SessionBackend};
use crate::application::CommunicatorSupervisor;
use crate::departure::{Departure, Failure};
use crate::request::Request;
use crate::sync::{Condvar, Mutex};

/// How long a leave message may take to be written.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// The sessions that have communicators.
static OPEN: Mutex<Vec<Weak<RankSession>>> = Mutex::new(Vec::new());

/// How many of these sessions have not left yet.
static LEAVING: Mutex<usize> = Mutex::new(0);

static LEFT: Condvar = Condvar::new();

/// Leaves for a process that exits with `status`, and with communicators that were not dropped. With a status other than 0,
/// the other ranks do not wait for it.
pub fn leave_all(status: i32) {
    let open: Vec<_> = OPEN.lock().iter().filter_map(Weak::upgrade).collect();
    for session in &open {
        if matches!(session.backend(), SessionBackend::Threads(_)) {
            // The other ranks are threads that end as well.
            session.finish_leaving();
            continue;
        }
        if status != 0 {
            *session.final_departure.lock() = Departure::Failed(Failure::Exits(status));
        }
        session.leave();
    }
    // Dropping them would leave a second time.
    open.into_iter().for_each(std::mem::forget);
    // Another thread may just have dropped a session, and is about to leave.
    let mut leaving = LEAVING.lock();
    LEFT.wait_while_for(&mut leaving, |leaving| *leaving > 0, LEAVE_TIMEOUT);
}

impl RankSession {
    /// Returns the watcher of this session's communicators, made by `start` for the first of them. From then on the session stays open
    /// until it has left, also when the process exits.
    pub fn watcher(
        self: &Arc<Self>,
        start: impl FnOnce(&Arc<Self>) -> Arc<dyn CommunicatorSupervisor>,
    ) -> Arc<dyn CommunicatorSupervisor> {
        Arc::clone(self.watcher.get_or_init(|| {
            let mut open = OPEN.lock();
            open.retain(|session| session.strong_count() > 0);
            open.push(Arc::downgrade(self));
            *LEAVING.lock() += 1;
            start(self)
        }))
    }

    /// Reports that this rank fails, whatever happens to this value.
    pub(crate) fn fail(&self, chain: String) {
        let why = Failure::Said(chain);
        if self.watcher.get().is_some() {
            // Its communicators still have to end, and the other ranks wait for that.
            return self.send(u64::MAX, Request::Linger { why: Some(why) });
        }
        match &self.backend {
            SessionBackend::Node { node, .. } => node.fail(why),
            SessionBackend::Threads(threads) => threads.leave(self.rank, Departure::Failed(why)),
        }
    }

    /// Ends the world; `alone` if nothing else has the session.
    pub(crate) fn end_world(&self, final_departure: Departure, alone: bool) {
        if alone {
            *self.final_departure.lock() = final_departure;
            return;
        }
        let why = match final_departure {
            Departure::Failed(why) => Some(why),
            Departure::Left | Departure::Lost(_) => None,
        };
        self.send(u64::MAX, Request::Linger { why });
    }

    /// Sends the leave message, for good.
    fn leave(&self) {
        let final_departure = std::mem::replace(&mut *self.final_departure.lock(), Departure::Left);
        match &self.backend {
            SessionBackend::Node { node, generation } => node.leave(*generation, final_departure),
            SessionBackend::Threads(threads) => threads.leave(self.rank, final_departure),
        }
        self.finish_leaving();
    }

    /// Ends the wait of [`leave_all`] for this session.
    fn finish_leaving(&self) {
        if self.watcher.get().is_some() {
            *LEAVING.lock() -= 1;
            LEFT.notify_all();
        }
    }
}

impl Drop for RankSession {
    fn drop(&mut self) {
        self.leave();
    }
}

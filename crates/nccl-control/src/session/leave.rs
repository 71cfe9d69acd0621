//! How a rank leaves the other ranks: with its world, with its communicators, or with its process.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::handle::{RankSession, SessionBackend};
use crate::application::FaultListener;
use crate::departure::{Departure, Failure};
use crate::request::{NO_ANSWER, Request};
use crate::sync::{Condvar, Mutex};

/// How long writing a leave message may take.
const LEAVE_WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// The sessions that have communicators.
static SESSIONS_WITH_COMMUNICATORS: Mutex<Vec<Weak<RankSession>>> = Mutex::new(Vec::new());

/// The number of these sessions that have not left yet.
static SESSIONS_TO_LEAVE: Mutex<usize> = Mutex::new(0);

/// Signalled when one of these sessions has left.
static SESSION_LEFT: Condvar = Condvar::new();

/// Leaves for a process that exits with `status` while some communicators have not been dropped. If the status is not
/// 0, the other ranks do not wait for this one.
pub fn leave_all(status: i32) {
    let sessions = SESSIONS_WITH_COMMUNICATORS.lock();
    let open: Vec<_> = sessions.iter().filter_map(Weak::upgrade).collect();
    drop(sessions);
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
    // Dropping the sessions would leave a second time.
    open.into_iter().for_each(std::mem::forget);
    // Another thread may just have dropped a session and be about to leave.
    let mut to_leave = SESSIONS_TO_LEAVE.lock();
    SESSION_LEFT.wait_while_for(&mut to_leave, |count| *count > 0, LEAVE_WRITE_TIMEOUT);
}

impl RankSession {
    /// Returns the fault listener of this session's communicators, created by `start` for the first of them. From then
    /// on, the session stays open until it has left, even when the process exits.
    pub fn fault_listener_with(
        self: &Arc<Self>,
        start: impl FnOnce(&Arc<Self>) -> Arc<dyn FaultListener>,
    ) -> Arc<dyn FaultListener> {
        Arc::clone(self.fault_listener.get_or_init(|| {
            let mut sessions = SESSIONS_WITH_COMMUNICATORS.lock();
            sessions.retain(|session| session.strong_count() > 0);
            sessions.push(Arc::downgrade(self));
            *SESSIONS_TO_LEAVE.lock() += 1;
            start(self)
        }))
    }

    /// Reports that this rank fails, independent of the lifetime of this value.
    pub(crate) fn fail(&self, chain: String) {
        let why = Failure::Error(chain);
        if self.fault_listener.get().is_some() {
            // The communicators of this rank still have to end, and the other ranks wait for that.
            return self.send(NO_ANSWER, Request::LeaveWorld { why: Some(why) });
        }
        match &self.backend {
            SessionBackend::Node { node, .. } => node.fail(why),
            SessionBackend::Threads(threads) => threads.leave(self.rank, Departure::Failed(why)),
        }
    }

    /// Ends the world; `alone` states that nothing else holds the session.
    pub(crate) fn end_world(&self, final_departure: Departure, alone: bool) {
        if alone {
            *self.final_departure.lock() = final_departure;
            return;
        }
        let why = match final_departure {
            Departure::Failed(why) => Some(why),
            Departure::Left | Departure::Lost(_) => None,
        };
        self.has_left_world.store(true, Ordering::Release);
        self.send(NO_ANSWER, Request::LeaveWorld { why });
    }

    /// Sends the final leave message.
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
        if self.fault_listener.get().is_some() {
            *SESSIONS_TO_LEAVE.lock() -= 1;
            SESSION_LEFT.notify_all();
        }
    }
}

impl Drop for RankSession {
    fn drop(&mut self) {
        self.leave();
    }
}

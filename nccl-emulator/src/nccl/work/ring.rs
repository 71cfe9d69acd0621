//! Waking a launch that waits for a time.

use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::nccl::communicator::Session;
use crate::nccl::timer;

/// Wakes the threads that sleep on the bell of the session's rank.
pub(super) fn ring(session: &Weak<Session>) {
    if let Some(session) = session.upgrade() {
        session.own().bell.ring();
    }
}

/// Calls [`ring`] at a given time.
pub(super) fn ring_at(when: Instant, session: &Arc<Session>) {
    let session = Arc::downgrade(session);
    timer::at(when, move || ring(&session));
}

//! Waking a launch that waits for a time.

use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::nccl::communicator::Session;
use crate::nccl::timer;

/// Wakes whoever sleeps on the bell of that rank.
pub(super) fn ring(session: &Weak<Session>) {
    if let Some(session) = session.upgrade() {
        session.own().bell.ring();
    }
}

/// [`ring`], at a time.
pub(super) fn ring_at(when: Instant, session: &Arc<Session>) {
    let session = Arc::downgrade(session);
    timer::at(when, move || ring(&session));
}

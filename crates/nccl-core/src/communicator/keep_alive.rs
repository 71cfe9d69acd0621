//! A communicator of things that cannot use it.
//!
//! A registration, and what is left of a dropped plan, keep their communicator until the work that uses
//! their memory is over, but nobody can issue anything through them, nor wait or abort. When nobody else has the communicator any more, that is a dropped communicator: work that does not come
//! to its end within the finalize limit is ended by an abort, as a finalize would be.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::{Communicator, Inner, Why};
use crate::reaper;

/// See the module.
pub(crate) struct KeepAlive {
    comm: Communicator,
    /// Since when nobody else has it.
    alone_since: Option<Instant>,
}

impl KeepAlive {
    pub(crate) fn new(comm: Communicator) -> Self {
        comm.inner.kept.fetch_add(1, Ordering::AcqRel);
        Self {
            comm,
            alone_since: None,
        }
    }

    /// To be called while something is waited for.
    pub(crate) fn watch(&mut self) {
        let inner = &self.comm.inner;
        // Only who has it can give it to others.
        if Arc::strong_count(inner) > inner.kept.load(Ordering::Acquire) {
            self.alone_since = None;
            return;
        }
        let since = *self.alone_since.get_or_insert_with(Instant::now);
        if since.elapsed() > inner.timeouts.finalize || reaper::is_in_a_hurry() {
            inner.abort_in_background(Why::Quietly(
                "it was dropped, and its last operations did not end",
            ));
        }
    }
}

impl Deref for KeepAlive {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        &self.comm
    }
}

/// A communicator for the moment of a look at it, by somebody who does not keep it.
///
/// The end of a communicator calls CUDA. Should the last handle go during the look, that is done on another thread: those that
/// look must get on even if the driver is stuck.
pub(crate) struct Visit(ManuallyDrop<Arc<Inner>>);

impl Visit {
    /// `None` when it was dropped.
    pub(crate) fn of(inner: &Weak<Inner>) -> Option<Self> {
        let inner = inner.upgrade()?;
        inner.kept.fetch_add(1, Ordering::AcqRel);
        Some(Self(ManuallyDrop::new(inner)))
    }
}

impl Deref for Visit {
    type Target = Arc<Inner>;

    fn deref(&self) -> &Arc<Inner> {
        &self.0
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.kept.fetch_sub(1, Ordering::AcqRel);
        // SAFETY: taken once, here, and not used afterwards.
        let inner = unsafe { ManuallyDrop::take(&mut self.0) };
        if let Some(last) = Arc::into_inner(inner)
            && let Err(last) = reaper::on_a_thread(last, drop)
        {
            std::mem::forget(last);
        }
    }
}

impl Drop for KeepAlive {
    fn drop(&mut self) {
        self.comm.inner.kept.fetch_sub(1, Ordering::AcqRel);
    }
}

//! The communicator handle of objects that only keep the communicator alive.
//!
//! A registration, and the deferred part of a dropped plan, keep their communicator until the work that uses their memory
//! is over, but the program cannot issue, wait or abort through them. Once only such handles are left, the communicator
//! counts as dropped: if work does not end within the finalize timeout, the communicator is aborted, as a finalize would
//! do.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::{Communicator, EndReason, Inner};
use crate::drop_queue;

/// A handle that keeps a communicator alive; see the module.
#[doc(hidden)]
pub struct KeepAlive {
    comm: Communicator,
    /// When the last other handle was found to be dropped.
    alone_since: Option<Instant>,
}

impl KeepAlive {
    #[doc(hidden)]
    pub fn new(comm: Communicator) -> Self {
        comm.inner.non_user_handles.fetch_add(1, Ordering::AcqRel);
        Self {
            comm,
            alone_since: None,
        }
    }

    /// Aborts a dropped communicator whose work takes too long; to be called while waiting for the work.
    pub(crate) fn abort_if_overdue(&mut self) {
        let inner = &self.comm.inner;
        // Only an existing handle can be cloned, so handles of users do not come back.
        if Arc::strong_count(inner) > inner.non_user_handles.load(Ordering::Acquire) {
            self.alone_since = None;
            return;
        }
        let since = *self.alone_since.get_or_insert_with(Instant::now);
        if since.elapsed() > inner.timeouts.finalize || drop_queue::is_exiting() {
            inner.abort_in_background(EndReason::Unannounced(
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

/// A temporary handle, for reading a communicator's state; it does not count as a user of the communicator.
///
/// The end of a communicator calls CUDA. If the last other handle is dropped while this one exists, that end runs on
/// another thread, so that the reading thread does not block even if the driver is stuck.
pub(crate) struct TemporaryHandle(ManuallyDrop<Arc<Inner>>);

impl TemporaryHandle {
    /// Returns `None` if the communicator was dropped.
    pub(crate) fn of(inner: &Weak<Inner>) -> Option<Self> {
        let inner = inner.upgrade()?;
        inner.non_user_handles.fetch_add(1, Ordering::AcqRel);
        Some(Self(ManuallyDrop::new(inner)))
    }
}

impl Deref for TemporaryHandle {
    type Target = Arc<Inner>;

    fn deref(&self) -> &Arc<Inner> {
        &self.0
    }
}

impl Drop for TemporaryHandle {
    fn drop(&mut self) {
        self.0.non_user_handles.fetch_sub(1, Ordering::AcqRel);
        // SAFETY: taken once, here, and not used afterwards.
        let inner = unsafe { ManuallyDrop::take(&mut self.0) };
        if let Some(last) = Arc::into_inner(inner)
            && let Err(last) = drop_queue::run_on_thread(last, drop)
        {
            std::mem::forget(last);
        }
    }
}

impl Drop for KeepAlive {
    fn drop(&mut self) {
        self.comm
            .inner
            .non_user_handles
            .fetch_sub(1, Ordering::AcqRel);
    }
}

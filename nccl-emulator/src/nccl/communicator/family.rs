//! The common state of communicators that share resources.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The common state of communicators that share resources: their memory manager.
#[derive(Debug)]
pub(crate) struct Family {
    /// The number of these communicators that are not destroyed.
    pub(super) members: AtomicU32,
    pub(super) suspended: AtomicBool,
    /// Whether one of them is connected to a rank of another process, for which NCCL has a proxy
    /// thread.
    has_proxy: AtomicBool,
}

impl Default for Family {
    fn default() -> Self {
        Self {
            members: AtomicU32::new(1),
            suspended: AtomicBool::new(false),
            has_proxy: AtomicBool::new(false),
        }
    }
}

impl Family {
    /// Returns the number of these communicators that are not destroyed.
    pub(crate) fn members(&self) -> u32 {
        self.members.load(Ordering::Acquire)
    }

    /// Notes a connection to a rank of another process.
    pub(super) fn needs_proxy(&self) {
        self.has_proxy.store(true, Ordering::Release);
    }

    /// Whether all of them are destroyed and they had a proxy.
    pub(super) fn ends_proxy(&self) -> bool {
        self.members() == 0 && self.has_proxy.load(Ordering::Acquire)
    }

    /// Whether their memory is suspended.
    pub(crate) fn is_suspended(&self) -> bool {
        self.suspended.load(Ordering::Acquire)
    }
}

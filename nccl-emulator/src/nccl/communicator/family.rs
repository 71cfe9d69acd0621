//! What communicators that share resources have together.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// What communicators that share resources have together: the manager of their memory.
#[derive(Debug)]
pub(crate) struct Family {
    /// How many of them are not destroyed.
    pub(super) members: AtomicU32,
    pub(super) suspended: AtomicBool,
    /// Whether one is connected to a rank of another process: a thread of NCCL's does that, the proxy.
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
    /// How many of them are not destroyed.
    pub(crate) fn members(&self) -> u32 {
        self.members.load(Ordering::Acquire)
    }

    /// Notes a connection to a rank of another process.
    pub(super) fn needs_proxy(&self) {
        self.has_proxy.store(true, Ordering::Release);
    }

    /// Whether all of them are destroyed, and had a proxy.
    pub(super) fn ends_proxy(&self) -> bool {
        self.members() == 0 && self.has_proxy.load(Ordering::Acquire)
    }

    /// Whether their memory is given up.
    pub(crate) fn is_suspended(&self) -> bool {
        self.suspended.load(Ordering::Acquire)
    }
}

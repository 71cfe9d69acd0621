//! A futex word with a count of sleepers: ring it, or sleep until it rings.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// May live in memory shared between processes.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Bell {
    value: AtomicU32,
    sleepers: AtomicU32,
}

impl Bell {
    /// A bell that has not rung. All-zero memory is one too.
    pub(crate) const fn new() -> Self {
        Self {
            value: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
        }
    }

    /// The present value: read it before the conditions, pass it to [`Bell::wait`].
    pub(crate) fn value(&self) -> u32 {
        todo!()
    }

    /// Lets everyone go on who waits for a change since their `seen`. A syscall only if someone sleeps.
    pub(crate) fn ring(&self) {
        todo!()
    }

    /// Sleeps while the value is `seen`, at most `timeout`. False if the time ran out.
    pub(crate) fn wait(&self, seen: u32, timeout: Duration) -> bool {
        let _ = (seen, timeout, &self.value, &self.sleepers);
        todo!()
    }
}

//! Whether this process was forked from one that used the emulator.
//!
//! A child has its own copy of the tables of memory and streams, but shares the device memory itself with its parent, and has
//! none of its threads. So everything refuses to work in it, as CUDA does.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Whether this process was forked from one that had used the driver or device memory before.
pub fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Notes that this process uses the emulator: processes that are forked from now on are children.
pub(crate) fn watch() {
    unsafe extern "C" fn after_fork() {
        IS_CHILD.store(true, Ordering::Relaxed);
    }
    static WATCHED: Once = Once::new();
    // SAFETY: the handler only stores to an atomic.
    WATCHED.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(after_fork));
    });
}

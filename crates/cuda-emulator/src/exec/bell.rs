//! A futex word with a count of sleepers: ring it, or sleep until it rings.
//!
//! Used for the end of a stream's jobs (in this process) and, by the NCCL side, in memory shared
//! between processes. Neither side holds a lock, so a killed process leaves the bell usable.
//!
//! Why no ring is lost. A ringer changes the bell's condition, then adds one to `value`, then
//! reads `sleepers`. A sleeper reads `value`, then checks the condition, then adds
//! itself to `sleepers`, and lets the kernel compare `value` once more before it sleeps. All of
//! these are sequentially consistent, so either the ringer sees the sleeper and wakes it, or the
//! sleeper's comparison sees the new value and does not sleep. `tests/loom.rs` walks every
//! interleaving of this.

use std::time::Duration;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

/// A futex word and the number of its sleepers. May live in memory shared between processes;
/// all-zero memory is a bell that has not rung.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Bell {
    value: AtomicU32,
    sleepers: AtomicU32,
}

impl Bell {
    /// A bell that has not rung.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self {
            value: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
        }
    }

    /// Returns the present value. Read it before the conditions, and pass it to [`Bell::wait`].
    pub fn value(&self) -> u32 {
        self.value.load(Ordering::SeqCst)
    }

    /// Changes the value and wakes all sleepers. Makes a syscall only if a thread sleeps.
    pub fn ring(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        in_loom();
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            futex::wake_all(&self.value);
        }
    }

    /// Sleeps while the value is `seen`, at most `timeout`. Returns whether the value has changed.
    /// May return early with `false` (a signal).
    pub fn wait(&self, seen: u32, timeout: Duration) -> bool {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        in_loom();
        if self.value.load(Ordering::SeqCst) == seen {
            futex::wait(&self.value, seen, timeout);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        self.value.load(Ordering::SeqCst) != seen
    }
}

/// Keeps the access before it and the access after it in order under loom, which weakens
/// sequentially consistent accesses but not fences. In a real build the accesses themselves
/// suffice.
pub(super) fn in_loom() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}

/// The kernel's two calls, without the flag that confines them to one process.
#[cfg(not(loom))]
pub(crate) mod futex {
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    /// Sleeps if `*word == expected`, at most `timeout`.
    pub(crate) fn wait(word: &AtomicU32, expected: u32, timeout: Duration) {
        let limit = libc::timespec {
            tv_sec: timeout.as_secs().min(3600) as libc::time_t,
            tv_nsec: timeout.subsec_nanos() as libc::c_long,
        };
        // SAFETY: the kernel reads four bytes at `word` and the timespec, both alive for the call.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                libc::FUTEX_WAIT,
                expected,
                &raw const limit,
                std::ptr::null::<u32>(),
                0,
            );
        }
    }

    /// Wakes all threads that sleep on `word`.
    pub(crate) fn wake_all(word: &AtomicU32) {
        // SAFETY: the kernel uses the address of `word` as a key and writes nothing.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        }
    }
}

/// The kernel's promise for loom: compare and sleep are one step, against wake.
#[cfg(loom)]
mod futex {
    use super::{AtomicU32, Duration, Ordering};
    use loom::sync::{Condvar, Mutex};

    loom::lazy_static! {
        static ref KERNEL: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    pub(super) fn wait(word: &AtomicU32, expected: u32, _: Duration) {
        let mut inside = KERNEL.0.lock().unwrap();
        // Without a timeout: a lost ring shows as a deadlock.
        while word.load(Ordering::SeqCst) == expected {
            inside = KERNEL.1.wait(inside).unwrap();
        }
    }

    pub(super) fn wake_all(_: &AtomicU32) {
        let _inside = KERNEL.0.lock().unwrap();
        KERNEL.1.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_sleeper_is_woken_by_a_ring() {
        let bell = Bell::new();
        let seen = bell.value();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                bell.ring();
            });
            let start = Instant::now();
            while !bell.wait(seen, Duration::from_secs(5)) {}
            assert!(
                start.elapsed() < Duration::from_secs(4),
                "woken by the ring, not by the timeout"
            );
        });
    }

    #[test]
    fn a_ring_before_the_wait_is_not_lost() {
        let bell = Bell::new();
        let seen = bell.value();
        bell.ring();
        let start = Instant::now();
        assert!(bell.wait(seen, Duration::from_secs(5)));
        assert!(start.elapsed() < Duration::from_secs(1));
    }

    #[test]
    fn a_wait_ends_at_its_timeout() {
        let bell = Bell::new();
        assert!(!bell.wait(bell.value(), Duration::from_millis(5)));
    }
}

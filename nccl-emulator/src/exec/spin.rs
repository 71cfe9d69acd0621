//! How a runner waits for a blocked job: spin, yield, sleep.
//!
//! A message between two ranks that both have a core takes about a microsecond when both spin, and
//! twenty to fifty when the receiver sleeps. A rank that spins on a core which another rank needs
//! makes that other rank late. So a runner spins for a short while, and only while those who spin
//! are no more than the cores; then it gives its core away and asks again now and then; then it
//! sleeps until the bell rings.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::run::Chain;
use super::{Bell, Work};

/// How long a runner may spin before it gives its core away.
const SPIN: Duration = Duration::from_micros(50);
/// How long it may go on yielding, counted from the same moment.
const YIELD: Duration = Duration::from_micros(100);
/// The longest sleep: whoever should ring may have been killed.
pub(super) const NAP: Duration = Duration::from_millis(100);
/// Looks at the bell between two looks at the clock.
const LOOKS: u32 = 32;

/// Spinning executors of this process; the default for [`Work::spinners`].
pub(crate) fn local_spinners() -> &'static AtomicU32 {
    static SPINNERS: AtomicU32 = AtomicU32::new(0);
    &SPINNERS
}

/// Cores this process may use, by its affinity and its control group.
pub(crate) fn cores() -> u32 {
    static CORES: OnceLock<u32> = OnceLock::new();
    *CORES.get_or_init(|| {
        // The affinity of the process, not of this thread, which may be pinned.
        // SAFETY: an all-zero cpu_set_t is an empty set; the kernel writes at most its size.
        let allowed = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            if libc::sched_getaffinity(libc::getpid(), size_of::<libc::cpu_set_t>(), &raw mut set)
                == 0
            {
                libc::CPU_COUNT(&set) as u32
            } else {
                u32::MAX
            }
        };
        let granted = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        // A pinned thread is granted one core; its process may have more.
        if granted > 1 {
            allowed.min(granted)
        } else {
            allowed.min(1024)
        }
        .max(1)
    })
}

/// Counts the calling thread as spinning while it lives.
struct Spinning<'a>(&'a AtomicU32);

impl<'a> Spinning<'a> {
    fn start(count: &'a AtomicU32) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Spinning<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Waits until the blocked job should be stepped again, or the runner has other reasons to look up.
pub(super) fn rest(work: &dyn Work, seen: u32, chain: &Chain<'_>) {
    let bell = work.bell();
    if patient(bell, seen, work.spinners(), chain) {
        return;
    }
    chain.park(bell, seen);
}

/// Spins and yields. True when there is something to do.
pub(super) fn patient(bell: &Bell, seen: u32, count: &AtomicU32, chain: &Chain<'_>) -> bool {
    let start = Instant::now();
    let limit = cores();
    let spinning = Spinning::start(count);
    loop {
        for _ in 0..LOOKS {
            if bell.value() != seen {
                return true;
            }
            std::hint::spin_loop();
        }
        if chain.interrupted() || super::run::help() {
            return true;
        }
        if count.load(Ordering::Relaxed) > limit || start.elapsed() >= SPIN {
            break;
        }
    }
    drop(spinning);
    while start.elapsed() < YIELD {
        std::thread::yield_now();
        if bell.value() != seen || chain.interrupted() || super::run::help() {
            return true;
        }
    }
    false
}

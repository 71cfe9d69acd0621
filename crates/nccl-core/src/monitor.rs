//! The monitor: one thread that enforces deadlines, and calls neither NCCL nor CUDA.
//!
//! It runs three checks: calls that block in a blocking communicator (`communicator/blocking_call_monitor.rs`), threads that
//! do not return from a call (`supervision/stuck_call_monitor.rs`), and a watchdog that is itself stuck
//! (`watchdog/threads.rs`). No check blocks this thread: work that may block gets a thread of its own, and a lock that may
//! be held for long is only tried. The monitor logs what it finds; if the program's log subscriber blocks, all three checks
//! are delayed.
//!
//! A check that finds nothing for a while sleeps until its [`WakeFlag`] is raised. On a call's path, raising the wake flag
//! costs one read of a word, without a fence. That suffices: a check that has announced its sleep runs once more a moment
//! later, and by then sees everything that was written before; a thread that writes later finds the check asleep and wakes it.
//! The monitor's thread sleeps while all checks sleep, and ends when no communicator is left.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::drop_queue;
use crate::sync::Mutex;

/// How long the thread stays after the last communicator is gone.
const IDLE: Duration = Duration::from_secs(1);
/// The pause before a check that has panicked runs again.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// A periodic check.
pub(crate) trait PeriodicCheck: Send {
    /// Runs the check. Must not block.
    fn check(&mut self) -> NextCheck;

    /// Whether there is nothing left to check.
    fn is_over(&self) -> bool;
}

/// When to check again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextCheck {
    After(Duration),
    /// When the wake flag is raised.
    Asleep,
}

/// Wakes a sleeping check.
pub(crate) struct WakeFlag(AtomicBool);

struct Monitor {
    thread: Option<Thread>,
    /// The wake flags of its checks.
    wake_flags: Vec<&'static WakeFlag>,
    /// Checks that the thread has not picked up yet.
    new: Vec<(&'static WakeFlag, Box<dyn PeriodicCheck>)>,
}

static MONITOR: Mutex<Monitor> = Mutex::new(Monitor {
    thread: None,
    wake_flags: Vec::new(),
    new: Vec::new(),
});

impl WakeFlag {
    pub(crate) const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Wakes the check, because there may be something to check.
    #[inline]
    pub(crate) fn raise(&self) {
        if !self.0.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if !self.0.swap(true, Ordering::SeqCst)
            && let Some(thread) = &MONITOR.lock().thread
        {
            thread.unpark();
        }
    }

    /// Lets the check sleep from now on, unless the wake flag is raised.
    pub(crate) fn lower(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    fn is_raised(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Decides when a check may sleep whose input is written without a fence.
pub(crate) struct IdleCounter {
    wake_flag: &'static WakeFlag,
    /// The interval of the check. After `quiet_after` runs that find nothing, the check sleeps.
    tick: Duration,
    quiet_after: u32,
    quiet: u32,
}

impl IdleCounter {
    pub(crate) fn new(wake_flag: &'static WakeFlag, tick: Duration, quiet_after: u32) -> Self {
        Self {
            wake_flag,
            tick,
            quiet_after,
            quiet: 0,
        }
    }

    /// Returns when to check again; `found` is whether the last check found something.
    pub(crate) fn after(&mut self, found: bool) -> NextCheck {
        self.quiet = if found { 0 } else { self.quiet + 1 };
        if self.quiet == 0 {
            // Covers something found after the check had announced its sleep.
            self.wake_flag.0.store(true, Ordering::SeqCst);
        } else if self.quiet == self.quiet_after {
            // The check runs once more.
            self.wake_flag.lower();
        } else if self.quiet > self.quiet_after {
            self.quiet = 0;
            if !self.wake_flag.is_raised() {
                return NextCheck::Asleep;
            }
        }
        NextCheck::After(self.tick)
    }
}

/// Adds the check of `wake_flag` to the monitor, unless it is there, and starts the thread, unless it runs. To be called when
/// there is something to check.
pub(crate) fn ensure<D: PeriodicCheck + 'static>(
    wake_flag: &'static WakeFlag,
    check: impl FnOnce() -> D,
) -> io::Result<()> {
    let mut monitor = MONITOR.lock();
    let thread = match &monitor.thread {
        Some(thread) => thread.clone(),
        None => {
            let spawned = std::thread::Builder::new()
                .name(String::from("nccl-monitor"))
                .spawn(run)?;
            spawned.thread().clone()
        }
    };
    if !monitor
        .wake_flags
        .iter()
        .any(|known| std::ptr::eq(*known, wake_flag))
    {
        monitor.wake_flags.push(wake_flag);
        monitor.new.push((wake_flag, Box::new(check())));
        thread.unpark();
    }
    monitor.thread = Some(thread);
    Ok(())
}

fn run() {
    let mut checks = Vec::new();
    let mut idle_since = None;
    loop {
        if drop_queue::is_exiting() {
            // The process is exiting: nothing is supervised any more.
            return;
        }
        let now = Instant::now();
        let new = std::mem::take(&mut MONITOR.lock().new).into_iter();
        checks.extend(new.map(|(wake_flag, check)| (wake_flag, check, Some(now))));
        for (wake_flag, check, due) in &mut checks {
            let is_due = match *due {
                Some(due) => due <= Instant::now(),
                None => wake_flag.is_raised(),
            };
            if is_due {
                // A check logs what it finds, and the program's subscriber may panic; the other checks must continue.
                let next = catch_unwind(AssertUnwindSafe(|| check.check()));
                *due = match next.unwrap_or(NextCheck::After(AFTER_PANIC)) {
                    NextCheck::After(pause) => Some(Instant::now() + pause),
                    NextCheck::Asleep => None,
                };
            }
        }
        if checks.iter().all(|(_, check, _)| check.is_over()) {
            let since = *idle_since.get_or_insert_with(Instant::now);
            // A thread that adds work calls `ensure` afterwards, which waits for this lock.
            let mut monitor = MONITOR.lock();
            let is_over =
                monitor.new.is_empty() && checks.iter().all(|(_, check, _)| check.is_over());
            if since.elapsed() >= IDLE && is_over {
                monitor.thread = None;
                monitor.wake_flags.clear();
                return;
            }
        } else {
            idle_since = None;
        }
        // If a wake flag was raised while another check ran, a wait inside that check may have consumed the wake-up.
        if checks
            .iter()
            .any(|(wake_flag, _, due)| due.is_none() && wake_flag.is_raised())
        {
            continue;
        }
        let due = checks.iter().filter_map(|(_, _, due)| *due);
        let due = due.chain(idle_since.map(|since| since + IDLE)).min();
        match due {
            Some(due) => {
                std::thread::park_timeout(due.saturating_duration_since(Instant::now()));
            }
            None => std::thread::park(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_sleeps_after_one_more_run_unless_its_wake_flag_was_raised() {
        static WAKE_FLAG: WakeFlag = WakeFlag::new();
        let tick = Duration::from_millis(5);
        let mut rest = IdleCounter::new(&WAKE_FLAG, tick, 2);
        for raises in [false, true] {
            assert_eq!(rest.after(true), NextCheck::After(tick));
            assert!(WAKE_FLAG.is_raised());
            assert_eq!(rest.after(false), NextCheck::After(tick));
            assert_eq!(rest.after(false), NextCheck::After(tick));
            assert!(!WAKE_FLAG.is_raised(), "it is about to sleep");
            if raises {
                WAKE_FLAG.raise();
            }
            let next = rest.after(false);
            assert_eq!(next == NextCheck::Asleep, !raises);
        }
        // The last check found something.
        rest.after(false);
        rest.after(false);
        assert_eq!(rest.after(true), NextCheck::After(tick));
        assert!(WAKE_FLAG.is_raised());
    }
}

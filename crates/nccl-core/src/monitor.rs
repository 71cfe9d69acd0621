//! The monitor: one thread that enforces deadlines, and calls neither NCCL nor CUDA.
//!
//! Three duties: calls that block in a blocking communicator (`communicator/guard.rs`), threads that do not return from a call
//! (`supervision/sentinel.rs`), and a watchdog that is itself stuck (`watchdog/threads.rs`). No duty blocks this thread: work that
//! may block gets a thread of its own, and a lock that may be held for longer is only tried. The monitor logs what it finds; a
//! subscriber of the program that blocks in a log call delays all three duties.
//!
//! A duty whose looks find nothing sleeps until its [`Bell`] rings. On the path of a call the bell costs one read of a word, without
//! a fence: a duty that has announced its sleep looks once more a moment later, and by then sees everything that was written
//! before; a later writer finds it asleep. The thread sleeps while all duties sleep, and ends when no communicator is left.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::reaper;
use crate::sync::Mutex;

/// How long the thread stays after the last communicator is gone.
const IDLE: Duration = Duration::from_secs(1);
/// When a duty whose look has panicked looks again.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// A periodic check.
pub(crate) trait Duty: Send {
    /// Looks. Must not block.
    fn look(&mut self) -> Next;

    /// Whether nothing is left that could need this duty.
    fn is_over(&self) -> bool;
}

/// When to look again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    After(Duration),
    /// When the bell rings.
    Asleep,
}

/// Wakes a sleeping duty.
pub(crate) struct Bell(AtomicBool);

struct Monitor {
    thread: Option<Thread>,
    /// The bells of its duties.
    bells: Vec<&'static Bell>,
    /// Duties that the thread has not taken over yet.
    new: Vec<(&'static Bell, Box<dyn Duty>)>,
}

static MONITOR: Mutex<Monitor> = Mutex::new(Monitor {
    thread: None,
    bells: Vec::new(),
    new: Vec::new(),
});

impl Bell {
    pub(crate) const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Tells the duty that there may be something to look at.
    #[inline]
    pub(crate) fn ring(&self) {
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

    /// Lets the duty sleep from now on, unless the bell rings.
    pub(crate) fn rest(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    fn has_rung(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Decides when a duty sleeps whose looks read words that are written without a fence.
pub(crate) struct Rest {
    bell: &'static Bell,
    /// How often the duty looks, and after how many empty looks it sleeps.
    tick: Duration,
    quiet_after: u32,
    quiet: u32,
}

impl Rest {
    pub(crate) fn new(bell: &'static Bell, tick: Duration, quiet_after: u32) -> Self {
        Self {
            bell,
            tick,
            quiet_after,
            quiet: 0,
        }
    }

    /// When to look again after a look that found something, or nothing.
    pub(crate) fn after(&mut self, found: bool) -> Next {
        self.quiet = if found { 0 } else { self.quiet + 1 };
        if self.quiet == 0 {
            // The finding may have come after the duty announced its sleep.
            self.bell.0.store(true, Ordering::SeqCst);
        } else if self.quiet == self.quiet_after {
            // The duty looks once more.
            self.bell.rest();
        } else if self.quiet > self.quiet_after {
            self.quiet = 0;
            if !self.bell.has_rung() {
                return Next::Asleep;
            }
        }
        Next::After(self.tick)
    }
}

/// Adds the duty of `bell` to the monitor, unless it is there, and starts the thread, unless it runs. To be called when
/// there is something to look at.
pub(crate) fn ensure<D: Duty + 'static>(
    bell: &'static Bell,
    duty: impl FnOnce() -> D,
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
    if !monitor.bells.iter().any(|known| std::ptr::eq(*known, bell)) {
        monitor.bells.push(bell);
        monitor.new.push((bell, Box::new(duty())));
        thread.unpark();
    }
    monitor.thread = Some(thread);
    Ok(())
}

fn run() {
    let mut duties = Vec::new();
    let mut idle_since = None;
    loop {
        if reaper::is_in_a_hurry() {
            // The process is exiting: nothing is supervised any more.
            return;
        }
        let now = Instant::now();
        let new = std::mem::take(&mut MONITOR.lock().new).into_iter();
        duties.extend(new.map(|(bell, duty)| (bell, duty, Some(now))));
        for (bell, duty, due) in &mut duties {
            let is_due = match *due {
                Some(due) => due <= Instant::now(),
                None => bell.has_rung(),
            };
            if is_due {
                // A look logs what it finds, and the program's subscriber may panic: the other duties go on all the same.
                let next = catch_unwind(AssertUnwindSafe(|| duty.look()));
                *due = match next.unwrap_or(Next::After(AFTER_PANIC)) {
                    Next::After(pause) => Some(Instant::now() + pause),
                    Next::Asleep => None,
                };
            }
        }
        if duties.iter().all(|(_, duty, _)| duty.is_over()) {
            let since = *idle_since.get_or_insert_with(Instant::now);
            // A thread that adds work calls `ensure` afterwards, and waits for this lock.
            let mut monitor = MONITOR.lock();
            let is_over =
                monitor.new.is_empty() && duties.iter().all(|(_, duty, _)| duty.is_over());
            if since.elapsed() >= IDLE && is_over {
                monitor.thread = None;
                monitor.bells.clear();
                return;
            }
        } else {
            idle_since = None;
        }
        // A bell that rang while another duty looked may have spent its wake-up on a wait inside that look.
        if duties
            .iter()
            .any(|(bell, _, due)| due.is_none() && bell.has_rung())
        {
            continue;
        }
        let due = duties.iter().filter_map(|(_, _, due)| *due);
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
    fn a_duty_sleeps_after_a_last_look_and_not_if_somebody_has_rung() {
        static BELL: Bell = Bell::new();
        let tick = Duration::from_millis(5);
        let mut rest = Rest::new(&BELL, tick, 2);
        for rings in [false, true] {
            assert_eq!(rest.after(true), Next::After(tick));
            assert!(BELL.has_rung());
            assert_eq!(rest.after(false), Next::After(tick));
            assert_eq!(rest.after(false), Next::After(tick));
            assert!(!BELL.has_rung(), "it has said that it sleeps");
            if rings {
                BELL.ring();
            }
            let next = rest.after(false);
            assert_eq!(next == Next::Asleep, !rings);
        }
        // Found by the last look.
        rest.after(false);
        rest.after(false);
        assert_eq!(rest.after(true), Next::After(tick));
        assert!(BELL.has_rung());
    }
}

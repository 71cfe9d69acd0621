//! The monitor of blocking calls: a periodic check that raises the abort flag of a blocking communicator when a call has been
//! inside NCCL for too long.
//!
//! A call only writes a word to memory ([`AbortFlagParent::enter`]), so that the blocking-call monitor costs the call neither a
//! system call nor a fence. The monitor reads all words every [`TICK`], and sleeps after a while without calls. A call that
//! does not return although its abort flag was raised is left to the stuck-call monitor (`supervision/stuck_call_monitor.rs`).

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::abort_flag_parent::{AbortFlagParent, CallCheck, WAKE_FLAG};
use crate::drop_queue;
use crate::error::Result;
use crate::monitor::{self, IdleCounter, NextCheck, PeriodicCheck};
use crate::sync::Mutex;
use crate::threads;

/// How often the blocking-call monitor checks. A call may end up to two ticks after its timeout, which starts at the first
/// check that finds the call.
const TICK: Duration = Duration::from_millis(5);

/// The number of checks without a call after which the blocking-call monitor sleeps.
const QUIET: u32 = 200;

static ABORT_FLAG_PARENTS: Mutex<Vec<Weak<AbortFlagParent>>> = Mutex::new(Vec::new());

/// Monitors calls on this communicator from now on, on the thread that [`ensure`] has started.
pub(crate) fn watch(abort_flag_parent: &Arc<AbortFlagParent>) {
    let mut abort_flag_parents = ABORT_FLAG_PARENTS.lock();
    abort_flag_parents.retain(|abort_flag_parent| abort_flag_parent.strong_count() > 0);
    abort_flag_parents.push(Arc::downgrade(abort_flag_parent));
}

/// Starts the monitor unless it runs.
///
/// # Errors
/// [`ErrorKind::Io`](crate::ErrorKind::Io) when no thread can be started.
pub(crate) fn ensure() -> Result<()> {
    monitor::ensure(&WAKE_FLAG, BlockingCallMonitor::new)
        .map_err(threads::not_started("that guards calls that block"))
}

/// The blocking-call monitor; see the module.
struct BlockingCallMonitor {
    calls: u64,
    rest: IdleCounter,
    /// Abort-flag parents that still have to be raised, because no thread could be started.
    to_raise: Vec<Arc<AbortFlagParent>>,
    /// Whether the lack of a thread has been logged.
    has_logged: bool,
}

impl BlockingCallMonitor {
    fn new() -> Self {
        Self {
            calls: 0,
            rest: IdleCounter::new(&WAKE_FLAG, TICK, QUIET),
            to_raise: Vec::new(),
            has_logged: false,
        }
    }

    /// Checks every communicator once. Returns whether a call was made since the last check, or is inside.
    fn check_all(&mut self) -> bool {
        let abort_flag_parents: Vec<Arc<AbortFlagParent>> = ABORT_FLAG_PARENTS
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        let (mut inside, mut now) = (false, 0_u64);
        let mut to_raise = std::mem::take(&mut self.to_raise);
        for abort_flag_parent in &abort_flag_parents {
            now = now.wrapping_add(abort_flag_parent.calls());
            match abort_flag_parent.check() {
                CallCheck::NoCall => continue,
                CallCheck::InTime | CallCheck::Ended => {}
                CallCheck::ToEnd => {
                    to_raise.push(Arc::clone(abort_flag_parent));
                    to_raise.extend(
                        abort_flag_parent
                            .group_members()
                            .iter()
                            .filter_map(Weak::upgrade),
                    );
                }
            }
            inside = true;
        }
        to_raise
            .into_iter()
            .for_each(|abort_flag_parent| self.raise(abort_flag_parent));
        let called = now != self.calls;
        self.calls = now;
        inside || called || !self.to_raise.is_empty()
    }

    /// Raises the flag on a thread of its own, because NCCL may take long.
    fn raise(&mut self, abort_flag_parent: Arc<AbortFlagParent>) {
        if drop_queue::is_closed() {
            return;
        }
        let raised = Arc::clone(&abort_flag_parent);
        let spawned = threads::spawn("nccl-abort", move || raised.raise());
        match spawned {
            Ok(_) => self.has_logged = false,
            Err(error) => {
                if !std::mem::replace(&mut self.has_logged, true) {
                    crate::events::no_thread("to end a call; it is tried again", &error);
                }
                self.to_raise.push(abort_flag_parent);
            }
        }
    }
}

impl PeriodicCheck for BlockingCallMonitor {
    fn check(&mut self) -> NextCheck {
        let found = self.check_all();
        self.rest.after(found)
    }

    fn is_over(&self) -> bool {
        let abort_flag_parents = ABORT_FLAG_PARENTS.try_lock();
        abort_flag_parents.is_some_and(|abort_flag_parents| {
            abort_flag_parents
                .iter()
                .all(|abort_flag_parent| abort_flag_parent.strong_count() == 0)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use nccl_sys as sys;

    use super::*;
    use crate::abort::AbortSignal;
    use crate::library::Library;
    use crate::state::Lifecycle;

    #[test]
    fn a_call_is_ended_whenever_the_monitor_has_slept_or_ended_before_it() {
        // SAFETY: nothing is called through an empty table.
        let library = unsafe { Library::from_api(sys::Api::empty(), sys::Version::HEADER) }
            .expect("a table of functions");
        // The call is made at once, while the monitor sleeps, and after the monitor has ended. It does not end while there
        // is an abort-flag parent.
        let mut last = None;
        for (pause, is_kept) in [(0, false), (2000, true), (2500, false)] {
            let pause = Duration::from_millis(pause);
            if !is_kept {
                drop(last.take());
            }
            std::thread::sleep(pause);
            let abort_flag_parent =
                AbortFlagParent::new(&library, &AbortSignal::new(), &Arc::new(Lifecycle::new()));
            let abort_flag_parent = Arc::new(abort_flag_parent);
            watch(&abort_flag_parent);
            ensure().expect("a thread");
            let call = abort_flag_parent.enter(Duration::ZERO);
            let begun = Instant::now();
            while !abort_flag_parent.is_ended() {
                assert!(begun.elapsed() < Duration::from_secs(20), "{pause:?}");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(call.leave().is_some());
            last = Some(abort_flag_parent);
        }
    }
}

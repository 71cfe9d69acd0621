//! Calls that may not return, each on a thread that can be given up.
//!
//! Some NCCL calls should not wait but do, and a stuck driver may hold any call. A caller that makes such a call on its
//! own thread cannot limit its duration. Here the call runs on a thread of its own, and the caller waits for it until a
//! deadline. A result that arrives later is passed to the caller's function `late`; nothing else of the call is used
//! any more.
//!
//! Only for rare calls, because the thread costs about ten microseconds. Calls that issue operations are watched
//! instead (`active_calls.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::drop_queue::DeviceCallGuard;
use crate::error::{Error, ErrorKind, ErrorProperty};
use crate::sync::{Condvar, Mutex};
use crate::threads;

/// How often the caller checks whether the wait was interrupted.
const TICK: Duration = Duration::from_millis(10);

/// How long an interrupted call may continue. Most calls return within microseconds; their result is then freed by the
/// waiting caller, and no thread is given up.
const GRACE: Duration = Duration::from_millis(250);

/// How much longer the thread of a call may take than the waits inside the call, which have the call's timeout.
pub(crate) const SLACK: Duration = Duration::from_secs(1);

/// Why a call has no result.
#[derive(Debug)]
pub(crate) enum NoResult {
    /// The call did not return in time and is given up.
    TimedOut,
    /// The wait was interrupted; the call is given up.
    Interrupted,
    /// No thread could be started; nothing was called.
    NoThread(std::io::Error),
}

enum DetachedState<T> {
    Running,
    Returned(T),
    Abandoned,
}

/// Runs `work` on a thread of its own, and waits for it until `deadline`, or until [`GRACE`] after `interrupted` returns true.
/// A result that arrives later is passed to `late`, on that thread, unless the process is exiting.
pub(crate) fn run<T: Send + 'static>(
    deadline: Instant,
    interrupted: impl Fn() -> bool,
    work: impl FnOnce() -> T + Send + 'static,
    late: impl FnOnce(T) + Send + 'static,
) -> Result<T, NoResult> {
    let shared = Arc::new((Mutex::new(DetachedState::Running), Condvar::new()));
    let theirs = Arc::clone(&shared);
    let run = move || {
        let result = work();
        let (state, state_changed) = &*theirs;
        let mut state = state.lock();
        if matches!(*state, DetachedState::Running) {
            *state = DetachedState::Returned(result);
            state_changed.notify_one();
            return;
        }
        drop(state);
        match DeviceCallGuard::begin() {
            Some(_working) => late(result),
            None => std::mem::forget(result),
        }
    };
    threads::spawn("nccl-call", run).map_err(NoResult::NoThread)?;

    let (state, state_changed) = &*shared;
    let mut state = state.lock();
    let mut of_no_use: Option<Instant> = None;
    loop {
        match std::mem::replace(&mut *state, DetachedState::Abandoned) {
            DetachedState::Returned(result) => return Ok(result),
            // The state is `Abandoned` only for the duration of this check.
            DetachedState::Running | DetachedState::Abandoned => {}
        }
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(NoResult::TimedOut);
        }
        if of_no_use.is_none() && interrupted() {
            of_no_use = Some(Instant::now());
        }
        if of_no_use.is_some_and(|since| since.elapsed() >= GRACE) {
            return Err(NoResult::Interrupted);
        }
        *state = DetachedState::Running;
        state_changed.wait_for(&mut state, remaining.min(TICK));
    }
}

impl NoResult {
    /// Returns the error for a call of `function` that was limited to `timeout`.
    pub(crate) fn into_error(self, function: &'static str, timeout: Duration) -> Error {
        let given_up = |why: &str| {
            crate::events::leaked(&format!("a call of {function} that does not return"), why);
        };
        match self {
            Self::TimedOut => {
                given_up("its timeout has passed");
                Error::new(ErrorKind::TimedOut {
                    what: format!("{function}, which should not block and has not returned,"),
                    timeout,
                })
                .with_property(ErrorProperty::Inside)
            }
            Self::Interrupted => {
                given_up("there is no use in it any more");
                Error::new(ErrorKind::Aborted {
                    reason: format!("it was ended during {function}, which has not returned"),
                })
            }
            Self::NoThread(error) => threads::not_started("for a call")(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn what_comes_back_in_time_is_the_callers() {
        let deadline = Instant::now() + LONG;
        let sum = run(deadline, || false, || 1 + 1, |_| panic!("it is not late"));
        assert_eq!(sum.expect("it returns"), 2);
    }

    #[test]
    fn what_comes_back_late_is_not_lost() {
        for interrupted in [false, true] {
            let (go_on, waiting) = mpsc::channel::<()>();
            let (sender, late) = mpsc::channel();
            let timeout = if interrupted { LONG } else { TICK };
            let result = run(
                Instant::now() + timeout,
                || interrupted,
                move || waiting.recv(),
                move |result| sender.send(result).expect("the test waits"),
            );
            match result {
                Err(NoResult::TimedOut) => assert!(!interrupted),
                Err(NoResult::Interrupted) => assert!(interrupted),
                other => panic!("{other:?}"),
            }
            go_on.send(()).expect("it waits");
            assert_eq!(late.recv_timeout(LONG), Ok(Ok(())));
        }
    }
}

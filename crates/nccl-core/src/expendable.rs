//! Calls that may not return, each on a thread that can be given up.
//!
//! Some NCCL calls wait although they should not, and a wedged driver may hold any call. A caller that makes
//! such a call on its own thread cannot limit it. Here the call runs on a thread of its own, and the caller
//! waits for it until a deadline. A result that comes later goes to the function `late` that the caller passed;
//! nothing else of the call is touched any more.
//!
//! For rare calls only: the thread costs about ten microseconds. Calls that issue operations are
//! watched instead (`inside.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Mark};
use crate::reaper::Working;
use crate::sync::{Condvar, Mutex};
use crate::threads;

/// How often the caller checks whether the wait was interrupted.
const TICK: Duration = Duration::from_millis(10);

/// How long an interrupted call may still go on. Most calls return within microseconds; their result is then freed
/// by the waiting caller, and no thread is given up.
const GRACE: Duration = Duration::from_millis(250);

/// Why a call has no result.
#[derive(Debug)]
pub(crate) enum NotBack {
    /// The call did not return in time and is given up.
    TimedOut,
    /// The wait was interrupted; the call is given up.
    Interrupted,
    /// No thread could be started; nothing was called.
    NoThread(std::io::Error),
}

enum State<T> {
    Out,
    Back(T),
    GivenUp,
}

/// Runs `work` on a thread of its own, and waits for it until `deadline`, or until [`GRACE`] after `interrupted` returns true.
/// A result that comes later goes to `late`, on that thread, unless the process is exiting.
pub(crate) fn call<T: Send + 'static>(
    deadline: Instant,
    interrupted: impl Fn() -> bool,
    work: impl FnOnce() -> T + Send + 'static,
    late: impl FnOnce(T) + Send + 'static,
) -> Result<T, NotBack> {
    let shared = Arc::new((Mutex::new(State::Out), Condvar::new()));
    let theirs = Arc::clone(&shared);
    let run = move || {
        let result = work();
        let (state, bell) = &*theirs;
        let mut state = state.lock();
        if matches!(*state, State::Out) {
            *state = State::Back(result);
            bell.notify_one();
            return;
        }
        drop(state);
        match Working::begin() {
            Some(_working) => late(result),
            None => std::mem::forget(result),
        }
    };
    threads::spawn("nccl-call", run).map_err(NotBack::NoThread)?;

    let (state, bell) = &*shared;
    let mut state = state.lock();
    let mut of_no_use: Option<Instant> = None;
    loop {
        match std::mem::replace(&mut *state, State::GivenUp) {
            State::Back(result) => return Ok(result),
            // `GivenUp` stands only for the duration of this look.
            State::Out | State::GivenUp => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(NotBack::TimedOut);
        }
        if of_no_use.is_none() && interrupted() {
            of_no_use = Some(Instant::now());
        }
        if of_no_use.is_some_and(|since| since.elapsed() >= GRACE) {
            return Err(NotBack::Interrupted);
        }
        *state = State::Out;
        bell.wait_for(&mut state, left.min(TICK));
    }
}

impl NotBack {
    /// Returns the error for a call of `function` that was limited to `timeout`.
    pub(crate) fn into_error(self, function: &'static str, timeout: Duration) -> Error {
        let given_up = |why: &str| {
            crate::events::leaked(
                &format!("a call of {function} that does not come back"),
                why,
            );
        };
        match self {
            Self::TimedOut => {
                given_up("its timeout has passed");
                Error::new(ErrorKind::TimedOut {
                    what: format!("{function}, which should not wait and has not come back,"),
                    timeout,
                })
                .marked(Mark::Inside)
            }
            Self::Interrupted => {
                given_up("there is no use in it any more");
                Error::new(ErrorKind::Aborted {
                    reason: format!("it was ended during {function}, which has not come back"),
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
        let sum = call(deadline, || false, || 1 + 1, |_| panic!("it is not late"));
        assert_eq!(sum.expect("it comes back"), 2);
    }

    #[test]
    fn what_comes_back_late_is_not_lost() {
        for interrupted in [false, true] {
            let (go_on, waiting) = mpsc::channel::<()>();
            let (sender, late) = mpsc::channel();
            let timeout = if interrupted { LONG } else { TICK };
            let result = call(
                Instant::now() + timeout,
                || interrupted,
                move || waiting.recv(),
                move |result| sender.send(result).expect("the test waits"),
            );
            match result {
                Err(NotBack::TimedOut) => assert!(!interrupted),
                Err(NotBack::Interrupted) => assert!(interrupted),
                other => panic!("{other:?}"),
            }
            go_on.send(()).expect("it waits");
            assert_eq!(late.recv_timeout(LONG), Ok(Ok(())));
        }
    }
}

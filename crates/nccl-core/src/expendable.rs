//! Calls that may not come back, each on a thread that can be given up.
//!
//! NCCL has calls that wait although they should not, and a driver that is wedged may keep any call. Who
//! makes such a call on its own thread has no limit. Here the call has a thread of its own, and the caller
//! waits for it no longer than it likes. What the call returns later goes to whoever the caller named for
//! that; nothing else of it is touched any more.
//!
//! For calls that are rare: the thread costs some ten microseconds. Calls on the way of an operation are
//! watched instead (`inside.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Mark};
use crate::reaper::Working;
use crate::sync::{Condvar, Mutex};
use crate::threads;

/// How often the caller looks whether there is still a use in waiting.
const TICK: Duration = Duration::from_millis(10);

/// How long a call may go on that is of no use any more. Most calls come back in microseconds: what they made is then freed
/// by whoever waits for it, and nothing is given up.
const GRACE: Duration = Duration::from_millis(250);

/// Why there is no result.
#[derive(Debug)]
pub(crate) enum NotBack {
    /// It did not come back in time, and is given up.
    TimedOut,
    /// There was no use in waiting any more; it is given up.
    Interrupted,
    /// There was no thread; nothing was called.
    NoThread(std::io::Error),
}

enum State<T> {
    Out,
    Back(T),
    GivenUp,
}

/// Makes a call on a thread of its own, and waits for it until `deadline`, or until shortly after it is `interrupted`.
/// What comes back afterwards is `late`'s, on that thread, unless the process is exiting.
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
            // Nobody else gives it up.
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
    /// The error to hand out for a call of `function`, which had `limit`.
    pub(crate) fn into_error(self, function: &'static str, limit: Duration) -> Error {
        let given_up = |why: &str| {
            crate::events::leaked(
                &format!("a call of {function} that does not come back"),
                why,
            );
        };
        match self {
            Self::TimedOut => {
                given_up("its limit has passed");
                Error::new(ErrorKind::TimedOut {
                    what: format!("{function}, which should not wait and has not come back,"),
                    limit,
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
            let limit = if interrupted { LONG } else { TICK };
            let result = call(
                Instant::now() + limit,
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

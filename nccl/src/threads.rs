//! Threads of this crate's own that the system does not give.
//!
//! What needs one and has none says so with the limit that was met, and nothing is begun without it: an operation
//! that nobody watches over is not issued.

use std::io;

use crate::error::{Error, ErrorKind};
use crate::preflight;

/// How the sentence begins by which such an error is known.
const STARTING: &str = "starting a thread ";

/// What can be done about it.
pub(crate) const FIX: &str = "raise the limit of processes and threads (ulimit -u, LimitNPROC= and TasksMax= of systemd, \
     pids.max or --pids-limit of the container), or let the program have fewer";

/// The error for a thread that was not started: `purpose` goes on after "a thread".
pub(crate) fn not_started(purpose: &str) -> impl FnOnce(io::Error) -> Error {
    let what = format!("{STARTING}{purpose}");
    move |error| {
        let what = match is_shortage(&error) {
            true => format!("{what} ({})", preflight::thread_limits()),
            false => what,
        };
        Error::io(what)(error)
    }
}

/// Whether the system says that there are no more.
fn is_shortage(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::AGAIN.raw_os_error())
}

/// Whether an error is of this kind.
pub(crate) fn are_exhausted(kind: &ErrorKind) -> bool {
    match kind {
        ErrorKind::Io { what, error } => what.starts_with(STARTING) && is_shortage(error),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_for_want_of_a_thread_says_how_many_there_are_and_what_to_do() {
        let error = not_started("that watches")(io::Error::from_raw_os_error(11));
        assert!(are_exhausted(error.kind()));
        let text = error.to_string();
        assert!(
            text.starts_with("starting a thread that watches (this process has "),
            "{text}"
        );
        assert!(text.contains("pids.max or --pids-limit"), "{text}");
        let other = not_started("that watches")(io::Error::from_raw_os_error(12));
        assert!(!are_exhausted(other.kind()), "{other}");
    }
}

//! How an error for want of a thread is known.

use std::io;

use crate::error::ErrorKind;

/// How the sentence begins by which such an error is known.
#[doc(hidden)]
pub const STARTING: &str = "starting a thread ";

/// What can be done about it.
#[doc(hidden)]
pub const FIX: &str = "raise the limit of processes and threads (ulimit -u, LimitNPROC= and TasksMax= of systemd, \
     pids.max or --pids-limit of the container), or let the program have fewer";

/// Whether the system says that there are no more.
#[doc(hidden)]
pub fn is_shortage(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::AGAIN.raw_os_error())
}

/// Whether an error is of this kind.
#[doc(hidden)]
pub fn are_exhausted(kind: &ErrorKind) -> bool {
    match kind {
        ErrorKind::Io { what, error } => what.starts_with(STARTING) && is_shortage(error),
        _ => false,
    }
}

//! Ends the process when this crate cannot let it continue: NCCL may still use memory that was only lent to it.
//!
//! The callers are `issuing/issue.rs` (a call that would give a buffer back too early) and `supervision/stuck_call_monitor.rs` (a
//! thread that does not return from a call). Each makes a [`FatalReport`]; [`end_the_process`] writes it to stderr, runs the
//! program's hook, and ends the process.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::bounded_write::write_within;
use crate::identity::Identity;
use crate::sync::Mutex;
use nccl_base::fault::Roster;

/// The timeout for writing the message, and again for the hook.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Why this crate ends the process; given to the hook of [`on_fatal`].
///
/// ```
/// nccl::process::on_fatal(|report| {
///     eprintln!("rank {} of {:?}: {:?}", report.rank, report.communicator, report.cause);
///     nccl::process::FatalExit::Abort
/// });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FatalReport {
    /// The name of the communicator.
    pub communicator: String,
    /// This process's rank in it.
    pub rank: usize,
    /// Its number of ranks.
    pub world_size: usize,
    /// The reason.
    pub cause: FatalCause,
    roster: Arc<Roster>,
}

/// The reason for ending the process, in a [`FatalReport`].
///
/// ```
/// # use std::time::Duration;
/// let cause = nccl::process::FatalCause::AbortTimedOut { timeout: Duration::from_secs(10) };
/// assert_ne!(cause, nccl::process::FatalCause::Panicked);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FatalCause {
    /// A thread is inside a call of NCCL or CUDA, and aborting the communicator did not make it return.
    StuckCall {
        /// The call.
        call: &'static str,
        /// How long the thread has been inside.
        since: Duration,
        /// The call's timeout.
        timeout: Duration,
    },
    /// NCCL did not free an aborted communicator.
    AbortTimedOut {
        /// How long an abort may take.
        timeout: Duration,
    },
    /// Work of an aborted operation did not end.
    WorkTimedOut {
        /// How long an abort may take.
        timeout: Duration,
    },
    /// A capture that the program began on the stream of an operation did not end.
    Captured {
        /// How long an abort may take.
        timeout: Duration,
    },
    /// A capture that the program began on the stream of an operation has ended, and its graph may hold the operation.
    CapturedInGraph,
    /// A thread panicked while memory was lent to NCCL.
    Panicked,
}

/// How the process ends after the hook of [`on_fatal`]. No destructor and no exit handler runs in either case: they
/// could block for ever.
///
/// ```
/// assert_eq!(nccl::process::FatalExit::default(), nccl::process::FatalExit::Abort);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FatalExit {
    /// With SIGABRT, which leaves a core dump where the system is configured for it.
    #[default]
    Abort,
    /// With this exit code.
    Code(u8),
}

type Hook = Box<dyn FnOnce(&FatalReport) -> FatalExit + Send>;

static HOOK: Mutex<Option<Hook>> = Mutex::new(None);

/// Sets a hook that runs before this crate ends the process. The crate does so only if a call into NCCL or CUDA does not
/// return, or if NCCL may still use memory that was only lent to it ([`FatalCause`]). A later call replaces the hook of an
/// earlier one.
///
/// The hook runs at most once, on a thread of its own, and may take 5 s, for example to write a last line or to notify a
/// supervisor. It returns how the process ends. The process ends with SIGABRT if there is no hook, or if the hook panics,
/// takes longer, or cannot get a thread. The hook should call neither CUDA nor NCCL, because such a call may hang.
///
/// ```
/// use nccl::process::FatalExit;
///
/// nccl::process::on_fatal(|report| {
///     eprintln!("fatal: {report}");
///     FatalExit::Code(75)
/// });
/// ```
pub fn on_fatal(hook: impl FnOnce(&FatalReport) -> FatalExit + Send + 'static) {
    let before = HOOK.lock().replace(Box::new(hook));
    // Dropped after the lock is released: the old hook may own anything, and its drop may run any code.
    drop(before);
}

impl FatalReport {
    pub(crate) fn new(of: &Identity, cause: FatalCause) -> Self {
        Self {
            communicator: of.name.to_string(),
            rank: of.rank,
            world_size: of.world_size,
            roster: Arc::clone(&of.roster),
            cause,
        }
    }
}

impl fmt::Display for FatalReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {}: {}",
            self.roster.who(&[self.rank]),
            self.roster.named(&self.communicator),
            self.cause
        )
    }
}

impl fmt::Display for FatalCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, timeout) = match self {
            Self::StuckCall {
                call,
                since,
                timeout,
            } => {
                return write!(
                    f,
                    "a thread has been inside {call} for {since:?}, its timeout is {timeout:?}, and aborting the communicator \
                     did not make it return"
                );
            }
            Self::Panicked => {
                return f.write_str(
                    "a thread panicked while memory was lent to NCCL, which may still use it",
                );
            }
            Self::CapturedInGraph => {
                return f.write_str(
                    "another thread captured a graph on the stream of an operation while that was put there: the graph may use \
                     memory that was lent to the operation whenever it is launched; do not capture on streams that a communicator \
                     uses",
                );
            }
            Self::AbortTimedOut { timeout } => ("NCCL did not free the communicator", timeout),
            Self::WorkTimedOut { timeout } => ("work of an aborted operation did not end", timeout),
            Self::Captured { timeout } => (
                "a capture on the stream of an operation did not end",
                timeout,
            ),
        };
        write!(
            f,
            "{what} within {timeout:?} and may still use memory that was lent to it"
        )
    }
}

/// Writes the reason, runs the hook, and ends the process.
#[cold]
pub(crate) fn end_the_process(report: FatalReport) -> ! {
    static BEGUN: AtomicBool = AtomicBool::new(false);
    if BEGUN.swap(true, Ordering::SeqCst) {
        // Another thread is ending the process, and needs up to twice the timeout: for its message and for the hook. Abort here
        // only if even that takes too long.
        std::thread::sleep(TIMEOUT * 3);
        std::process::abort();
    }
    let message = format!("nccl: {report}; ending the process\n");
    write_within(std::io::stderr(), &message, TIMEOUT);
    match call_hook(report) {
        FatalExit::Abort => std::process::abort(),
        // SAFETY: ends the process at once.
        FatalExit::Code(code) => unsafe { libc::_exit(code.into()) },
    }
}

/// Returns the hook's answer; the default without a hook, and when it panics or does not return.
fn call_hook(report: FatalReport) -> FatalExit {
    // A thread of the program may hold the lock, and panic hooks may set a hook.
    let Some(hook) = HOOK.try_lock().and_then(|mut hook| hook.take()) else {
        return FatalExit::default();
    };
    let (exit_sender, exit_receiver) = mpsc::channel();
    let run = move || {
        let _ = exit_sender.send(hook(&report));
    };
    let spawned = std::thread::Builder::new()
        .name(String::from("nccl-fatal"))
        .spawn(run);
    let exit = spawned
        .ok()
        .and_then(|_| exit_receiver.recv_timeout(TIMEOUT).ok());
    exit.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_which_process_of_the_job_it_is() {
        let members = [Some(0), Some(2), Some(3)];
        let report = FatalReport {
            communicator: String::from("tp"),
            rank: 0,
            world_size: 2,
            cause: FatalCause::Panicked,
            roster: Arc::new(Roster::new(&[1, 2], &members)),
        };
        let text = report.to_string();
        let who =
            "rank 0 (world rank 1, launcher rank 2) of \"tp\" (world ranks 1-2): a thread panicked";
        assert!(text.starts_with(who), "{text}");
    }
}

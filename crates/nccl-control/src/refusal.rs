//! Why connections are refused: the reasons, the count and the log events.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::handshake::Retry;

/// How long a connecting process may take to prove its identity.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a process is refused, and whether another attempt may succeed.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub(super) why: String,
    pub(super) retry: Retry,
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self {
            why,
            retry: Retry::Never,
        }
    }
}

impl Refusal {
    /// `theirs` is the name of another job than `own`, the job of this process.
    pub(super) fn of_job(theirs: &str, own: &str) -> Self {
        Self {
            why: format!(
                "it belongs to job {theirs:?}, and the coordinator at this address to job {own:?}: one of them is a \
                 leftover, or two jobs were given one address"
            ),
            retry: Retry::Elsewhere,
        }
    }

    /// `theirs` is another generation than `own`, the generation of this process.
    pub(super) fn of_generation(theirs: u64, own: u64) -> Self {
        match theirs > own {
            true => Self::later(format!(
                "it is already of generation {theirs} of the job, and the process at this address still of generation {own}, \
                 which is about to end"
            )),
            false => Self::from(format!(
                "it is of generation {theirs} of the job, and the process at this address of generation {own}: a process \
                 of another attempt is left over"
            )),
        }
    }

    /// An observer expects another number of ranks than the world has.
    pub(super) fn of_observer(expected: usize, size: usize) -> Self {
        Self::from(format!(
            "an observer expects {expected} ranks, rank 0 expects {size}"
        ))
    }

    /// The peer is not a rank of the job; if there are several ports, the coordinator may be at another one.
    pub(super) fn elsewhere(why: String) -> Self {
        Self {
            why,
            retry: Retry::Elsewhere,
        }
    }

    /// Another attempt may succeed after the answering peer has ended.
    pub(super) fn later(why: String) -> Self {
        Self {
            why,
            retry: Retry::Later,
        }
    }
}

/// Checks whether a world of `ranks` ranks that has `observers` observers admits another one.
///
/// # Errors
/// There are too many observers already.
pub(super) fn check_room(observers: usize, ranks: usize) -> Result<(), String> {
    // At least one for each host, because each host may have a launcher that observes.
    let max_observers = 64 + ranks;
    match observers < max_observers {
        true => Ok(()),
        false => Err(format!("there are {max_observers} observers already")),
    }
}

/// The number of connections that this process has refused.
static REFUSED_CONNECTIONS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of connections that this process has refused.
pub fn refused_connections() -> u64 {
    REFUSED_CONNECTIONS.load(Ordering::Relaxed)
}

/// Logs the `count`-th refused connection: each of the first 16, then only powers of two, so that another process cannot fill
/// a disk.
pub(super) fn log_refused_connection(from: &str, why: &str, count: u64) {
    REFUSED_CONNECTIONS.fetch_add(1, Ordering::Relaxed);
    if count <= 16 || count.is_power_of_two() {
        tracing::warn!(
            name: "nccl.stranger",
            target: "nccl",
            from,
            why,
            count,
            "a connection to the rendezvous was refused"
        );
    }
}

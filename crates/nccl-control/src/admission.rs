//! Which connections are accepted, and why others are refused.

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
    /// `theirs` is the name of another job than `own`, this process's.
    pub(super) fn of_job(theirs: &str, own: &str) -> Self {
        Self {
            why: format!(
                "it belongs to job {theirs:?}, and rank 0 here to job {own:?}: one of them is left over, or \
                 two jobs were given one address"
            ),
            retry: Retry::Elsewhere,
        }
    }

    /// `theirs` is another generation than `own`, rank 0's.
    pub(super) fn of_generation(theirs: u64, own: u64) -> Self {
        match theirs > own {
            true => Self::later(format!(
                "it is already of generation {theirs} of the job, and rank 0 still of generation {own}, which is to end"
            )),
            false => Self::from(format!(
                "it is of generation {theirs} of the job, and rank 0 of generation {own}: a process of another \
                 attempt is left over"
            )),
        }
    }

    /// An observer expects another number of ranks than the world has.
    pub(super) fn of_observer(expected: usize, size: usize) -> Self {
        Self::from(format!(
            "an observer expects {expected} ranks, rank 0 expects {size}"
        ))
    }

    /// Another attempt may succeed when the peer that answers is gone.
    pub(super) fn later(why: String) -> Self {
        Self {
            why,
            retry: Retry::Later,
        }
    }
}

/// Checks whether another observer is let in, beside `observers`, of a world of `ranks` ranks.
///
/// # Errors
/// There are too many already.
pub(super) fn has_room(observers: usize, ranks: usize) -> Result<(), String> {
    // At least one for each host, when each has a launcher that observes.
    let most = 64 + ranks;
    match observers < most {
        true => Ok(()),
        false => Err(format!("there are {most} observers already")),
    }
}

/// The number of connections that this process has refused.
static REFUSED_CONNECTIONS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of connections that this process has refused.
pub fn refused_connections() -> u64 {
    REFUSED_CONNECTIONS.load(Ordering::Relaxed)
}

/// Logs the `count`-th refused connection: each of the first 16, then only powers of two, so that a stranger
/// cannot fill a disk.
pub(super) fn log_refused_connection(from: &str, why: &str, count: u64) {
    REFUSED_CONNECTIONS.fetch_add(1, Ordering::Relaxed);
    if count <= 16 || count.is_power_of_two() {
        tracing::warn!(
            name: "nccl.stranger",
            target: "nccl",
            from,
            why,
            count,
            "the rendezvous refused a connection"
        );
    }
}

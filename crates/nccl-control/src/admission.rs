//! Who may come in, and what those are told that may not.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::greeting::Again;

/// How long one who comes may take to prove who it is.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Why somebody may not come in, and whether another try may end better.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub(super) why: String,
    pub(super) again: Again,
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self {
            why,
            again: Again::Never,
        }
    }
}

impl Refusal {
    /// `theirs` is the name of another job than this process's `own`.
    pub(super) fn of_job(theirs: &str, own: &str) -> Self {
        Self {
            why: format!(
                "it belongs to job {theirs:?}, and rank 0 here to job {own:?}: one of them is left over, or \
                 two jobs were given one address"
            ),
            again: Again::Elsewhere,
        }
    }

    /// `theirs` is another epoch than rank 0's `own`.
    pub(super) fn of_epoch(theirs: u64, own: u64) -> Self {
        match theirs > own {
            true => Self::later(format!(
                "it is already of epoch {theirs} of the job, and rank 0 still of epoch {own}, which is to end"
            )),
            false => Self::from(format!(
                "it is of epoch {theirs} of the job, and rank 0 of epoch {own}: a process of another \
                 attempt is left over"
            )),
        }
    }

    /// An observer expects another number of ranks than there are.
    pub(super) fn of_observer(expected: usize, size: usize) -> Self {
        Self::from(format!(
            "an observer expects {expected} ranks, rank 0 expects {size}"
        ))
    }

    /// Another try may end better when who answers is gone.
    pub(super) fn later(why: String) -> Self {
        Self {
            why,
            again: Again::Later,
        }
    }
}

/// Whether another observer is let in beside so many, of a world of so many ranks.
///
/// # Errors
/// That there are too many already.
pub(super) fn has_room(observers: usize, ranks: usize) -> Result<(), String> {
    // One for each host at least, when each has a launcher that observes.
    let most = 64 + ranks;
    match observers < most {
        true => Ok(()),
        false => Err(format!("there are {most} observers already")),
    }
}

/// How many connections were turned away by this process.
static STRANGERS: AtomicU64 = AtomicU64::new(0);

/// How many connections were turned away by this process.
pub fn strangers() -> u64 {
    STRANGERS.load(Ordering::Relaxed)
}

/// A connection is turned away for the `count`-th time; one line for each of the first, then fewer: a stranger
/// cannot fill a disk.
pub(super) fn stranger(from: &str, why: &str, count: u64) {
    STRANGERS.fetch_add(1, Ordering::Relaxed);
    if count <= 16 || count.is_power_of_two() {
        tracing::warn!(
            name: "nccl.stranger",
            target: "nccl",
            from,
            why,
            count,
            "the rendezvous turned somebody away"
        );
    }
}

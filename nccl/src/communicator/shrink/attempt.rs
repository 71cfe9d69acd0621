//! What NCCL's own way has come to, on which the ranks agree before any of them goes on.
//!
//! NCCL refuses to shrink a communicator that has an asynchronous error, and each rank learns of such an error for itself.
//! So one rank may be refused while the others wait for it inside NCCL. The rank that is refused ends the new communicator
//! for that reason, which all ranks hear; they leave NCCL's call, and tell each other how their attempts ended:
//!
//! ```text
//! all have made it                              ──▶ it is handed out
//! NCCL refused on a rank, nothing else happened ──▶ the parent ends, and a new communicator is made
//! otherwise                                     ──▶ the parent ends, and so does the shrink
//! ```

use std::sync::Arc;
use std::time::Instant;

use super::call::topic;
use crate::communicator::Inner;
use crate::error::{Error, Result};
use crate::rendezvous::Line;
use crate::supervision::Board;

/// Why a new communicator is made where an asynchronous error of the parent made NCCL refuse.
pub(super) const REFUSED: &str = "NCCL refused: remote error";

/// What NCCL's own way has come to on all ranks.
pub(super) enum Attempt {
    Made(Arc<Inner>),
    /// Nothing is left of it, nor of the parent.
    Refused,
}

/// What it has come to on one rank; as it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Came {
    Made = 1,
    Refused = 2,
    /// Another rank ended it.
    Ended = 3,
    Failed = 4,
}

impl Came {
    const ALL: [Self; 4] = [Self::Made, Self::Refused, Self::Ended, Self::Failed];

    fn of(part: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|came| part == [*came as u8])
    }
}

/// What the ranks told each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Made,
    Refused,
    Failed,
}

impl Verdict {
    fn of(came: impl Iterator<Item = Option<Came>> + Clone) -> Self {
        let any = |what| came.clone().any(|came| came == Some(what));
        if came.clone().all(|came| came == Some(Came::Made)) {
            Self::Made
        } else if any(Came::Refused)
            && came
                .clone()
                .all(|came| !matches!(came, None | Some(Came::Failed)))
        {
            Self::Refused
        } else {
            Self::Failed
        }
    }
}

/// Tells `ranks` of the line what has come of the attempt here, `refused` if NCCL refused, and hears what came of theirs.
///
/// # Errors
/// A rank is gone, or does not come until `deadline`.
pub(super) fn tell_each_other(
    board: &Board,
    ranks: &Arc<[usize]>,
    outcome: &Result<Arc<Inner>>,
    refused: bool,
    deadline: Instant,
) -> Result<Verdict> {
    let came = match outcome {
        Ok(_) => Came::Made,
        // All have the same fault, and know from it that there is nothing to agree on.
        Err(error) if error.fault().is_some_and(|fault| !fault.is_on_purpose()) => {
            return Ok(Verdict::Failed);
        }
        Err(_) if refused => Came::Refused,
        Err(error) if error.is_told() => Came::Ended,
        Err(_) => Came::Failed,
    };
    let made = outcome.as_ref().ok().and_then(|made| made.board.as_ref());
    // Ranks that know this do not come.
    let is_over =
        || made.is_some_and(|made| made.fault().is_some_and(|fault| !fault.is_on_purpose()));
    let (line, topic): (&Arc<Line>, _) = (board.line().0, topic("shrunk", board.key()));
    let parts = line.round(&topic, Some(ranks), &[came as u8], deadline, Some(&is_over));
    if parts.is_err() {
        // Whose death that was is the cause.
        line.catch_up();
    }
    Ok(Verdict::of(parts?.iter().map(|part| Came::of(part))))
}

/// The error of an attempt that came to nothing although NCCL made a communicator here, because the ranks `missed` one
/// another, or because of another rank.
pub(super) fn unmade(made: &Arc<Inner>, missed: Option<Error>) -> Error {
    let was_ended = made.phase.get().is_aborted();
    made.abort("it was not made on all ranks");
    match missed {
        Some(missed) if !was_ended => missed,
        _ => made.conclude(made.out_of_use()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_go_one_way_whatever_each_of_them_saw() {
        use Came::{Ended, Failed, Made, Refused};
        for (came, verdict) in [
            (&[Made, Made, Made][..], Verdict::Made),
            (&[Refused], Verdict::Refused),
            (&[Ended, Refused, Ended], Verdict::Refused),
            // Another rank came out with a communicator before NCCL refused here.
            (&[Made, Refused, Ended], Verdict::Refused),
            (&[Refused, Failed, Ended], Verdict::Failed),
            (&[Made, Failed], Verdict::Failed),
            (&[Ended, Ended], Verdict::Failed),
        ] {
            let parts = came.iter().map(|came| [*came as u8]);
            let heard: Vec<_> = parts.map(|part| Came::of(&part)).collect();
            assert_eq!(Verdict::of(heard.into_iter()), verdict, "{came:?}");
        }
        assert_eq!(
            Verdict::of([Some(Refused), Came::of(b"?")].into_iter()),
            Verdict::Failed
        );
    }
}

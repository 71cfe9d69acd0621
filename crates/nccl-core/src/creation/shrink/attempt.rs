//! The outcome of `ncclCommShrink`, on which the ranks agree before any of them continues.
//!
//! NCCL refuses to shrink a communicator that has an asynchronous error, and each rank notices such an error independently. A
//! rank also does not call NCCL if a launch has begun since the ranks agreed, because NCCL would continue that launch. So one
//! rank may be refused while the others wait for it inside NCCL. The refused rank ends the new communicator for that reason,
//! which is announced to all ranks; they leave NCCL's call, and report to each other how their attempts ended:
//!
//! ```text
//! all have made it                              ──▶ it is handed out
//! NCCL refused on a rank, nothing else happened ──▶ the parent ends, and a new communicator is made
//! otherwise                                     ──▶ the parent ends, and so does the shrink
//! ```

use std::sync::Arc;
use std::time::Instant;

use crate::communicator::Inner;
use crate::error::{Error, Result};
use crate::peers::Supervisor;

/// Why a new communicator is made although all ranks could shrink the parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The parent has an asynchronous error.
    RemoteError,
    /// A launch is under way, so that NCCL was not called.
    Launching,
}

impl Refusal {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::RemoteError => "NCCL refused: remote error",
            Self::Launching => "a launch is under way",
        }
    }
}

/// The outcome of `ncclCommShrink` on all ranks.
pub(super) enum Attempt {
    Made(Arc<Inner>),
    /// Neither the new communicator nor the parent is left.
    Refused(Refusal),
}

/// The outcome on one rank, as sent to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum LocalOutcome {
    Made = 1,
    Refused = 2,
    /// Another rank ended the new communicator.
    Ended = 3,
    Failed = 4,
    Launching = 5,
}

impl LocalOutcome {
    const ALL: [Self; 5] = [
        Self::Made,
        Self::Refused,
        Self::Ended,
        Self::Failed,
        Self::Launching,
    ];

    fn of(part: &[u8]) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|local_outcome| part == [*local_outcome as u8])
    }
}

/// The outcome that follows from the outcomes of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommonOutcome {
    Made,
    Refused(Refusal),
    Failed,
}

impl CommonOutcome {
    fn of(local_outcome: impl Iterator<Item = Option<LocalOutcome>> + Clone) -> Self {
        let any = |what| {
            local_outcome
                .clone()
                .any(|local_outcome| local_outcome == Some(what))
        };
        if local_outcome
            .clone()
            .all(|local_outcome| local_outcome == Some(LocalOutcome::Made))
        {
            Self::Made
        } else if local_outcome
            .clone()
            .any(|local_outcome| matches!(local_outcome, None | Some(LocalOutcome::Failed)))
        {
            Self::Failed
        } else if any(LocalOutcome::Refused) {
            Self::Refused(Refusal::RemoteError)
        } else if any(LocalOutcome::Launching) {
            Self::Refused(Refusal::Launching)
        } else {
            Self::Failed
        }
    }
}

/// Exchanges with `ranks` the outcomes of the attempt; `refused` is the reason if it was refused here.
///
/// # Errors
/// A rank is gone, or does not arrive by `deadline`.
pub(super) fn exchange_outcomes(
    supervisor: &dyn Supervisor,
    ranks: &Arc<[usize]>,
    outcome: &Result<Arc<Inner>>,
    refused: Option<Refusal>,
    deadline: Instant,
) -> Result<CommonOutcome> {
    let local_outcome = match outcome {
        Ok(_) => LocalOutcome::Made,
        // All ranks have the same fault, and it shows them that there is nothing to agree on.
        Err(error) if error.fault().is_some_and(|fault| !fault.is_on_purpose()) => {
            return Ok(CommonOutcome::Failed);
        }
        Err(error) => match refused {
            Some(Refusal::RemoteError) => LocalOutcome::Refused,
            Some(Refusal::Launching) => LocalOutcome::Launching,
            None if error.kind_is_of_fault() => LocalOutcome::Ended,
            None => LocalOutcome::Failed,
        },
    };
    let made = outcome
        .as_ref()
        .ok()
        .and_then(|made| made.supervisor.as_ref());
    // Ranks that know of such a fault do not take part.
    let is_over =
        || made.is_some_and(|made| made.fault().is_some_and(|fault| !fault.is_on_purpose()));
    let (peers, topic) = (supervisor.peers(), topic("shrunk", supervisor.key()));
    let parts = peers.exchange(
        &topic,
        Some(ranks),
        &[local_outcome as u8],
        deadline,
        Some(&is_over),
    );
    if parts.is_err() {
        // The death of the missing rank may be the cause.
        peers.catch_up();
    }
    Ok(CommonOutcome::of(
        parts?.iter().map(|part| LocalOutcome::of(part)),
    ))
}

/// Aborts a communicator that was made here although the attempt failed, and returns the error: `missed` if the ranks did not
/// meet, otherwise the fault of another rank.
pub(super) fn abort_made(made: &Arc<Inner>, missed: Option<Error>) -> Error {
    let was_ended = made.lifecycle.get().abort_has_begun();
    made.abort("it was not made on all ranks");
    match missed {
        Some(missed) if !was_ended => missed,
        _ => made.final_error(made.out_of_use()),
    }
}

pub(super) fn topic(what: &str, key: &str) -> String {
    format!("{what}/{key}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_go_one_way_whatever_each_of_them_saw() {
        use LocalOutcome::{Ended, Failed, Launching, Made, Refused};
        let refused = CommonOutcome::Refused(Refusal::RemoteError);
        for (local_outcome, common) in [
            (&[Made, Made, Made][..], CommonOutcome::Made),
            (&[Refused], refused),
            (&[Ended, Refused, Ended], refused),
            // Another rank got its communicator before NCCL refused on this rank.
            (&[Made, Refused, Ended], refused),
            (&[Launching, Refused, Ended], refused),
            (
                &[Ended, Launching, Made],
                CommonOutcome::Refused(Refusal::Launching),
            ),
            (&[Launching, Failed], CommonOutcome::Failed),
            (&[Refused, Failed, Ended], CommonOutcome::Failed),
            (&[Made, Failed], CommonOutcome::Failed),
            (&[Ended, Ended], CommonOutcome::Failed),
        ] {
            let parts = local_outcome
                .iter()
                .map(|local_outcome| [*local_outcome as u8]);
            let heard: Vec<_> = parts.map(|part| LocalOutcome::of(&part)).collect();
            assert_eq!(
                CommonOutcome::of(heard.into_iter()),
                common,
                "{local_outcome:?}"
            );
        }
        assert_eq!(
            CommonOutcome::of([Some(Refused), LocalOutcome::of(b"?")].into_iter()),
            CommonOutcome::Failed
        );
    }
}

//! `NCCL_RUN_CHECK=1`: the ranks compare every call that all of them make before it is handed to NCCL.
//!
//! NCCL compares nothing: a different type or reduction on one rank gives a wrong result without an error, and a
//! different count gives a hang or worse. The check costs one exchange over the world's connections per call, so it is
//! meant for debugging only. The variable has to be set on all ranks; it is read once.

use std::sync::OnceLock;
use std::time::Instant;

use crate::communicator::Inner;
use crate::error::{Error, ErrorKind, Result};
use crate::op::Descriptor;
use crate::operation::OperationKind;
use crate::operation_comparison::{self, DigestComparison, Operations};
use crate::peers::Supervisor;
use crate::queued_op::QueuedOp;
use nccl_base::departure::GatherOutcome;
use nccl_base::wire::Broken;

const VARIABLE: &str = "NCCL_RUN_CHECK";

/// Whether calls are compared.
#[inline]
pub(super) fn is_enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(|| std::env::var_os(VARIABLE).is_some_and(|value| value == "1"))
}

/// Compares a call with those of the other ranks, if they can be reached. If the calls differ, no rank launches
/// anything, and the communicator stays usable.
///
/// # Errors
/// [`ErrorKind::CallsDiffer`], the same on all ranks; [`ErrorKind::TimedOut`] with the names of the missing ranks.
#[cold]
pub(super) fn compare_call(
    inner: &Inner,
    kind: OperationKind,
    queued: &[QueuedOp],
    deadline: Instant,
) -> Result<()> {
    let Some(supervisor) = &inner.supervisor else {
        return Ok(());
    };
    let entries: Vec<_> = queued.iter().map(|one| one.descriptor).collect();
    let concerns_some_ranks = (kind == OperationKind::Group || kind.is_pairwise())
        && !entries.iter().any(Descriptor::is_collective);
    if concerns_some_ranks || supervisor.members().len() == 1 {
        return Ok(());
    }
    let number = supervisor.next_check();
    let Some(digests) = gather(
        inner,
        &**supervisor,
        &format!("call/{number}"),
        &operation_comparison::digest(Ok(Operations::undivided(&entries))),
        number,
        deadline,
    )?
    else {
        return Ok(());
    };
    let broken = |broken: Broken| Error::rendezvous(broken.0);
    match operation_comparison::compare(&digests).map_err(broken)? {
        DigestComparison::Same | DigestComparison::Failed(..) => Ok(()),
        DigestComparison::Departed(_) if inner.interrupted() => Err(inner.out_of_use()),
        DigestComparison::Departed(rank) => Err(Error::new(ErrorKind::Aborted {
            reason: format!("{} is gone", supervisor.name_of(rank)),
        })),
        DigestComparison::Different => {
            let own_operations = operation_comparison::encode(Operations::undivided(&entries));
            let topic = format!("call/{number}/all");
            let lists = gather(
                inner,
                &**supervisor,
                &topic,
                &own_operations,
                number,
                deadline,
            )?;
            let lists = lists.unwrap_or_default();
            let lists = lists.iter().map(|list| operation_comparison::decode(list));
            let lists: Vec<_> = lists.collect::<Result<_, _>>().map_err(broken)?;
            let difference = operation_comparison::difference(
                &lists,
                operation_comparison::OperationUse::Called,
                |ranks| supervisor.names_of(ranks),
            );
            Err(Error::new(ErrorKind::CallsDiffer { number, difference }))
        }
    }
}

fn gather(
    inner: &Inner,
    supervisor: &dyn Supervisor,
    topic: &str,
    own_part: &[u8],
    number: u64,
    deadline: Instant,
) -> Result<Option<Vec<Vec<u8>>>> {
    let begun = Instant::now();
    let remaining = deadline.saturating_duration_since(begun);
    match supervisor.gather(topic, own_part, remaining, &|| inner.interrupted()) {
        GatherOutcome::All(parts) => Ok(Some(parts)),
        GatherOutcome::Missing(missing) => {
            let missing = missing
                .iter()
                .map(|&rank| supervisor.name_of(supervisor.rank_of_member(rank)));
            let missing: Vec<_> = missing.collect();
            Err(Error::new(ErrorKind::TimedOut {
                what: format!(
                    "the check of call {number} ({VARIABLE}) is missing {}, and",
                    missing.join(", ")
                ),
                timeout: remaining,
            }))
        }
        GatherOutcome::ConnectionLost if inner.interrupted() => Err(inner.out_of_use()),
        GatherOutcome::ConnectionLost => Ok(None),
    }
}

//! The events of communicators: faults, aborts, leaks. Most are logged and counted.
//!
//! Both happen here, so that the numbers of `nccl::stats()` match the log. Events that are only logged are logged where
//! they happen. Every event has a name, the target `nccl` and flat fields, which do not change; `docs/observability.md`
//! lists them, and a test compares that list with the sources.

#[doc(hidden)]
pub use nccl_base::threads::no_thread;
pub(crate) use nccl_base::time::millis;
use std::fmt::Display;
use std::time::Duration;

use tracing::Span;
use tracing::field::{Empty, display};

use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::library::Library;
use crate::operation::{Operation, OperationKind};
use crate::stats;
use nccl_base::fault::{Fault, FaultClass, Roster, short_key};

/// Counts and logs that `fault` ends a communicator, as reported to rank `on_rank` of its `nranks`.
#[doc(hidden)]
pub fn fault(fault: &Fault, key: Option<&str>, on_rank: usize, nranks: usize) {
    let class = fault.class;
    stats::faults(class).count();
    let operation = fault.operation_values();
    let roster = fault.roster();
    let world_ranks = roster.world_ranks();
    let (world_rank, launcher_rank) = fault.named_in_the_world();
    let known = fault.world_rank();
    macro_rules! log {
        ($level:ident) => {
            tracing::$level!(
                name: "nccl.fault",
                target: "nccl",
                comm = fault.communicator(),
                comm_key = key.map(short_key),
                world_ranks,
                on_rank,
                nranks,
                class = class.name(),
                role = fault.role.name(),
                rank = fault.culprit(),
                host = known.map(|_| &*fault.host),
                pid = known.map(|_| fault.pid),
                reported_by = fault.reported_by(),
                world_rank,
                launcher_rank,
                generation = fault.generation,
                operation = operation.kind.map(OperationKind::name),
                seq = operation.sequence,
                cause = fault.cause,
                hint = fault.hint(),
                "{fault}"
            )
        };
    }
    match class {
        // An action of the program is no error.
        FaultClass::Asked | FaultClass::Revoked => log!(warn),
        _ => log!(error),
    }
}

/// Logs the evidence that the hosts of the ranks have of a fault.
#[doc(hidden)]
pub fn host_evidence(fault: &Fault, key: Option<&str>, on_rank: usize) {
    for seen in &fault.host_evidence {
        tracing::warn!(
            name: "nccl.fault.host",
            target: "nccl",
            comm = fault.communicator(),
            comm_key = key.map(short_key),
            world_ranks = fault.roster().world_ranks(),
            on_rank,
            seen,
            "{seen}"
        );
    }
}

/// Returns the span for making a communicator.
pub(crate) fn init_span((comm, roster): (&str, &Roster), rank: usize, nranks: usize) -> Span {
    tracing::info_span!(
        target: "nccl",
        "nccl.comm.init",
        comm,
        world_ranks = roster.world_ranks(),
        rank,
        world_rank = roster.world_rank(rank),
        launcher_rank = roster.launcher_rank(rank),
        nranks,
        nccl.version = Empty,
        lib.path = Empty
    )
}

/// Returns the span for an abort.
pub(crate) fn abort_span(of: &Identity) -> Span {
    let (rank, roster) = (of.rank, &of.roster);
    tracing::info_span!(
        target: "nccl",
        "nccl.comm.abort",
        comm = &*of.name,
        comm_key = of.key.as_deref().map(short_key),
        world_ranks = roster.world_ranks(),
        rank,
        world_rank = roster.world_rank(rank),
        launcher_rank = roster.launcher_rank(rank),
        nranks = of.world_size
    )
}

/// Records the library in the span of an init.
pub(crate) fn uses(library: &Library) {
    let span = Span::current();
    span.record("nccl.version", display(library.version()));
    span.record("lib.path", display(library.path().display()));
}

/// Counts and logs that making a communicator succeeded or failed.
pub(crate) fn made(name: &str, took: Duration, made: Result<&Identity, &Error>) {
    stats::INIT.add(took);
    let elapsed_ms = millis(took);
    match made {
        Ok(comm) => {
            let Identity {
                scope, roster, key, ..
            } = comm;
            if let Some(took) = scope.as_ref().and_then(|scope| scope.record_recovery()) {
                stats::RECOVER.add(took);
            }
            tracing::info!(
                name: "nccl.comm.ready",
                target: "nccl",
                comm = name,
                comm_key = key.as_deref().map(short_key),
                world_ranks = roster.world_ranks(),
                rank = comm.rank,
                world_rank = roster.world_rank(comm.rank),
                launcher_rank = roster.launcher_rank(comm.rank),
                nranks = comm.world_size,
                elapsed_ms,
                "communicator ready"
            );
        }
        Err(error) => {
            let of = error.operation();
            tracing::error!(
                name: "nccl.comm.failed",
                target: "nccl",
                comm = name,
                world_ranks = of.and_then(Operation::world_ranks),
                rank = of.map(|of| of.rank),
                world_rank = of.map(Operation::world_rank),
                launcher_rank = of.and_then(Operation::launcher_rank),
                elapsed_ms,
                %error,
                "a communicator was not made"
            );
        }
    }
}

/// Counts and logs the end of an abort.
pub(crate) fn aborted(of: &Identity, freed: bool, took: Duration) {
    let (rank, roster) = (of.rank, &of.roster);
    stats::ABORT.add(took);
    let (count, result) = match freed {
        true => (&stats::FREED, "freed"),
        false => (&stats::LEAKED, "leaked"),
    };
    count.count();
    tracing::info!(
        name: "nccl.comm.aborted",
        target: "nccl",
        comm = &*of.name,
        comm_key = of.key.as_deref().map(short_key),
        world_ranks = roster.world_ranks(),
        rank,
        world_rank = roster.world_rank(rank),
        launcher_rank = roster.launcher_rank(rank),
        nranks = of.world_size,
        result,
        elapsed_ms = millis(took),
        "a communicator was aborted"
    );
}

/// Logs that NCCL refused to free a communicator. `of` is `None` for one that was made too late to become a
/// [`Communicator`](crate::Communicator), which has no ranks.
pub(crate) fn not_freed(of: Option<(&str, &Roster, usize)>, failure: &impl Display) {
    tracing::warn!(
        name: "nccl.comm.not_freed",
        target: "nccl",
        comm = of.map(|(name, ..)| name),
        world_ranks = of.and_then(|(_, roster, _)| roster.world_ranks()),
        rank = of.map(|(.., rank)| rank),
        world_rank = of.map(|(_, roster, rank)| roster.world_rank(rank)),
        launcher_rank = of.and_then(|(_, roster, rank)| roster.launcher_rank(rank)),
        %failure,
        "a communicator could not be freed"
    );
}

/// Counts and logs that NCCL has not freed a communicator.
pub(crate) fn leaked_communicator((comm, roster): (&str, &Roster), rank: usize, why: &str) {
    stats::LEAKED_COMMUNICATORS.count();
    tracing::error!(
        name: "nccl.leak",
        target: "nccl",
        what = "communicator",
        comm,
        world_ranks = roster.world_ranks(),
        rank,
        world_rank = roster.world_rank(rank),
        launcher_rank = roster.launcher_rank(rank),
        why,
        "a communicator is leaked: {why}"
    );
}

/// Logs that a value other than a communicator is leaked.
pub(crate) fn leaked(what: &str, why: impl Display) {
    tracing::error!(name: "nccl.leak", target: "nccl", what, %why, "leaked: {what}: {why}");
}

//! A shrink from the call to its end: the order of the steps.

use std::sync::Arc;
use std::time::Instant;

use super::agree::agree;
use super::attempt::{Attempt, topic};
use super::native::{NativeShrink, ended_by, shrink_native};
use super::shrunk::{ResizeWay, Resized};
use crate::communicator::{Communicator, Inner};
use crate::creation::first_handle::first_handle;
use crate::creation::init::{PreparedInit, check_ranks};
use crate::error::{Error, ErrorKind, Result};
use crate::events;
use crate::forked;
use crate::operation::{OperationKind, Shape};
use crate::peers::Supervisor;
use crate::sealed_unique_id::{open_from, seal_for};
use crate::time::deadline_after;
use crate::unique_id::UniqueId;

/// Makes a communicator without the ranks `without`; `aborting` is whether operations under way are ended.
pub(in crate::creation) fn shrink(
    comm: &Communicator,
    name: &str,
    without: &[usize],
    aborting: bool,
) -> Result<Resized> {
    let started = Instant::now();
    let shrunk = shrink_in(comm, name, without, aborting).map_err(|error| {
        error.during(|| {
            let inner = &comm.inner;
            inner.operation(OperationKind::Shrink, Shape::default(), None, started)
        })
    });
    let made = shrunk
        .as_ref()
        .map(|shrunk| shrunk.communicator.inner.identity());
    events::made(name, started.elapsed(), made);
    shrunk
}

fn shrink_in(
    comm: &Communicator,
    name: &str,
    without: &[usize],
    aborting: bool,
) -> Result<Resized> {
    forked::check()?;
    let inner = &comm.inner;
    for &rank in without {
        check_ranks(rank, comm.world_size())?;
    }
    let invalid = |reason: &str| {
        Error::new(ErrorKind::InvalidConfig {
            field: "without",
            reason: reason.to_owned(),
        })
    };
    if without.contains(&comm.rank()) {
        return Err(invalid(
            "this rank is to be left out: it does not call shrink, and drops or aborts its \
             communicator",
        ));
    }
    let supervisor = inner.supervisor.as_ref().ok_or_else(|| {
        invalid("the ranks of this communicator did not meet in a world, and cannot agree")
    })?;
    let deadline = deadline_after(inner.timeouts.init);
    inner.wait_until_revoked();
    let mut refused = None;
    loop {
        let agreed = agree(
            comm,
            &**supervisor,
            name,
            without,
            aborting,
            refused,
            deadline,
        )?;
        let way = agreed.way(inner.roster());
        let prepared = agreed.prepared?;
        if let Some((member, why)) = agreed.failed {
            return Err(Error::rendezvous(format!(
                "{} cannot take part in {name:?}: {why}",
                inner.name_of_rank(member)
            )));
        }
        let roster = supervisor.peers().roster(&agreed.ranks);
        let own = agreed
            .ranks
            .iter()
            .position(|rank| *rank == supervisor.peers().rank());
        let world_rank = supervisor.peers().rank();
        let launcher_rank = own.and_then(|rank| roster.launcher_rank(rank));
        let world_ranks = roster.world_ranks();
        tracing::info!(name: "nccl.comm.shrinking", target: "nccl", comm = name, world_ranks, rank = own, world_rank, launcher_rank, %way, nranks = agreed.ranks.len(), "shrinking");
        let made = match &way {
            ResizeWay::Native => {
                let native = NativeShrink {
                    supervisor,
                    id: &agreed.id,
                    places: &agreed.places,
                    ranks: &agreed.ranks,
                };
                match shrink_native(comm, prepared, &native, aborting)? {
                    Attempt::Made(made) => made,
                    Attempt::Refused(refusal) => {
                        refused = Some(refusal);
                        continue;
                    }
                }
            }
            ResizeWay::Anew { .. } => {
                if aborting {
                    // The ranks that are left out receive the announcement of the abort.
                    inner.abort(&*ended_by(comm, &agreed.places));
                }
                shrink_anew(comm, prepared, &**supervisor, name, &agreed.ranks, deadline)?
            }
        };
        let communicator = first_handle(made);
        return Ok(Resized { communicator, way });
    }
}

fn shrink_anew(
    comm: &Communicator,
    prepared: PreparedInit,
    supervisor: &dyn Supervisor,
    name: &str,
    ranks: &Arc<[usize]>,
    deadline: Instant,
) -> Result<Arc<Inner>> {
    let peers = &**supervisor.peers();
    let first = ranks.first() == Some(&peers.rank());
    let token = first
        .then(|| UniqueId::new(&comm.inner.library))
        .transpose();
    let sealed = match &token {
        Ok(Some(id)) => seal_for(peers, name, id),
        _ => Vec::new(),
    };
    let topic = topic("shrink token", supervisor.key());
    let parts = peers.exchange(&topic, Some(ranks), &sealed, deadline, None);
    // On the rank that failed, its own error is more useful.
    token?;
    let parts = parts?;
    let sealed = parts.first().map(|part| &part[..]).unwrap_or_default();
    if sealed.is_empty() {
        let who = peers.describe(ranks.first().copied().unwrap_or_default());
        return Err(Error::rendezvous(format!(
            "{who} could not make a token for {name:?}"
        )));
    }
    let id = open_from(peers, name, sealed)?;
    prepared.join(&id, deadline, || false)
}

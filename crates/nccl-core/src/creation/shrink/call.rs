//! What a program calls, and the order in which things happen.

use std::sync::Arc;
use std::time::Instant;

use super::agree::agree;
use super::attempt::{Attempt, topic};
use super::native::{Native, ended_by, shrink_native};
use super::shrunk::{ShrinkWay, Shrunk};
use crate::communicator::{Communicator, Inner};
#[cfg(doc)]
use crate::creation::CommunicatorBuilder;
use crate::creation::init::{Prepared, check_ranks};
use crate::envelope::{open_on, seal_on};
use crate::error::{Error, ErrorKind, Result};
use crate::events;
use crate::forked;
use crate::operation::{OperationKind, Shape};
use crate::peers::Supervisor;
use crate::time::deadline_after;
use crate::unique_id::UniqueId;

impl Communicator {
    /// Makes a communicator without the ranks `without`, and without those that are gone.
    ///
    /// All ranks that are left have to call it with the same ranks; those that are left out do not, and drop
    /// or abort this communicator. The new ranks are in the order of the old ones. It has this one's stream
    /// and limits.
    ///
    /// Nothing may be under way on this communicator: wait for its operations first. It stays as it is. Also
    /// when it has ended, because a rank died: then the ranks that live make a new one. Where NCCL refuses on any rank, because
    /// it has noticed that a peer is gone, all ranks abort this communicator and make a new one.
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::build`]. [`ErrorKind::Rendezvous`] names ranks that did not come within the
    /// init limit, or came with other ranks to leave out; [`ErrorKind::InvalidConfig`] for a communicator
    /// whose ranks did not meet in a `World`, and on a rank that is to be left out.
    ///
    /// Wraps `ncclCommShrink` where that is possible ([`Shrunk::way`]).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let context = cudarc::driver::CudaContext::new(0)?;
    /// # let streams = [context.new_stream()?, cudarc::driver::CudaContext::new(1)?.new_stream()?];
    /// let comms = nccl::Communicator::init_all("both", &streams)?;
    /// let shrunk = comms[1].shrink("without rank 0", &[0])?;
    /// assert_eq!(shrunk.communicator.world_size(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn shrink(&self, name: &str, without: &[usize]) -> Result<Shrunk> {
        self.shrink_as(name, without, false)
    }

    /// As [`shrink`](Self::shrink), when operations may be under way that will not end: they end now, and so
    /// does this communicator, on all ranks, those that are left out included.
    ///
    /// # Errors
    /// As [`shrink`](Self::shrink).
    ///
    /// Wraps `ncclCommShrink` with `NCCL_SHRINK_ABORT`, and `ncclCommAbort`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let context = cudarc::driver::CudaContext::new(0)?;
    /// # let streams = [context.new_stream()?, cudarc::driver::CudaContext::new(1)?.new_stream()?];
    /// let comms = nccl::Communicator::init_all("both", &streams)?;
    /// let shrunk = comms[1].shrink_aborting("without rank 0", &[0])?;
    /// assert!(comms[1].finalize().is_err(), "it has ended");
    /// # Ok(())
    /// # }
    /// ```
    pub fn shrink_aborting(&self, name: &str, without: &[usize]) -> Result<Shrunk> {
        self.shrink_as(name, without, true)
    }

    fn shrink_as(&self, name: &str, without: &[usize], aborting: bool) -> Result<Shrunk> {
        let started = Instant::now();
        let shrunk = self.shrink_in(name, without, aborting).map_err(|error| {
            error.during(|| {
                let inner = &self.inner;
                inner.operation(OperationKind::Shrink, Shape::default(), None, started)
            })
        });
        let made = shrunk
            .as_ref()
            .map(|shrunk| shrunk.communicator.inner.identity());
        events::made(name, started.elapsed(), made);
        shrunk
    }

    fn shrink_in(&self, name: &str, without: &[usize], aborting: bool) -> Result<Shrunk> {
        forked::check()?;
        let inner = &self.inner;
        for &rank in without {
            check_ranks(rank, self.world_size())?;
        }
        let invalid = |reason: &str| {
            Error::new(ErrorKind::InvalidConfig {
                field: "without",
                reason: reason.to_owned(),
            })
        };
        if without.contains(&self.rank()) {
            return Err(invalid(
                "this rank is to be left out: it does not call shrink, and drops or aborts its \
                 communicator",
            ));
        }
        let board = inner.board.as_ref().ok_or_else(|| {
            invalid("the ranks of this communicator did not meet in a world, and cannot agree")
        })?;
        let deadline = deadline_after(inner.timeouts.init);
        inner.wait_until_revoked();
        let mut refused = None;
        loop {
            let agreed = agree(self, &**board, name, without, aborting, refused, deadline)?;
            let way = agreed.way(inner.roster());
            let prepared = agreed.prepared?;
            if let Some((member, why)) = agreed.failed {
                return Err(Error::rendezvous(format!(
                    "{} cannot take part in {name:?}: {why}",
                    inner.member(member)
                )));
            }
            let roster = board.peers().roster(&agreed.ranks);
            let own = agreed
                .ranks
                .iter()
                .position(|rank| *rank == board.peers().rank());
            let world_rank = board.peers().rank();
            let launcher_rank = own.and_then(|rank| roster.launcher_rank(rank));
            let world_ranks = roster.world_ranks();
            tracing::info!(name: "nccl.comm.shrinking", target: "nccl", comm = name, world_ranks, rank = own, world_rank, launcher_rank, %way, nranks = agreed.ranks.len(), "shrinking");
            let made = match &way {
                ShrinkWay::Native => {
                    let native = Native {
                        board,
                        id: &agreed.id,
                        places: &agreed.places,
                        ranks: &agreed.ranks,
                    };
                    match shrink_native(self, prepared, &native, aborting)? {
                        Attempt::Made(made) => made,
                        Attempt::Refused(refusal) => {
                            refused = Some(refusal);
                            continue;
                        }
                    }
                }
                ShrinkWay::Anew { .. } => {
                    if aborting {
                        // Those that are left out hear of it.
                        inner.abort(&*ended_by(self, &agreed.places));
                    }
                    self.shrink_anew(prepared, &**board, name, &agreed.ranks, deadline)?
                }
            };
            let communicator = Self::of(made);
            return Ok(Shrunk { communicator, way });
        }
    }

    fn shrink_anew(
        &self,
        prepared: Prepared,
        board: &dyn Supervisor,
        name: &str,
        ranks: &Arc<[usize]>,
        deadline: Instant,
    ) -> Result<Arc<Inner>> {
        let peers = &**board.peers();
        let first = ranks.first() == Some(&peers.rank());
        let token = first
            .then(|| UniqueId::new(&self.inner.library))
            .transpose();
        let sealed = match &token {
            Ok(Some(id)) => seal_on(peers, name, id),
            _ => Vec::new(),
        };
        let topic = topic("shrink token", board.key());
        let parts = peers.round(&topic, Some(ranks), &sealed, deadline, None);
        // What is wrong here is the better answer on this rank.
        token?;
        let parts = parts?;
        let sealed = parts.first().map(|part| &part[..]).unwrap_or_default();
        if sealed.is_empty() {
            let who = peers.describe(ranks.first().copied().unwrap_or_default());
            return Err(Error::rendezvous(format!(
                "{who} could not make a token for {name:?}"
            )));
        }
        let id = open_on(peers, name, sealed)?;
        prepared.join(&id, deadline, || false)
    }
}

//! Messages between ranks beside NCCL: barriers, small values, phases and failures.

use std::error::Error as StdError;
use std::sync::Arc;

use super::environment::Rendezvous;
use super::node::Node;
use super::request::{NO_ANSWER, Request};
use super::world::World;
use crate::departure::{Departure, Failure, cut};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::forked;
use crate::time::deadline_after;

/// The longest failure text that is sent, in bytes.
const LONGEST_CHAIN: usize = 16 << 10;

impl World {
    /// Waits until every rank has reached this barrier.
    pub fn barrier(&self, name: &str) -> Result<()> {
        let topic = format!("barrier/{name}");
        self.exchange(&topic, None, &[], deadline_after(self.timeout()), None)
            .map(drop)
    }

    /// Contributes `bytes`, and returns the bytes of all ranks, by rank.
    pub fn all_gather(&self, name: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let topic = format!("gather/{name}");
        self.exchange(&topic, None, bytes, deadline_after(self.timeout()), None)
    }

    /// Returns the `bytes` of rank `root` on every rank; those of the other ranks are ignored.
    pub fn broadcast(&self, name: &str, root: usize, bytes: &[u8]) -> Result<Vec<u8>> {
        check_rank("root", root, self.size())?;
        let topic = format!("broadcast/{name}/{root}");
        let part = if self.rank() == root { bytes } else { &[] };
        let deadline = deadline_after(self.timeout());
        let mut parts = self.exchange(&topic, None, part, deadline, None)?;
        Ok(parts.swap_remove(root))
    }

    /// Sets this rank's phase, which appears in the errors of ranks that wait for this rank.
    pub fn phase(&self, name: &str) {
        if forked::is_child() {
            return;
        }
        self.session.set_phase(name);
        let name = name.to_owned();
        self.send(NO_ANSWER, Request::Phase { name });
    }

    /// Leaves, and reports the reason to every rank: requests that wait for this rank end at once, with this error and the
    /// chain of its sources.
    pub fn fails(&mut self, error: &(dyn StdError + 'static)) {
        let mut chain = chain(error);
        cut(&mut chain, LONGEST_CHAIN);
        self.set_final_departure(Departure::Failed(Failure::Error(chain)));
    }

    /// Returns a group of some ranks, in this order, under a name. All of them must give the same list, and no rank may be
    /// in two groups of one name.
    pub fn subgroup(&self, name: &str, ranks: &[usize]) -> Result<Subgroup<'_>> {
        for (index, &rank) in ranks.iter().enumerate() {
            check_rank("rank", rank, self.size())?;
            if ranks[..index].contains(&rank) {
                return Err(Error::rendezvous(format!(
                    "rank {rank} is twice in group {name:?}"
                )));
            }
        }
        if !ranks.contains(&self.rank()) {
            return Err(Error::rendezvous(format!(
                "rank {} is not in group {name:?} of ranks {ranks:?}, and cannot take part",
                self.rank()
            )));
        }
        Ok(Subgroup {
            world: self,
            name: name.to_owned(),
            ranks: ranks.into(),
        })
    }
}

pub(super) fn check_rank(role: &'static str, rank: usize, world_size: usize) -> Result<()> {
    if rank < world_size {
        return Ok(());
    }
    Err(Error::new(crate::error::ErrorKind::NoSuchRank {
        role,
        rank,
        world_size,
    }))
}

/// Returns an error and its sources as one text.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let cause = source.to_string();
        // Many errors include their source in their own text.
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
        next = source.source();
    }
    text
}

impl Rendezvous {
    /// Reports to the ranks that wait in [`World::join`] that this one will not join, and why: the chain of
    /// the error.
    ///
    /// Waits for rank 0 no longer than the rendezvous' timeout. Rank 0 itself listens for as long, at the
    /// address at which it would have coordinated, until all other ranks have joined and received it.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] when rank 0 does not answer, or on rank 0, when some ranks have not joined;
    /// [`ErrorKind::Io`] when the socket cannot be made.
    ///
    /// ```no_run
    /// # fn weights() -> std::io::Result<()> { Ok(()) }
    /// let rendezvous = nccl::Rendezvous::from_env()?;
    /// if let Err(error) = weights() {
    ///     rendezvous.fail(&error)?;
    /// }
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn fail(self, error: &(dyn StdError + 'static)) -> Result<()> {
        forked::begin()?;
        let mut chain = chain(error);
        cut(&mut chain, LONGEST_CHAIN);
        self.job_identity().check()?;
        Node::report_failure(&self, chain)
    }
}

/// Some ranks of a [`World`], from [`World::subgroup`].
///
/// ```
/// fn ready(pair: &nccl::control::Subgroup<'_>) -> nccl::Result<()> {
///     pair.barrier("ready")
/// }
/// ```
#[derive(Debug)]
pub struct Subgroup<'w> {
    world: &'w World,
    name: String,
    ranks: Arc<[usize]>,
}

impl Subgroup<'_> {
    /// The ranks of the group in the world, in the group's order.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// assert_eq!(world.subgroup("alone", &[0])?.ranks(), [0]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// As [`World::barrier`], for the ranks of the group.
    ///
    /// # Errors
    /// As [`World::barrier`]; also when another rank gives another list for this group.
    ///
    /// ```
    /// let world = nccl::World::single();
    /// world.subgroup("alone", &[0])?.barrier("ready")?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn barrier(&self, name: &str) -> Result<()> {
        self.exchange("barrier", name, &[]).map(drop)
    }

    /// As [`World::all_gather`], for the ranks of the group; the values are in its order.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier).
    ///
    /// ```
    /// let world = nccl::World::single();
    /// assert_eq!(world.subgroup("alone", &[0])?.all_gather("x", b"1")?, [b"1"]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn all_gather(&self, name: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.exchange("gather", name, bytes)
    }

    fn exchange(&self, kind: &str, name: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let topic = format!("group/{}/{kind}/{name}", self.name);
        let deadline = deadline_after(self.world.timeout());
        let members = Some(&self.ranks);
        self.world.exchange(&topic, members, bytes, deadline, None)
    }
}

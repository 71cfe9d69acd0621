//! A process that votes and has no rank.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::environment::Rendezvous;
use super::node::Node;
use crate::departure::Departure;
use crate::error::Result;
use crate::forked::{self, Resident};
use crate::time::deadline_after;
use nccl_base::from_outside::{FromOutside, world as world_limit};

/// A process of a job that votes and has no rank: when a network is cut in two, the half that reaches it goes on.
///
/// It comes with the first generation, whose ranks are told how many they wait for ([`Rendezvous::witnesses`]), and stays as long as
/// this value lives; a server's front is the case in mind. It hears nothing of what ranks tell each other; to see what becomes of
/// them, a process has an [`Observer`](crate::Observer) as well. A witness that ends is like a rank that leaves: its vote is not
/// missed.
///
/// ```no_run
/// use nccl::{Rendezvous, Witness};
///
/// // On all ranks: Rendezvous::from_env()?.witnesses(1)
/// let witness = Witness::join(Rendezvous::observer("tcp:10.0.0.5:29400")?.job("server-3"), 0)?;
/// println!("witness of epoch {}", witness.epoch());
/// # Ok::<(), nccl::Error>(())
/// ```
pub struct Witness {
    node: Resident<Arc<Node>>,
}

/// Of the slots, which ranks and newcomers have from 0.
const FIRST_SLOT: u32 = 1 << 30;

impl Witness {
    /// Comes to the ranks that meet, as witness `number` of those that they expect, counted from 0; waits until all are there, at most
    /// for the rendezvous's timeout. It has to be one for an observer, of the first epoch.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) when the ranks do not all come, or expect no such witness.
    ///
    /// ```no_run
    /// # use nccl::{Rendezvous, Witness};
    /// let witness = Witness::join(Rendezvous::observer_from_env()?, 0)?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn join(rendezvous: Rendezvous, number: u32) -> Result<Self> {
        forked::begin()?;
        rendezvous.job.check()?;
        FromOutside::of_process()?;
        let limit: Duration = world_limit(rendezvous.timeout);
        let slot = FIRST_SLOT.saturating_add(number);
        let node = Node::witness(&rendezvous, slot, deadline_after(limit))?;
        Ok(Self {
            node: Resident::new(node),
        })
    }

    /// The epoch of the ranks, in which it votes; it goes on with them.
    ///
    /// ```no_run
    /// # use nccl::{Rendezvous, Witness};
    /// let witness = Witness::join(Rendezvous::observer_from_env()?, 0)?;
    /// assert_eq!(witness.epoch(), 0);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn epoch(&self) -> u64 {
        match forked::is_child() {
            true => 0,
            false => self.node.generation(),
        }
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        if !forked::is_child() {
            self.node.leave(u64::MAX, Departure::Left);
        }
    }
}

impl fmt::Debug for Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Witness").finish_non_exhaustive()
    }
}

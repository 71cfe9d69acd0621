//! A process that votes and has no rank.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::environment::Rendezvous;
use super::node::{NO_GENERATION, Node};
use crate::departure::Departure;
use crate::error::Result;
use crate::forked::{self, ForkGuarded};
use crate::time::deadline_after;
use nccl_base::env_timeouts::{EnvTimeouts, world_timeout};

/// A process of a job that votes and has no rank: when the network is partitioned, the half that reaches the witness
/// continues.
///
/// A witness joins with the first generation, whose ranks are configured to wait for it ([`Rendezvous::witnesses`]),
/// and stays as long as this value lives; a typical witness is the front end of a server. It receives no messages
/// between ranks; a process that also watches the ranks has an [`Observer`](crate::Observer) as well. A witness that
/// ends is treated like a rank that leaves: its vote is not required any more.
///
/// ```no_run
/// use nccl::control::Witness;
/// use nccl::Rendezvous;
///
/// // On all ranks: Rendezvous::from_env()?.with(|meet| meet.witnesses = 1)
/// let meet = Rendezvous::observer("tcp:10.0.0.5:29400")?.with(|meet| meet.job = "server-3".into());
/// let witness = Witness::join(meet, 0)?;
/// println!("witness of generation {}", witness.generation());
/// # Ok::<(), nccl::Error>(())
/// ```
pub struct Witness {
    node: ForkGuarded<Arc<Node>>,
}

/// The first slot of witnesses; the slots of ranks and joiners count from 0.
const FIRST_SLOT: u32 = 1 << 30;

impl Witness {
    /// Joins the ranks as witness `number`, counted from 0, of those that they expect. Waits until all are there, at
    /// most for the rendezvous's timeout. The rendezvous must be one for an observer, of the first generation.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) when not all ranks join, or they do not expect
    /// this witness.
    ///
    /// ```no_run
    /// # use nccl::control::Witness;
    /// # use nccl::Rendezvous;
    /// let witness = Witness::join(Rendezvous::observer_from_env()?, 0)?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn join(rendezvous: Rendezvous, number: u32) -> Result<Self> {
        forked::begin()?;
        rendezvous.job_identity().check()?;
        EnvTimeouts::of_process()?;
        let timeout: Duration = world_timeout(rendezvous.timeout);
        let slot = FIRST_SLOT.saturating_add(number);
        let node = Node::start_witness(&rendezvous, slot, deadline_after(timeout))?;
        Ok(Self {
            node: ForkGuarded::new(node),
        })
    }

    /// Returns the generation of the ranks in which this witness votes; the witness follows the ranks into later
    /// generations.
    ///
    /// ```no_run
    /// # use nccl::control::Witness;
    /// # use nccl::Rendezvous;
    /// let witness = Witness::join(Rendezvous::observer_from_env()?, 0)?;
    /// assert_eq!(witness.generation(), 0);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn generation(&self) -> u64 {
        match forked::is_child() {
            true => 0,
            false => self.node.generation(),
        }
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        if !forked::is_child() {
            self.node.leave(NO_GENERATION, Departure::Left);
        }
    }
}

impl fmt::Debug for Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Witness").finish_non_exhaustive()
    }
}

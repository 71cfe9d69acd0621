//! The identity of a communicator: its name, and its rank in its world.

mod clock;
mod recorder_scope;
mod world_rank;

use std::sync::Arc;

use nccl_base::fault::Roster;

pub use clock::{Clock, ClockSource};
#[doc(hidden)]
pub use recorder_scope::RecorderScope;
pub(crate) use recorder_scope::single_place;
pub use world_rank::WorldRank;

/// The identity of a communicator.
#[doc(hidden)]
pub struct Identity {
    #[doc(hidden)]
    pub name: Arc<str>,
    #[doc(hidden)]
    pub rank: usize,
    #[doc(hidden)]
    pub world_size: usize,
    /// The same on all of its ranks; `None` for a communicator that was made outside of this crate.
    #[doc(hidden)]
    pub key: Option<Arc<str>>,
    /// The scope of the world rank that made it; `None` without a world.
    #[doc(hidden)]
    pub scope: Option<Arc<RecorderScope>>,
    /// The world ranks of its ranks, in order.
    pub(crate) members: Option<Arc<[usize]>>,
    /// The world ranks and launcher ranks of its ranks.
    #[doc(hidden)]
    pub roster: Arc<Roster>,
}

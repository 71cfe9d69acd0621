//! Which communicator it is, and of which rank of which world.

mod clock;
mod home;
mod place;

use std::sync::Arc;

use nccl_base::fault::Roster;

pub use clock::{Clock, ClockSource};
#[doc(hidden)]
pub use home::Home;
pub(crate) use home::only;
pub use place::Place;

/// Which communicator it is.
#[doc(hidden)]
pub struct Identity {
    #[doc(hidden)]
    pub name: Arc<str>,
    #[doc(hidden)]
    pub rank: usize,
    #[doc(hidden)]
    pub world_size: usize,
    /// The same on all of its ranks; `None` for one that was made elsewhere.
    #[doc(hidden)]
    pub key: Option<Arc<str>>,
    /// The rank of a world that made it.
    #[doc(hidden)]
    pub home: Option<Arc<Home>>,
    /// The ranks of that world that are its ranks, in order.
    pub(crate) members: Option<Arc<[usize]>>,
    /// Which ranks of that world, and of its launcher, they are.
    #[doc(hidden)]
    pub roster: Arc<Roster>,
}

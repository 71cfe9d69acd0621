//! The identity of a communicator: its name, and its rank in its world.

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
    /// The rank of the world that made it, if a world did.
    #[doc(hidden)]
    pub home: Option<Arc<Home>>,
    /// Its ranks' numbers in that world, in order.
    pub(crate) members: Option<Arc<[usize]>>,
    /// Its ranks' numbers in that world, and from its launcher.
    #[doc(hidden)]
    pub roster: Arc<Roster>,
}

//! Collectives: operations of all ranks of a communicator.
//!
//! Each is described by a row of the table in `rules`. `Communicator` issues it at once (`communicator`: the public
//! functions); [`Group`](crate::Group) records it, to be issued with others.

mod collective;
mod communicator;
mod config;
pub(crate) mod rules;

#[doc(hidden)]
pub use collective::same_type;
pub(crate) use collective::{Collective, issue_collective};
pub use config::CollectiveConfig;
pub(crate) use config::RawCollectiveConfig;
pub(crate) use rules::ALL_TO_ALL;

//! Collectives: operations of all ranks of a communicator.
//!
//! Each is described by a row of the table in `rules`. `Communicator` issues it at once (`communicator`: the public
//! functions); [`Group`](crate::Group) records it, to be issued with others.

mod collective;
mod communicator;
pub(crate) mod rules;

#[doc(hidden)]
pub use collective::same_type;
pub(crate) use collective::{Collective, issue_collective};
pub(crate) use rules::ALL_TO_ALL;

//! Collectives: what all ranks of a communicator do together.
//!
//! Each is described by a row of the table in `rules`. `Communicator` issues it at once;
//! [`Group`](crate::Group) records it, to be issued with others.

mod collective;
mod issued;
pub(crate) mod rules;

pub(crate) use collective::Collective;
#[doc(hidden)]
pub use collective::same_type;
pub(crate) use rules::ALL_TO_ALL;

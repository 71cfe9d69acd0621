//! An all-to-all that is checked once and issued often.
//!
//! - `builder`: the settings, their comparison between the ranks, and the allocation of memory;
//! - `traffic`: the amount of data, which the ranks exchange so that all make the same choice;
//! - `choose`: the usable algorithms, their modelled times, and the choice; `explain`: the explanation of the choice;
//! - `payloads`: the buffers of one exchange;
//! - `exchange`: the plan: issued, or captured into a graph.

mod builder;
mod choose;
mod exchange;
mod explain;
mod payloads;
mod traffic;

pub use builder::AllToAllBuilder;
pub use exchange::AllToAll;
pub use explain::{Alternative, Explanation};
pub use payloads::Payloads;

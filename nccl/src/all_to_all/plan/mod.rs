//! An all-to-all that is checked once and done often.
//!
//! - `builder`: what is exchanged, and how; the ranks compare that, and memory is allocated;
//! - `choose`: which algorithms can be used, what the model says of each, and what came of it, in words;
//! - `payloads`: the buffers of one exchange;
//! - here and in `exchange`, the plan: issued, or captured into a graph.

mod builder;
mod choose;
mod exchange;
mod payloads;

pub use builder::AllToAllBuilder;
pub use choose::{Alternative, Explanation};
pub use exchange::{AllToAll, CapturedAllToAll};
pub use payloads::Payloads;

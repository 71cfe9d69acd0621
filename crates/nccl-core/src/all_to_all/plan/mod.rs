//! An all-to-all that is checked once and done often.
//!
//! - `builder`: what is exchanged, and how; the ranks compare that, and memory is allocated;
//! - `traffic`: how much there is, which the ranks tell each other, so that all decide alike;
//! - `choose`: which algorithms can be used, what the model says of each, and what came of it; `explain`: in words;
//! - `payloads`: the buffers of one exchange;
//! - here and in `exchange`, the plan: issued, or captured into a graph.

mod builder;
mod choose;
mod exchange;
mod explain;
mod payloads;
mod traffic;

pub use builder::AllToAllBuilder;
pub use exchange::{AllToAll, CapturedAllToAll};
pub use explain::{Alternative, Explanation};
pub use payloads::Payloads;

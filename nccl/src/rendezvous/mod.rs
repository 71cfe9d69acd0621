//! How ranks find each other: who they are, where they meet, and what they tell each other before and
//! beside NCCL.
//!
//! - `environment`: what a launcher says about this process;
//! - `store`: what ranks put together, kept by rank 0's process;
//! - `wire`: how the other processes of the host reach it, over a Unix socket;
//! - `world`: one rank's view of all of them.
//!
//! All ranks are on one host so far; a launch that spans several is refused by name.

mod environment;
mod store;
mod wire;
mod world;

pub use environment::Rendezvous;
pub use world::World;

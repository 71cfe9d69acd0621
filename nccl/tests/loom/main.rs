//! Every interleaving of threads that share state.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p nccl --test loom --release
//! ```
//!
//! - `faults`: the fault that ends a communicator on all ranks, heard before it is there, while it is made and while it is
//!   dropped.
//!
//! The crate's own code runs; only NCCL and the other ranks, which are behind it, are simulated.
#![cfg(loom)]

mod faults;

#[allow(unreachable_pub, missing_docs, unused_imports)]
#[path = "../../../crates/nccl-base/src/sync.rs"]
mod sync;

#[allow(dead_code, unreachable_pub)]
#[path = "../../src/supervision/fault_registry.rs"]
mod fault_registry;

#[allow(dead_code, unreachable_pub, missing_docs)]
#[path = "../../../crates/nccl-core/src/state.rs"]
mod state;

//! The tests of other files once more, in launch mode `NonBlocking`: the behaviour for a program is the same.
//!
//! Any other test file runs in it with `NCCL_TEST_LAUNCH_MODE=non-blocking`; `tests/launch_modes.rs` has what is
//! special about it.

// Each brings its own copy of the support.
#![allow(clippy::duplicate_mod)]

#[path = "abort_together.rs"]
mod abort_together;
#[path = "aborts.rs"]
mod aborts;
#[path = "awaiting.rs"]
mod awaiting;
#[path = "dead_peers.rs"]
mod dead_peers;
#[path = "deadlines.rs"]
mod deadlines;
#[path = "hangs/main.rs"]
mod hangs;
#[path = "killed.rs"]
mod killed;
#[path = "members/main.rs"]
mod members;
#[path = "memory_release.rs"]
mod memory_release;
#[path = "operations.rs"]
mod operations;
#[path = "plans.rs"]
mod plans;
#[path = "revoke.rs"]
mod revoke;

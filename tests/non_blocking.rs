//! The tests of other files once more, in launch mode `NonBlocking`: the behaviour for a program is the same.
//!
//! Any other test file runs in it with `NCCL_TEST_LAUNCH_MODE=non-blocking`; `tests/api/launch_modes.rs` has what is
//! special about it.

// `aborts`, elsewhere a binary of its own, brings its own copy of the support.
#![allow(clippy::duplicate_mod)]

mod support;

#[path = "failures/abort_together.rs"]
mod abort_together;
#[path = "aborts.rs"]
mod aborts;
#[path = "api/awaiting.rs"]
mod awaiting;
#[path = "failures/dead_peers.rs"]
mod dead_peers;
#[path = "failures/deadlines.rs"]
mod deadlines;
#[path = "failures/hangs/mod.rs"]
mod hangs;
#[path = "failures/killed.rs"]
mod killed;
#[path = "api/members/mod.rs"]
mod members;
#[path = "api/memory_release.rs"]
mod memory_release;
#[path = "api/operations.rs"]
mod operations;
#[path = "api/plans.rs"]
mod plans;
#[path = "api/revoke.rs"]
mod revoke;

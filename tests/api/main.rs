//! What the crate promises to a program that works: operations, memory, plans, members of worlds.
//!
//! One binary of many files: each binary compiles the support again, and links everything. `tests/Cargo.toml` says which
//! tests have one of their own.

#[path = "../support/delayed_cable.rs"]
mod delayed_cable;
#[path = "../support/isolated_hosts.rs"]
mod isolated_hosts;
#[path = "../support/programs.rs"]
mod programs;
#[path = "../random/mod.rs"]
mod random;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/switch.rs"]
mod switch;

mod all_to_all;
mod awaiting;
mod buffers;
mod captures_differ;
mod collectives;
mod communicator_settings;
mod device_api;
mod events;
mod expert_parallel;
mod foreign_code;
mod held_by_graphs;
mod launch_modes;
mod load_store;
mod many_communicators;
mod members;
mod memory;
mod memory_release;
mod one_sided;
mod operations;
mod plans;
mod random_worlds;
mod revoke;
mod send_sync;
mod splits;
mod steps;
mod store;

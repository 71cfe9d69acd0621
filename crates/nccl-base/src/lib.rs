//! What the crates of `nccl` share: values that an error can carry, and small tools. The crate `nccl` re-exports the values
//! for programs.
//!
//! | module | contents |
//! |---|---|
//! | [`error`], [`error_report`] | what went wrong, as a value and as plain data |
//! | [`fault`] | why a communicator was ended: the cause that all of its ranks return |
//! | [`operation`], [`data_type`], [`reduce_op`] | the operation that a program requested |
//! | [`departure`] | how a rank departed, how an unfinished exchange ended |
//! | [`report`], [`warning`] | findings of checks, and what is known of NCCL's warnings |
//! | [`system`], [`launch_mode`] | facts of this machine and its environment, and how NCCL is called |
//! | [`threads`] | failures of the system to start threads |
//! | [`env_timeouts`], [`variables`] | timeouts that the environment sets, names of variables |
//! | [`wire`] | values that are sent to other processes, and come from them |
//! | [`ranges`], [`sanitize`], [`bounded_write`], [`atomic_file`] | output of texts |
//! | [`sync`], [`time`], [`clock`], [`forked`], [`host`] | locks, deadlines, clocks, forks, the name of the host |
#![cfg(not(loom))]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "an internal crate: who reads its pages reads its sources"
)]

#[cfg(not(target_os = "linux"))]
compile_error!("the nccl crate works on Linux only, as NCCL does");

pub mod atomic_file;
pub mod bounded_write;
pub mod clock;
pub mod data_type;
pub mod departure;
pub mod env_timeouts;
pub mod error;
pub mod error_report;
pub mod fault;
pub mod forked;
pub mod host;
pub mod launch_mode;
pub mod operation;
pub mod ranges;
pub mod reduce_op;
pub mod report;
pub mod roster;
pub mod sanitize;
pub mod sync;
pub mod system;
pub mod threads;
pub mod time;
pub mod variables;
pub mod warning;
pub mod wire;

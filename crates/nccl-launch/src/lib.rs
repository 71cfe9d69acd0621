//! Starts the ranks of a world on this host, watches them, and ends them: the library behind `nccl-run`.
//!
//! ```
//! use std::process::Command;
//! use nccl::launch::Fleet;
//!
//! let fleet = Fleet::builder(4).start(|_| {
//!     let mut command = Command::new("sh");
//!     command.args(["-c", "echo I am $NCCL_RUN_RANK of $NCCL_RUN_WORLD_SIZE"]);
//!     command
//! })?;
//! assert!(fleet.wait().is_success());
//! # Ok::<(), nccl::Error>(())
//! ```
//!
//! # What a rank gets
//! The variables that [`Rendezvous::from_env`](nccl_control::Rendezvous::from_env) reads, a fresh secret in a file that
//! only this user can read, and a process group of its own. Because of the separate process group, Ctrl-C at a terminal
//! reaches the process that started the fleet and not the ranks; that process decides what to do. This crate installs
//! no signal handler, waits for no children that it did not start, and does not change this process's environment.
//!
//! # What is ended, and when
//! A rank is its process group: the process that the fleet started and the processes that it starts, unless they move
//! into a group of their own.
//!
//! - When a rank's first process ends, the rest of its group has half a second to close the rank's output, and is then
//!   killed.
//! - When a rank fails, the others may continue for a while ([`FleetBuilder::linger`]), are sent SIGTERM, and after the
//!   grace period ([`FleetBuilder::grace`]) SIGKILL; or they are left alone ([`FleetBuilder::keep_others`]).
//! - When the [`Fleet`] is dropped, all groups are killed.
//! - When this process ends for any reason, including SIGKILL, the kernel kills the ranks' first processes, and a small
//!   shell process of the fleet (the keeper) kills all groups and removes the fleet's directory. Without `/bin/sh`
//!   there is no keeper, and only the first processes are killed. A child that this process forks without `exec`
//!   inherits the connection to the keeper; the keeper treats this process as alive until that child has ended as well.
//!
//! # Who died first
//! The fleet detects ends through process descriptors (pidfd), in the order in which the kernel reports them.
//! [`Report::first`] is the first end that the fleet had not asked for. [`RankEnd`] contains what is known about an
//! end.
//!
//! Ranks that have joined their `World` learn of the end as well: the fleet takes part in the world as an `Observer`,
//! so that their errors say "killed by SIGKILL" and contain the last output of the dead rank, instead of saying that
//! its connection closed.
//!
//! - `builder`, `environment`: what a rank is started with;
//! - `fleet`, `event`, `report`, and [`Exit`]: what the caller sees;
//! - `watcher`: the thread that decides; `rank`, `process`: one process; `oom`: whether the OOM killer ended a process;
//! - `exit_reporter`: reports a rank's end to the other ranks;
//! - `keeper`: cleans up when this process is killed;
//! - `output`: where the ranks' output goes; `pumps`: the threads that read it;
//! - `nccl_interface`: one interface for NCCL and for the ranks' own connections.
#![cfg(not(loom))]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "an internal crate: its readers have the sources"
)]

#[cfg(not(target_os = "linux"))]
compile_error!("the nccl crate works on Linux only, as NCCL does");

use nccl_base::{bounded_write, departure, error, forked, host, sanitize, sync};

mod builder;
mod environment;
mod event;
mod exit_reporter;
mod fleet;
mod keeper;
mod nccl_interface;
mod oom;
mod output;
mod process;
mod pumps;
mod rank;
mod report;
mod watcher;

pub use builder::FleetBuilder;
pub use event::{Event, Events};
pub use fleet::Fleet;
pub use nccl_base::departure::{Exit, OomKill, Signal};
#[doc(hidden)]
pub use nccl_interface::nccl_variables_for;
pub use output::{Line, Output, Stream};
pub use report::{RankEnd, Report};

/// For `nccl-run`.
#[doc(hidden)]
pub use crate::bounded_write::write_within;

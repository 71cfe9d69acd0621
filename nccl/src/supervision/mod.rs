//! Fault propagation: a fault that ends a communicator on one rank ends it on all ranks, with one cause that all of them report.
//!
//! NCCL does not inform other ranks: the ranks of an aborted communicator wait for each other for ever, and an error
//! that one of them reports after its own deadline is a consequence, not a cause. So the rank that gives a communicator
//! up announces that on its [`RankSession`](nccl_control::RankSession) before it aborts the communicator:
//!
//! ```text
//! the rank that found it                        every rank, that one included
//!   begins its abort ──announces the fault──▶     the first notice for a communicator is its fault,
//!                       (the coordinator          written once: all ranks receive it in the same order
//!                        orders)                  aborts its own communicator, on a thread of its own
//!                                                 reports when NCCL has released it
//!                        ◀──── when all have reported, or the timeout has passed ────▶
//!   returns its error, with the missing ranks     returns the same cause
//! ```
//!
//! A rank that dies, or fails ([`World::fail`](crate::World::fail)), ends all communicators of which it is a member the
//! same way; the coordinator's notice takes the place of the announcement. A rank that leaves in order ends nothing.
//!
//! An error waits for the other ranks because, until they have aborted as well, their kernels may still write
//! into memory of this rank over the peer-to-peer connections of the operation that failed, and the caller that
//! gets the error may free that memory. Departed ranks are not waited for; ranks that do not answer are
//! named in the error. When the connection to the coordinator is lost, no rank can confirm; the error then waits
//! a moment in which the other ranks, which see the same loss, end their communicators.
//!
//! - `diagnosis`: a rank whose operation timed out is not the rank that made it wait: the reports of all ranks (`rank_report`)
//!   are collected, and the root cause determined (`root_cause`), before a fault is announced; `pending_diagnoses`: the collected
//!   reports;
//! - `supervisor`: one communicator as its rank sees it;
//! - `fault_registry`: the registered communicators, and the decided faults on them;
//! - `init_supervision`: communicators before NCCL is called, and their failures;
//! - `fault_listener`: the notices of a session, and the communicators they concern;
//! - `world_peers`: the ranks of a session, as its communicators see them; `attach`, `scope_recorder`: what this crate attaches
//!   to a session;
//! - `straggler_log`: log events for stragglers; `inside_nccl`: what NCCL reports about a call; `ras_evidence`: what
//!   NCCL's RAS service reports; `local_evidence`: NCCL's warnings and the exhausted resources of the host, for an
//!   error.
//!
//! (`cause`, `fault` and `roster` are in `nccl_base`.)
//!
//! None of this is on the path of an operation: a decided fault begins an abort, which operations check for
//! anyway. The code on their path, which records what they were, is the [`recorder`](crate::recorder).

mod attach;
mod diagnosis;
mod fault_listener;
mod fault_registry;
mod init_supervision;
mod inside_nccl;
mod local_evidence;
#[cfg(test)]
mod malformed_input;
mod pending_diagnoses;
mod rank_report;
mod ras_evidence;
mod root_cause;
mod run_length_counts;
mod scope_recorder;
mod straggler_log;
mod supervisor;
mod world_peers;

pub(crate) use attach::{SessionExt, decode, recordings, register_with_control, timeline};
pub(crate) use world_peers::WorldPeers;

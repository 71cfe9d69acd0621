//! The driver of the machines of [`proto`](crate::proto). Each process of a job has one, which outlives the generations
//! of its world.
//!
//! ```text
//!  generations' sessions ─requests──▶ ┌────────────────────────────┐
//!  (rounds, ends, notices) ◀──inbox───┤ Node: machine + Services   ├─▶ PeerConnection, encrypted ─▶ another process
//!                                     │ one lock, no waiting in it │◀─ Acceptor ─ InboundConnection
//!  reactor: frames, alarms, pidfds ──▶└────────────────────────────┘─▶ Dialer (threads that connect)
//! ```
//!
//! All inputs go into the machine under one lock, and its outputs are carried out at once. `Node::run_deferred_work`
//! calls into the program and makes blocking system calls after the lock is released.
//!
//! - `driver`: the node; `admission`: which processes it admits;
//! - `acceptor`, `inbound_connections`, `inbound_connection`: listening, and peers that have not yet proved their
//!   identity;
//! - `outbox`: the requests that are sent again to each new coordinator; `kept_exchanges`: the exchanges among them;
//! - `services`: the coordinator's services; `answers`: the answers that it keeps for repeated requests;
//! - `process_watch`: the ends of processes under this kernel; `recording_requests`: requests for the recordings of this
//!   process;
//! - `simulated_store`: the requests and services of a process, for the simulator;
//! - `join`: how a process joins a world, and how it forms later generations.

mod acceptor;
mod admission;
mod answers;
mod driver;
mod inbound_connection;
mod inbound_connections;
mod join;
mod kept_exchanges;
mod outbox;
mod process_watch;
mod recording_requests;
mod services;
#[cfg(any(test, feature = "simulator"))]
pub mod simulated_store;

pub(crate) use driver::Node;
pub(crate) use join::{ActiveGeneration, NO_GENERATION, NextGenerationError};

//! How ranks find each other: their identity, their rendezvous, and the messages that they exchange before NCCL starts
//! and beside it.
//!
//! - `environment`, `launcher`: the identity of this process, as set by its program or by its launcher;
//! - `discovery`: where the coordinator is found, and which half of a partitioned job continues; `address`, `socket`:
//!   listening and dialling; `tcp`, `interface`, `port_owner`: the same between hosts;
//! - `frame`, `handshake`, `request`, `coordinator_message`, `round`: the wire protocol; `noise`: its authentication
//!   and encryption; `endpoint`: the address to which the handshake is bound; `refusal`: why connections are refused;
//! - `reactor`, `connection`: one thread per process that reads all connections; `ack_tracker`: whether the peer's host
//!   acknowledges sent data;
//! - `process`: processes that run under the same kernel, and their state; `heartbeat`: which processes are suspects;
//! - `proto`: membership, coordinator and failover, as state machines;
//! - `service`: the coordinator's services for the ranks beside their membership, as a state machine: rounds, the
//!   store, channels, straggler queries;
//! - `transport`: the connections of a driver of machines; `clock`: the time of machines; `driver_message`: the
//!   messages that drivers send to each other through the machines;
//! - `node`: the driver of a process's machines; `thread_world`: worlds whose ranks are threads of one process;
//! - `connect`: joining; `coordinator_search`: how a new process finds the current coordinator; `job`: the settings
//!   common to all ranks;
//! - `rank_process`: the host, the process and the address of a rank; `inbox`: messages received for a rank;
//! - `straggler`: the messages about ranks that have not entered an operation;
//! - `session`: the connection to the other ranks that a rank's world and its communicators share;
//! - `observer`, `world_view`: a process without a rank, and what it has seen; `events`: the events of a world, for
//!   readers in an observer or a rank; `witness`: a voter without a rank;
//! - `recordings`: the contents of the ranks' recorders, requested from each process;
//! - `panics`: how a panic's message reaches the other ranks;
//! - `channel`: ordered messages, from a rank's side;
//! - `generation`: reconfiguration, in which the remaining ranks form the next generation;
//! - `world`: one rank's view of all ranks; `exchange`: the messages that it exchanges with them; `store`: keys and
//!   values shared by all ranks;
//! - `application`: the interface to the program that this crate runs in.
//!
//! This crate does not depend on NCCL or CUDA; the `nccl` crate uses both.
#![cfg(not(loom))]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "an internal crate: its readers have the sources"
)]

#[cfg(not(target_os = "linux"))]
compile_error!("the nccl crate works on Linux only, as NCCL does");

use nccl_base::{
    atomic_file, departure, error, fault, forked, host, operation, sanitize, sync, time,
};

mod ack_tracker;
mod address;
mod application;
mod channel;
mod clock;
mod connect;
mod connection;
mod coordinator_message;
mod coordinator_search;
mod discovery;
mod driver_message;
mod endpoint;
mod environment;
mod events;
mod exchange;
mod frame;
mod generation;
mod handshake;
mod heartbeat;
mod inbox;
mod interface;
mod job;
mod launcher;
pub mod limits;
mod node;
mod noise;
mod observer;
mod panics;
mod pending_exchange;
mod phase;
mod port_owner;
mod process;
mod process_state;
#[doc(hidden)]
pub mod proto;
mod rank_process;
mod reactor;
mod recordings;
mod refusal;
mod request;
mod round;
mod secret;
mod service;
mod session;
mod slot;
mod socket;
mod store;
mod straggler;
mod tcp;
mod thread_world;
mod transport;
mod witness;
mod world;
mod world_view;

#[cfg(test)]
mod tests;

// Shared with the preflight checks and the log checks.
#[doc(hidden)]
pub use address::{find_wrong_address, split as split_addresses};
pub use application::{Application, ClockReading, FaultListener, RankRecorder, set_application};
pub use discovery::Discovery;
pub use inbox::Notice;
pub use interface::{Interface, Own, is_within, own as own_addresses};
#[doc(hidden)]
pub use launcher::is_launched;
pub use process_state::ProcessState;
pub use rank_process::{RankProcess, launcher_ranks};
pub use refusal::refused_connections;
pub use session::{RankSession, leave_all, sessions};
pub use straggler::{
    EntryReport, LateRank, QueriedOperation, StragglerQueryRequest, StragglerReport,
};

pub use channel::{Channel, ChannelMessage};
pub use environment::Rendezvous;
pub use events::{Events, WorldEvent};
pub use exchange::Subgroup;
#[cfg(any(test, feature = "simulator"))]
#[doc(hidden)]
pub use node::simulated_store;
pub use observer::Observer;
pub use panics::install_panic_hook;
pub use pending_exchange::PendingExchange;
pub use recordings::RecordingAnswers;
pub use secret::Secret;
pub use slot::Slot;
pub use store::CompareSet;
pub use witness::Witness;
pub use world::World;
pub use world_view::{RankEnd, RankState, WorldState};

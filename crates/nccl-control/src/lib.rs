//! How ranks find each other: their identity, their rendezvous, and their messages before and beside NCCL.
//!
//! - `environment`, `launcher`: the identity of this process, stated by its program or by its launcher;
//! - `discovery`: where the coordinator is found, and which half of a job goes on; `address`, `place`: listening and dialling;
//!   `tcp`, `interface`, `holder`: between hosts;
//! - `frame`, `greeting`, `request`, `incoming`, `message`: the wire protocol; `noise`: its authentication and encryption; `endpoint`:
//!   the address to which the handshake is bound; `admission`: which connections are accepted;
//! - `reactor`, `connection`: one thread per process that reads all connections; `acknowledged`: whether the peer's host
//!   acknowledges sent data;
//! - `process`: processes of this kernel and their state; `heartbeat`: which processes are silent;
//! - `proto`: membership, coordinator and failover, as state machines;
//! - `service`: what a coordinator does for the ranks beside their membership, as a state machine: rounds, the store, channels,
//!   inquiries;
//! - `transport`: the connections of a driver of machines; `clock`: the time of machines; `envelope`: what programs send each other
//!   through them;
//! - `node`: the driver of a process's machines; `threads`: worlds whose ranks are threads of one process;
//! - `client`: joining; `search`: how a new process finds the current coordinator; `job`: what all ranks have in common;
//! - `member`: the host, the process and the address of a rank; `mailbox`: messages received for a rank;
//! - `inquiry`: which ranks have not entered an operation: the messages about it;
//! - `line`: what a rank's world and its communicators share: the way to the other ranks;
//! - `observer`, `board`: a process without a rank, and what it has seen; `events`: the events of a world, for readers in an
//!   observer or a rank; `witness`: a voter without a rank;
//! - `recordings`: the contents of the ranks' recorders, requested from each process;
//! - `panics`: how a panic's message reaches the other ranks;
//! - `channel`: ordered messages, a rank's side;
//! - `generation`: how the remaining ranks go on;
//! - `world`: one rank's view of all ranks; `exchange`: what it can send them;
//! - `attached`: the interface to the program that this crate runs in.
//!
//! This crate knows neither NCCL nor CUDA; their part of a job is in `nccl`.
#![cfg(not(loom))]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "an internal crate: who reads its pages reads its sources"
)]

#[cfg(not(target_os = "linux"))]
compile_error!("the nccl crate works on Linux only, as NCCL does");

use nccl_base::{
    departure, error, fault, forked, host, operation, sync, time, visible, whole_file,
};

mod acknowledged;
mod address;
mod admission;
mod attached;
mod board;
mod channel;
mod client;
mod clock;
mod connection;
mod discovery;
mod endpoint;
mod envelope;
mod environment;
mod events;
mod exchange;
mod frame;
mod generation;
mod greeting;
mod heartbeat;
mod holder;
mod incoming;
mod inquiry;
mod interface;
mod job;
mod launcher;
pub mod limits;
mod line;
mod mailbox;
mod member;
mod message;
mod node;
mod noise;
mod observer;
mod panics;
mod phase;
mod place;
mod process;
mod process_state;
#[doc(hidden)]
pub mod proto;
mod reactor;
mod recordings;
mod request;
mod search;
mod secret;
mod service;
mod tcp;
mod threads;
mod transport;
mod witness;
mod world;

#[cfg(test)]
mod tests;

// Shared with the pre-start checks and the log checks.
pub use admission::strangers;
pub use attached::{Attached, ClockReading, Host, Watcher, set_host};
pub use discovery::Discovery;
pub use inquiry::{Attendance, Latecomer, Lateness, Subject, Suspicion};
pub use interface::{Interface, Own, is_within, own as own_addresses};
pub use line::{Line, lines, say_goodbye};
pub use mailbox::Notice;
pub use member::{Member, launched};
pub use process_state::ProcessState;

pub use board::{RankEnd, RankState, WorldState};
pub use channel::{Channel, ChannelMessage};
pub use environment::Rendezvous;
pub use events::{Events, WorldEvent};
pub use exchange::Subgroup;
pub use observer::Observer;
pub use panics::install_panic_hook;
pub use recordings::Asked;
pub use witness::Witness;
pub use world::World;

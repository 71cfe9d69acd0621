//! How ranks find each other: who they are, where they meet, and what they tell each other before and
//! beside NCCL.
//!
//! - `environment`, `launcher`: who this process is, said by its program or by its launcher;
//! - `discovery`: where the coordinator is found, and which half of a job goes on; `place`: listening, and getting there; `tcp`, `interface`, `holder`: between hosts;
//! - `frame`, `greeting`, `request`, `incoming`, `message`: what goes over the wire; `noise`: its proof and seal; `endpoint`:
//!   to which address that is bound;
//! - `reactor`, `connection`: one thread per process that reads all connections; `acknowledged`: whether the other end
//!   hears this one;
//! - `process`: the process at the other end, watched where that can be done;
//! - `server`, `door`, `admission`, `peer`: the coordinator's side: who has the door, the door, who may come in, who has;
//! - `client`, `reader`: a rank's side: getting in, and what is sent then;
//! - `hub`, `state`, `watching`: the coordinator, and how it reaches the ranks; `heartbeat`: whose process is silent;
//! - `service`: what a coordinator does for the ranks beside their membership, as a machine: rounds, the store, channels,
//!   inquiries;
//! - `mailbox`: what has come for a rank;
//! - `inquiry`: which ranks have not entered an operation: what is said about it;
//! - `line`: what a rank's world and its communicators share: the way to the others;
//! - `observer`, `board`, `scout`: one who is not a rank, what it has seen, and what its thread does; `events`: what
//!   has happened, for those who read it, of an observer or a rank;
//! - `witness`: one who votes and has no rank;
//! - `recordings`: what the ranks' recorders have, asked for at their doors;
//! - `search`: how somebody who is new finds who coordinates by now;
//! - `substitute`: what answers in the place of a rank 0 that will not come; `panics`: how a panic's message gets to
//!   the others;
//! - `succession`, `heir`, `handover`: who coordinates when the coordinator is gone: the rules, what a rank
//!   does by them, and what its hub does;
//! - `channel`: ordered messages, a rank's side;
//! - `going`, `epoch`: how the ranks that are left go on, the coordinator's side and a rank's;
//! - `world`: one rank's view of all of them; `exchange`: what it can tell them; `explain`: how it reads;
//! - `threads`: worlds whose ranks are threads of one process;
//! - `attached`: what it asks of the program that it runs in.
//!
//! It knows neither NCCL nor CUDA: what these have to do with a job is `nccl`'s.
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
mod admission;
mod attached;
mod board;
mod channel;
mod client;
mod connection;
mod discovery;
mod door;
mod endpoint;
mod environment;
mod epoch;
mod events;
mod exchange;
mod explain;
mod frame;
mod going;
mod greeting;
mod handover;
mod heartbeat;
mod heir;
mod holder;
mod hub;
mod incoming;
mod inquiry;
mod interface;
mod launcher;
pub mod limits;
mod line;
mod mailbox;
mod message;
mod node;
mod noise;
mod observer;
mod panics;
mod peer;
mod phase;
mod place;
mod process;
mod process_state;
#[doc(hidden)]
pub mod proto;
mod reactor;
mod reader;
mod recordings;
mod request;
mod scout;
mod search;
mod secret;
mod server;
mod service;
mod state;
mod substitute;
mod succession;
mod tcp;
mod threads;
mod watching;
mod witness;
mod world;

#[cfg(test)]
mod tests;

// What the checks before a start, and those of logs, share with it.
pub use attached::{Attached, ClockReading, Host, Watcher, set_host};
pub use discovery::{Discovery, FileDiscovery};
pub use door::strangers;
pub use inquiry::{Attendance, Latecomer, Lateness, Subject, Suspicion};
pub use interface::{Interface, Own, is_within, own as own_addresses};
pub use line::{Line, Member, launched, say_goodbye};
pub use mailbox::Notice;
pub use process_state::ProcessState;

pub use board::{RankEnd, RankState, WorldState};
pub use channel::{Channel, ChannelMessage};
pub use environment::Rendezvous;
pub use events::{Events, WorldEvent};
pub use exchange::Subgroup;
pub use observer::Observer;
pub use panics::install_panic_hook;
pub use panics::lines;
pub use recordings::Asked;
pub use witness::Witness;
pub use world::World;

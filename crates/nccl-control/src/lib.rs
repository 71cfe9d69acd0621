//! How ranks find each other: who they are, where they meet, and what they tell each other before and
//! beside NCCL.
//!
//! - `environment`, `launcher`: who this process is, said by its program or by its launcher;
//! - `discovery`: where the coordinator is found, and which half of a job goes on; `address`, `place`: listening, and getting there; `tcp`, `interface`, `holder`: between hosts;
//! - `frame`, `greeting`, `request`, `incoming`, `message`: what goes over the wire; `noise`: its proof and seal; `endpoint`:
//!   to which address that is bound; `admission`: who may come in;
//! - `reactor`, `connection`: one thread per process that reads all connections; `acknowledged`: whether the other end
//!   hears this one;
//! - `process`: processes of this kernel, and how they stand; `heartbeat`: whose process is silent;
//! - `proto`: who is a member, who coordinates and who goes on, as machines;
//! - `service`: what a coordinator does for the ranks beside their membership, as a machine: rounds, the store, channels,
//!   inquiries;
//! - `transport`: the connections of a driver of machines; `clock`: the time of machines; `envelope`: what programs tell each other
//!   through them;
//! - `node`: the driver of a process's machines; `threads`: worlds whose ranks are threads of one process;
//! - `client`: getting in; `search`: how somebody who is new finds who coordinates by now; `job`: what all ranks have in common;
//! - `member`: the host, the process and the address of a rank; `mailbox`: what has come for a rank;
//! - `inquiry`: which ranks have not entered an operation: what is said about it;
//! - `line`: what a rank's world and its communicators share: the way to the others;
//! - `observer`, `board`: one who is not a rank, and what it has seen; `events`: what has happened, for those who read it, of an
//!   observer or a rank; `witness`: one who votes and has no rank;
//! - `recordings`: what the ranks' recorders have, asked for at each process;
//! - `panics`: how a panic's message gets to the others;
//! - `channel`: ordered messages, a rank's side;
//! - `epoch`: how the ranks that are left go on;
//! - `world`: one rank's view of all of them; `exchange`: what it can tell them;
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
mod epoch;
mod events;
mod exchange;
mod frame;
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

// What the checks before a start, and those of logs, share with it.
pub use admission::strangers;
pub use attached::{Attached, ClockReading, Host, Watcher, set_host};
pub use discovery::{Discovery, FileDiscovery};
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

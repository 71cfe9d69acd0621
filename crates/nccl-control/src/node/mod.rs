//! The driver of the machines of [`proto`](crate::proto): one for each process of a job, which outlives the generations of its world.
//!
//! ```text
//!  lines of generations ──requests──▶ ┌────────────────────────────┐
//!  (rounds, ends, notices) ◀─mailbox──┤ Node: Member + Services    ├─▶ Port ─ sealed connection ─▶ another process
//!                                     │ one lock, no waiting in it │◀─ Acceptor ─ Guest
//!  reactor: frames, alarms, pidfds ──▶└────────────────────────────┘─▶ Dialer (threads that connect)
//! ```
//!
//! All inputs go into the machine under one lock; its outputs are carried out at once. Calls into a
//! program and waits for the system are done by `Node::settle` when the lock is free.
//!
//! - `driver`: the node; `admission`: which processes it lets in;
//! - `acceptor`, `guests`, `guest`: listening, and peers that have not proved their identity yet;
//! - `kept`: the requests that each new coordinator has to be told again;
//! - `desk`: the coordinator's services; `vigil`: the ends of processes of this kernel; `recording`: the recordings of this process;
//! - `join`: how a process joins a world, and goes on with it.

mod acceptor;
mod admission;
mod desk;
mod driver;
mod guest;
mod guests;
mod join;
mod kept;
mod recording;
mod vigil;

pub(crate) use driver::Node;
pub(crate) use join::{Entered, Vain};

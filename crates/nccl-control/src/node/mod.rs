//! The driver of the machines of [`proto`](crate::proto): one for each process of a job, which outlives the generations of its world.
//!
//! ```text
//!  lines of generations ──requests──▶ ┌────────────────────────────┐
//!  (rounds, ends, notices) ◀─mailbox──┤ Node: Member + Services    ├─▶ Port ─ sealed connection ─▶ another process
//!                                     │ one lock, no waiting in it │◀─ Acceptor ─ Guest
//!  reactor: frames, alarms, pidfds ──▶└────────────────────────────┘─▶ Dialer (threads that connect)
//! ```
//!
//! All that happens goes into the machine under one lock; what comes out of it is carried out at once, and what might call a
//! program or wait for the system is done by `Node::settle` when the lock is free.
//!
//! - `driver`: the node; `admission`: whom it lets in;
//! - `acceptor`, `guests`, `guest`: listening, and those that have not proved yet who they are;
//! - `kept`: what each new coordinator has to hear again;
//! - `desk`: what the coordinator serves; `vigil`: the ends of processes of this kernel; `recording`: what this one has recorded;
//! - `join`: how a process comes into a world, and goes on with it.

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

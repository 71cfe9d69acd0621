//! NCCL's debug logs of several ranks: what each rank uses, and what is wrong between them.
//!
//! With `NCCL_DEBUG=INFO` every rank writes some hundred lines about the network it chose, the path to each other rank,
//! and what it waits for, to its output or to a file of its own. The fault rarely shows in the log of one rank, but in
//! a comparison of all logs: the rank that fell back to sockets, the host with another interface, the earliest warning.
//! [`DebugLog`] reads such logs of every release since 2.18, also when they are mixed with a program's own output, and
//! [`DebugLog::report`] compares them.
//!
//! - `line`: NCCL's text and its origin in a line; `message`, made of `tokens`: the meaning of a text;
//! - `collect`: from lines to `facts`, about each process and its communicators; `state`: the communicator of a line;
//! - `first_warning`: the first warning of this process in a generation, for a fault's evidence;
//! - `findings`: from the facts of all ranks to a [`Report`](nccl_base::report::Report).

mod collect;
mod facts;
mod findings;
mod first_warning;
mod line;
mod message;
mod state;
mod tokens;

#[cfg(test)]
mod tests;

#[doc(hidden)]
pub use first_warning::{LogPosition, first_warning, log_end};

pub use collect::{Counts, DebugLog};
pub use facts::{
    Ended, Endpoint, InitState, Link, Membership, PluginFact, PluginState, Process, Retry,
    Transport, Warning,
};
pub use nccl_base::warning::Class;

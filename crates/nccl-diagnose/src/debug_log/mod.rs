//! NCCL's debug logs of several ranks: what each rank uses, and what is wrong among them.
//!
//! With `NCCL_DEBUG=INFO` every rank writes some hundred lines about the network it chose, the way to each
//! other rank, and what it waits for, into its output or into a file of its own. One rank's log rarely
//! shows what is wrong; comparing those of all ranks does: the one that fell back to sockets, the host with
//! another interface, the first warning of all. [`DebugLog`] reads such logs of every release since 2.18,
//! also in the middle of a program's own output, and [`DebugLog::report`] compares them.
//!
//! - `line`: NCCL's text and its origin in a line; `message`, made of `tokens`: the meaning of a text;
//! - `collect`: from lines to `facts`, about each process and its communicators; `state`: the communicator of a line;
//! - `first_warning`: the first warning of this process, for a fault's evidence;
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
pub use first_warning::{first_warning, first_warning_soon};

pub use collect::{Counts, DebugLog};
pub use facts::{
    Ended, Endpoint, InitState, Link, Membership, PluginFact, PluginState, Process, Retry,
    Transport, Warning,
};
pub use nccl_base::warning::Class;

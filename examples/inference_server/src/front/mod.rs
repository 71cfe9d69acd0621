//! The front: the process that serves the clients, starts the ranks, and survives them.
//!
//! ```text
//! clients ──HTTP──▶ http (tokio) ──requests──▶ engine (one thread) ──steps──▶ ranks (processes)
//!                      ▲                         │   ▲   ▲  └──starts them again (nccl::launch::Fleet)
//!                      └──────── tokens ─────────┘   │   └───── how they end ◀──┘
//!                                                    └──────── tokens, faults
//! ```
//!
//! The front loads neither CUDA nor NCCL. It observes the ranks' control plane ([`nccl::Observer`]), so it can report
//! their state when they cannot.
//!
//! - `serve`: the front from start to end; `options`: the command line; `http`: the HTTP interface;
//! - `engine`: events and their handling; `scheduler`: the tokens of the next step; `caller`, `text`: the messages to a
//!   client;
//! - `crew`, `links`: the ranks' processes and connections; `vote`: the front's vote among them; `view`: the observable state.

/// Writes a line to stderr. A closed stderr does not stop the server.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "inference-server: {}", format_args!($($text)*));
    }};
}

mod caller;
mod crew;
mod engine;
mod http;
mod links;
mod moves;
mod options;
mod scheduler;
mod serve;
mod text;
mod view;
mod vote;

pub use self::options::{HELP, Options, Recovery, Role};
pub use self::serve::serve;

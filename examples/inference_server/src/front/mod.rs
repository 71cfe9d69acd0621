//! The front: the process that clients talk to, that starts the ranks, and that survives them.
//!
//! ```text
//! clients ──HTTP──▶ http (tokio) ──requests──▶ engine (one thread) ──steps──▶ ranks (processes)
//!                      ▲                         │   ▲   ▲  └──starts them again (nccl::launch::Fleet)
//!                      └──────── tokens ─────────┘   │   └───── how they end ◀──┘
//!                                                    └──────── tokens, faults
//! ```
//!
//! It loads neither CUDA nor NCCL, and is a member of the ranks' control plane ([`nccl::Observer`]), so it can say how it
//! stands with them when they cannot.
//!
//! - `serve`: all of it, from the beginning to the end; `options`: what it is told; `http`: what it answers;
//! - `engine`: what happens and what follows; `scheduler`: which tokens the next step takes; `caller`, `text`: what a
//!   client is told;
//! - `crew`, `links`: the ranks' processes and connections; `view`: what can be seen of all this.

/// Says something to whoever started the server. Who does not listen any more is no reason to stop serving.
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
mod options;
mod scheduler;
mod serve;
mod text;
mod view;

pub use self::options::{HELP, Options, Recovery, Role};
pub use self::serve::serve;

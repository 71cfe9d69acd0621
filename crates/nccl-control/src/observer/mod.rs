//! A member of the world that is not a rank: it sees what becomes of the ranks, and survives them.
//!
//! One thread per observer finds the world and looks after what has to be told; what comes is read by the reactor.
//!
//! - `handle`: what a program has of it; `state`: what the program and that thread share;
//! - `driver`: the thread, and what connects the observer's machine to sockets and clocks.

mod driver;
mod handle;
mod state;

pub use handle::Observer;

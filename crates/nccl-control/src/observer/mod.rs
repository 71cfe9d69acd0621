//! A process that takes part in the world without a rank: it watches the ranks, and outlives them.
//!
//! One thread per observer finds the world and delivers reports; the reactor reads its connections.
//!
//! - `handle`: the program's handle; `state`: the state shared by the program and that thread;
//! - `driver`: the thread, and the connection of the observer's machine to sockets and clocks.

mod driver;
mod handle;
mod state;

pub use handle::Observer;

//! One-sided operations: a rank writes into a window of another rank and signals it, and that rank waits for the signals.
//!
//! - `communicator`: the methods of a communicator for windows, and for kernels that use them;
//! - `window`: the memory into which the other ranks write;
//! - `target`: the destinations of puts and signals, and the signals of a wait;
//! - `operations`: put, signal and wait, single and in groups.
//!
//! What makes them sound:
//! - A put stays inside the other rank's window: all ranks compared the lengths when they made it, and puts accept only windows
//!   that were made this way.
//! - A window is not deregistered while an operation of this rank uses it, because its stream waits for each such operation. A
//!   put of another rank may still arrive later. It goes to memory of which the other rank holds its own mapping, so the driver
//!   does not reuse that memory for another allocation (windows are virtual-memory allocations, which live as long as their
//!   last mapping).
//! - Windows contain plain numbers: a put that arrives while a window is read yields wrong numbers, and nothing worse.

mod communicator;
mod operations;
mod target;
mod window;

pub use target::{Signals, Target};
pub use window::Window;

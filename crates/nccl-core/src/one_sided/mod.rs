//! One-sided operations: a rank writes into a window of another rank and signals it, and that rank waits for the signals.
//!
//! - `window`: the memory into which the other ranks write;
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

mod operations;
mod window;

pub use operations::{Signals, Target};
pub use window::Window;

use std::ffi::c_int;

use nccl_sys as sys;

/// The further arguments of a one-sided operation.
#[derive(Debug)]
pub(crate) enum OneSidedArgs {
    Put {
        window: RawWindow,
        /// In bytes from the start of the window.
        offset: usize,
        signal: c_int,
        context: c_int,
    },
    Signal {
        signal: c_int,
        context: c_int,
    },
    Wait(Vec<sys::ncclWaitSignalDesc_t>),
}

/// NCCL's handle of a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawWindow(pub(crate) sys::ncclWindow_t);

// SAFETY: a number for NCCL, never dereferenced here.
unsafe impl Send for RawWindow {}
// SAFETY: likewise.
unsafe impl Sync for RawWindow {}

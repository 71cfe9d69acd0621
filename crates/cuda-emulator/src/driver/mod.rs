//! The CUDA driver functions that cudarc uses, and those that other clients of NCCL need.
//!
//! One file for each kind of object. Every function is an `extern "C" fn` whose body runs inside
//! [`call::enter`], so that a panic becomes an error code; each file lists its exported functions in
//! `symbols()`. [`refused`] lists unsupported functions by name.

pub(crate) mod call;
mod capture;
pub mod context;
mod copy;
mod ctx;
pub mod device;
mod event;
mod graph;
mod handles;
mod host;
mod ipc;
mod launch;
mod memory;
mod memory_pool;
mod module;
mod pointer;
mod procedures;
mod refused;
mod rows;
mod shape;
mod start;
mod stream;
mod stream_memory;
mod table;
mod virtual_memory;

pub use result::CUresult;
pub use table::has_faults_at;

use stand_in_object::Symbol;

/// `CUresult` as an open code: the values that every CUDA since 11.4 has.
pub mod result {
    pub use crate::result::{CUresult, NAMES};
}

/// The devices visible to this process: `CUDA_VISIBLE_DEVICES`, read once, as CUDA reads it.
///
/// Everywhere else a device is its index in that list; only the properties that distinguish the devices of
/// a host (UUID, bus, NVML's number) use the number in the list.
pub mod visible {
    pub use crate::visible::{count, physical};
}

/// Returns the device of the calling thread's current context.
///
/// # Errors
/// `CUDA_ERROR_INVALID_CONTEXT` when the thread has none.
pub fn current_device() -> Result<i32, CUresult> {
    Ok(context::current_in_any_state()?.device())
}

/// Returns the name and address of every driver function of the emulator.
pub fn symbols() -> Vec<Symbol> {
    let mut all = table::symbols();
    all.extend(procedures::symbols());
    all
}

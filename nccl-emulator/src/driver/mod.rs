//! The CUDA driver functions that cudarc uses.

pub(crate) mod context;
pub(crate) mod result;

use std::ffi::{CStr, c_void};

pub(crate) use result::CUresult;

/// The device of the calling thread's current context.
///
/// # Errors
/// `CUDA_ERROR_INVALID_CONTEXT` when the thread has none.
pub(crate) fn current_device() -> Result<i32, CUresult> {
    todo!()
}

/// Name and address of every driver function the emulator has.
pub(crate) fn symbols() -> Vec<(&'static CStr, *const c_void)> {
    Vec::new()
}

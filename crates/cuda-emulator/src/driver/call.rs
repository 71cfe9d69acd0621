//! The frame of every driver function: the check that the driver was started, catching panics, storing
//! results.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::exec;
use crate::forks;
use crate::hooks;
use crate::result::CUresult;

/// The version of CUDA that the driver reports.
pub(crate) const VERSION: i32 = 13_000;

/// The state of the driver; `READY` once `cuInit` was called in this process.
pub(super) static STATE: AtomicU32 = AtomicU32::new(NEW);
const NEW: u32 = 0;
pub(super) const READY: u32 = 1;

/// Runs the body of a driver function. First checks that the driver was started and that the caller is
/// no host function, and applies the function's faults.
pub(super) fn enter(
    function: &'static str,
    body: impl FnOnce() -> Result<(), CUresult>,
) -> CUresult {
    if STATE.load(Ordering::Acquire) != READY || forks::is_child() {
        return CUresult::ERROR_NOT_INITIALIZED;
    }
    if exec::in_host_function() {
        return CUresult::ERROR_NOT_PERMITTED;
    }
    caught(|| {
        hooks::call(function)?;
        body()
    })
}

/// Runs the body of a driver function that needs no started driver.
pub(crate) fn caught(body: impl FnOnce() -> Result<(), CUresult>) -> CUresult {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => CUresult::SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => {
            eprintln!(
                "nccl-emulator: internal error: a driver function panicked (above); it returns CUDA_ERROR_UNKNOWN"
            );
            CUresult::ERROR_UNKNOWN
        }
    }
}

/// Stores a result at the caller's `place`.
///
/// # Safety
/// `place` is null or may be written.
pub(super) unsafe fn store<T>(place: *mut T, value: T) -> Result<(), CUresult> {
    if place.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, and the caller promises the rest.
    unsafe { place.write(value) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_code() {
        assert_eq!(caught(|| panic!("on purpose")), CUresult::ERROR_UNKNOWN);
    }
}

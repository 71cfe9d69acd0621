//! The frame of every function: catches panics, applies faults, and refuses null pointers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclResult_t};

use crate::code::{self, INTERNAL, INVALID_ARGUMENT, Result, UNHANDLED_CUDA};
use crate::faults;
use crate::nccl::communicator::{self, Communicator};
use crate::nccl::debug::warn;
use cuda_emulator::forks;

/// Runs the body of a function called from C. Like NCCL, refuses what needs CUDA in a child that was forked from a process
/// that used it.
pub(super) fn guarded(function: &'static str, body: impl FnOnce() -> Result) -> ncclResult_t {
    let body = || match forks::is_child() && needs_cuda(function) {
        true => {
            warn!("Cuda failure 3 'initialization error'");
            Err(UNHANDLED_CUDA)
        }
        false => body(),
    };
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => code::to_c(result),
        Err(_) => {
            eprintln!("nccl-emulator: {function} panicked: this is a bug of the emulator");
            code::to_c(Err(INTERNAL))
        }
    }
}

fn needs_cuda(function: &str) -> bool {
    let others = ["ncclGetVersion", "ncclGetUniqueId", "ncclResetDebugInit"];
    !others.contains(&function) && !function.starts_with("ncclParam")
}

/// Applies the faults of this function and then does what [`guarded`] does; `communicator` is the argument of the call.
pub(super) fn call(
    function: &'static str,
    communicator: ncclComm_t,
    body: impl FnOnce() -> Result,
) -> ncclResult_t {
    guarded(function, || {
        strike(function, communicator)?;
        body()
    })
}

/// Applies the faults of a function.
pub(super) fn strike(function: &'static str, communicator: ncclComm_t) -> Result {
    if !faults::any() {
        return Ok(());
    }
    match communicator::peek(communicator) {
        Some(communicator) => strike_at(function, &[communicator]),
        None => faults::check_call(function, &[], &|| false),
    }
}

/// Does what [`strike`] does, for a call on these communicators. While a fault holds the thread, it counts as inside the call.
pub(super) fn strike_at(function: &'static str, communicators: &[Arc<Communicator>]) -> Result {
    let _inside: Vec<_> = communicators
        .iter()
        .map(|communicator| communicator.enter())
        .collect();
    let subjects: Vec<_> = communicators
        .iter()
        .map(|communicator| communicator.subject())
        .collect();
    faults::check_call(function, &subjects, &|| {
        let mut flags = communicators.iter().map(|communicator| &communicator.abort);
        flags.any(|flag| flag.is_raised())
    })
}

/// `PtrCheck`.
pub(super) fn not_null<T>(pointer: *const T, function: &str, argument: &str) -> Result {
    if pointer.is_null() {
        warn!("{function} : {argument} argument is NULL");
        return Err(INVALID_ARGUMENT);
    }
    Ok(())
}

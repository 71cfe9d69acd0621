//! Around the body of every function: panics kept in, faults applied, null pointers refused.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclResult_t};

use crate::code::{self, INTERNAL, INVALID_ARGUMENT, Result};
use crate::faults;
use crate::nccl::communicator::{self, Communicator};
use crate::nccl::debug::warn;

/// Runs the body of a function that C called.
pub(super) fn guarded(function: &'static str, body: impl FnOnce() -> Result) -> ncclResult_t {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => code::to_c(result),
        Err(_) => {
            eprintln!("nccl-emulator: {function} panicked: this is a bug of the emulator");
            code::to_c(Err(INTERNAL))
        }
    }
}

/// [`guarded`], after the faults at this function; `communicator` is the one that the call is
/// about.
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

/// Lets the faults at a function strike.
pub(super) fn strike(function: &'static str, communicator: ncclComm_t) -> Result {
    if !faults::any() {
        return Ok(());
    }
    match communicator::peek(communicator) {
        Some(communicator) => strike_at(function, &[communicator]),
        None => faults::check_call(function, &[], &|| false),
    }
}

/// As [`strike`], for a call that is about these communicators. While a fault holds it, the thread is
/// inside the call.
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

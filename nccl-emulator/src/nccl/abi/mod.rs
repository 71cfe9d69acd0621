//! The functions that C sees: all of `nccl.h`.
//!
//! Every body runs inside [`guarded`]: a panic becomes `ncclInternalError` and a line on stderr,
//! and never unwinds into C. Faults strike here, before anything else is done.

// The names are C's.
#![allow(non_snake_case)]

mod children;
mod collectives;
mod information;
mod init;
mod lifecycle;
mod memory;
mod one_sided;
mod operations;
mod operators;
mod parameters;

use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

#[cfg(test)]
use nccl_sys::Api;
use nccl_sys::{ncclComm_t, ncclResult_t};

use super::communicator::{self, Communicator};
use super::debug::warn;
use crate::code::{self, INTERNAL, INVALID_ARGUMENT, Result};
use crate::faults;
use children::*;
use collectives::*;
use information::*;
use init::*;
use lifecycle::*;
use memory::*;
use one_sided::*;
use operations::*;
use operators::*;
use parameters::*;

/// Runs the body of a function that C called.
fn guarded(function: &'static str, body: impl FnOnce() -> Result) -> ncclResult_t {
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
fn call(
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
fn strike(function: &'static str, communicator: ncclComm_t) -> Result {
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
fn strike_at(function: &'static str, communicators: &[Arc<Communicator>]) -> Result {
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
fn not_null<T>(pointer: *const T, function: &str, argument: &str) -> Result {
    if pointer.is_null() {
        warn!("{function} : {argument} argument is NULL");
        return Err(INVALID_ARGUMENT);
    }
    Ok(())
}

const fn c_name(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("the name of a function is an identifier"),
    }
}

macro_rules! exports {
    ($($name:ident)*) => {
        /// The functions as a table; makes the compiler compare every signature with the bindings.
        #[cfg(test)]
        pub(crate) fn api() -> Api {
            let mut api = Api::empty();
            $(api.$name = Some($name);)*
            api
        }

        /// Name and address of every function: under its own name, and under the one with a `p` in front,
        /// by which a profiler that took the first one calls it.
        pub(crate) fn symbols() -> Vec<(&'static CStr, *const c_void)> {
            vec![$(
                (c_name(concat!(stringify!($name), "\0")), $name as *const c_void),
                (c_name(concat!("p", stringify!($name), "\0")), $name as *const c_void),
            )*]
        }
    };
}

exports! {
    ncclMemAlloc ncclMemFree ncclGetVersion ncclGetUniqueId ncclCommInitRankConfig ncclCommInitRank ncclCommInitAll
    ncclCommFinalize ncclCommDestroy ncclCommAbort ncclCommRevoke ncclCommSplit ncclCommShrink ncclCommGetUniqueId
    ncclCommGrow ncclCommInitRankScalable ncclGetErrorString ncclGetLastError ncclResetDebugInit ncclCommGetAsyncError
    ncclCommCount ncclCommCuDevice ncclCommUserRank ncclCommRegister ncclCommDeregister ncclCommSuspend ncclCommResume
    ncclCommMemStats ncclCommWindowRegister ncclCommWindowDeregister ncclWinGetUserPtr ncclRedOpCreatePreMulSum
    ncclRedOpDestroy ncclReduce ncclBcast ncclBroadcast ncclAllReduce ncclReduceScatter ncclAllGather ncclAlltoAll
    ncclGather ncclScatter ncclAllReduceConfig ncclBroadcastConfig ncclReduceConfig ncclAllGatherConfig
    ncclReduceScatterConfig ncclAlltoAllConfig ncclGatherConfig ncclScatterConfig ncclSend ncclRecv ncclPutSignal
    ncclSignal ncclWaitSignal ncclGroupStart ncclGroupEnd ncclGroupSimulateEnd ncclSetEncryption ncclParamBind
    ncclParamGetI8 ncclParamGetI16 ncclParamGetI32 ncclParamGetI64 ncclParamGetU8 ncclParamGetU16 ncclParamGetU32
    ncclParamGetU64 ncclParamGetStr ncclParamGet ncclParamGetParameter ncclParamGetAllParameterKeys ncclParamDumpAll
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_of_the_header_is_exported() {
        assert_eq!(api().missing().collect::<Vec<_>>(), Vec::<&str>::new());
        let (mut names, mut twins) = (Vec::new(), Vec::new());
        for (name, address) in symbols() {
            let name = name.to_str().unwrap();
            match name.strip_prefix('p') {
                Some(name) => twins.push((name, address)),
                None => names.push((name, address)),
            }
        }
        assert_eq!(names, twins);
        let names: Vec<_> = names.into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, Api::NAMES);
    }
}

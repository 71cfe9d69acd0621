//! The functions that C calls: all of `nccl.h`, and the host's side of the device API.
//!
//! Every body runs inside [`guard::guarded`]: a panic becomes `ncclInternalError` and a line on stderr,
//! and never unwinds into C. Faults strike here first.

// The names are C's.
#![allow(non_snake_case)]

mod children;
mod collectives;
mod device;
mod guard;
mod information;
mod init;
mod lifecycle;
mod memory;
mod one_sided;
mod operations;
mod operators;
mod parameters;

use std::ffi::{CStr, c_void};

#[cfg(test)]
use nccl_sys::Api;

use children::*;
use collectives::*;
use device::*;
use information::*;
use init::*;
use lifecycle::*;
use memory::*;
use one_sided::*;
use operations::*;
use operators::*;
use parameters::*;

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

        /// Returns name and address of every function: under its own name, and with the prefix `p`, which a profiler calls that
        /// intercepts the first name.
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
    ncclCommQueryProperties ncclDevCommCreate ncclDevCommDestroy ncclGetLsaMultimemDevicePointer
    ncclGetMultimemDevicePointer ncclGetLsaDevicePointer ncclGetPeerDevicePointer ncclGetMultimemDeviceLeInfo
    ncclGetCftDeviceLeInfo ncclGetPeerDeviceLeInfo ncclTeamWorld ncclTeamLsa ncclTeamCft ncclTeamCftMultimem
    ncclTeamRankToWorld ncclTeamRankToLsa ncclTeamRail ncclLsaBarrierCreateRequirement ncclGinBarrierCreateRequirement
    ncclLLA2ACalcSlots ncclLLA2ACreateRequirement
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

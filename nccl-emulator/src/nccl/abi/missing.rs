//! What the emulator does not have yet. Each function checks its communicator, says that it is
//! missing, and fails; the README lists them.

use std::ffi::{c_int, c_uint, c_void};

use nccl_sys::{
    cudaStream_t, ncclComm_t, ncclDataType_t, ncclResult_t, ncclWaitSignalDesc_t, ncclWindow_t,
};

use super::call;
use crate::nccl::code::{INVALID_USAGE, Result};
use crate::nccl::communicator;
use crate::nccl::debug::warn;

fn missing(symbol: &'static str, comm: ncclComm_t, name: &str) -> Result {
    communicator::lookup(comm, name)?;
    warn!("{symbol}: nccl-emulator does not have this function yet");
    Err(INVALID_USAGE)
}

macro_rules! missing {
    ($($name:ident($($argument:ident: $type:ty),*) about $comm:ident as $text:literal;)*) => {$(
        pub(super) unsafe extern "C" fn $name($($argument: $type),*) -> ncclResult_t {
            $(let _ = $argument;)*
            call(stringify!($name), $comm, || missing(stringify!($name), $comm, $text))
        }
    )*};
}

missing! {
    ncclPutSignal(
        localbuff: *const c_void, count: usize, datatype: ncclDataType_t, peer: c_int, peerWin: ncclWindow_t,
        peerWinOffset: usize, sigIdx: c_int, ctx: c_int, flags: c_uint, comm: ncclComm_t, stream: cudaStream_t
    ) about comm as "PutSignal";
    ncclSignal(
        peer: c_int, sigIdx: c_int, ctx: c_int, flags: c_uint, comm: ncclComm_t, stream: cudaStream_t
    ) about comm as "Signal";
    ncclWaitSignal(nDesc: c_int, signalDescs: *mut ncclWaitSignalDesc_t, comm: ncclComm_t, stream: cudaStream_t)
        about comm as "WaitSignal";
}

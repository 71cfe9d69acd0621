//! What the emulator does not have yet. Each function checks its communicator, says that it is
//! missing, and fails; the README lists them.

use std::ffi::{c_int, c_uint, c_void};

use nccl_sys::{
    cudaStream_t, ncclCollConfig_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t,
    ncclScalarResidence_t, ncclWaitSignalDesc_t, ncclWindow_t,
};

use super::call;
use super::operations::unknown_collective;
use crate::nccl::code::{INVALID_ARGUMENT, INVALID_USAGE, Result};
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
    ncclRedOpCreatePreMulSum(
        op: *mut ncclRedOp_t, scalar: *mut c_void, datatype: ncclDataType_t, residence: ncclScalarResidence_t,
        comm: ncclComm_t
    ) about comm as "ncclRedOpCreatePreMulSum";
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

/// There are no operators but the built-in ones, so there is never one to destroy.
pub(super) unsafe extern "C" fn ncclRedOpDestroy(
    op: ncclRedOp_t,
    comm: ncclComm_t,
) -> ncclResult_t {
    call("ncclRedOpDestroy", comm, || {
        if op.0 < ncclRedOp_t::ncclNumOps.0 {
            warn!("ncclRedOpDestroy : operator is a NCCL builtin.");
        } else if op.0 > i32::MAX as u32 {
            warn!("ncclRedOpDestroy :  operator is garbage.");
        } else if comm.is_null() {
            warn!("ncclRedOpDestroy : invalid communicator passed.");
        } else {
            warn!("ncclRedOpDestroy : operator unknown to this communicator.");
        }
        Err(INVALID_ARGUMENT)
    })
}

macro_rules! missing_collectives {
    ($($name:ident / $with_config:ident as $text:literal ($($argument:ident: $type:ty),*);)*) => {$(
        pub(super) unsafe extern "C" fn $name(
            $($argument: $type,)* comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t {
            $(let _ = $argument;)*
            let _ = stream;
            // SAFETY: no config.
            unsafe { unknown_collective(stringify!($name), $text, comm, std::ptr::null()) }
        }

        pub(super) unsafe extern "C" fn $with_config(
            $($argument: $type,)* comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t
        ) -> ncclResult_t {
            $(let _ = $argument;)*
            let _ = stream;
            // SAFETY: the function's contract.
            unsafe { unknown_collective(stringify!($with_config), $text, comm, config) }
        }
    )*};
}

missing_collectives! {
    ncclBroadcast / ncclBroadcastConfig as "Broadcast"
        (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int);
    ncclReduce / ncclReduceConfig as "Reduce"
        (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, op: ncclRedOp_t,
         root: c_int);
    ncclAllGather / ncclAllGatherConfig as "AllGather"
        (sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t);
    ncclReduceScatter / ncclReduceScatterConfig as "ReduceScatter"
        (sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t, op: ncclRedOp_t);
    ncclGather / ncclGatherConfig as "Gather"
        (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int);
    ncclScatter / ncclScatterConfig as "Scatter"
        (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int);
}

pub(super) unsafe extern "C" fn ncclBcast(
    buff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: the same contract.
    unsafe { ncclBroadcast(buff, buff, count, datatype, root, comm, stream) }
}

//! One-sided operations.

use std::ffi::{c_int, c_uint, c_void};

use nccl_sys::{
    cudaStream_t, ncclComm_t, ncclDataType_t, ncclResult_t, ncclWaitSignalDesc_t, ncclWindow_t,
};

use super::guard::guarded;
use crate::nccl::group::{OneSided, enqueue_one_sided};

pub(super) unsafe extern "C" fn ncclPutSignal(
    localbuff: *const c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    peerWin: ncclWindow_t,
    peerWinOffset: usize,
    sigIdx: c_int,
    ctx: c_int,
    flags: c_uint,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    guarded("ncclPutSignal", || {
        let call = OneSided::Put {
            from: localbuff,
            count,
            data_type: datatype,
            peer,
            window: peerWin,
            offset: peerWinOffset,
            signal: sigIdx,
            context: ctx,
            flags,
        };
        enqueue_one_sided(&call, comm, stream.cast())
    })
}

pub(super) unsafe extern "C" fn ncclSignal(
    peer: c_int,
    sigIdx: c_int,
    ctx: c_int,
    flags: c_uint,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    guarded("ncclSignal", || {
        let call = OneSided::Signal {
            peer,
            signal: sigIdx,
            context: ctx,
            flags,
        };
        enqueue_one_sided(&call, comm, stream.cast())
    })
}

pub(super) unsafe extern "C" fn ncclWaitSignal(
    nDesc: c_int,
    signalDescs: *mut ncclWaitSignalDesc_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    guarded("ncclWaitSignal", || {
        let count = usize::try_from(nDesc).unwrap_or(0);
        let descriptors = (!signalDescs.is_null()).then(|| {
            // SAFETY: the function's contract: as many descriptors, maybe less aligned than ours.
            (0..count)
                .map(|at| unsafe { signalDescs.add(at).read_unaligned() })
                .collect()
        });
        enqueue_one_sided(&OneSided::Wait(descriptors), comm, stream.cast())
    })
}

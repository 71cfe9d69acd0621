//! Groups and the operations that go into them.

use std::ffi::{c_int, c_void};

use nccl_sys::{
    NCCL_API_MAGIC, cudaStream_t, ncclCollConfig_t, ncclComm_t, ncclDataType_t, ncclRedOp_t,
    ncclResult_t, ncclSimInfo_t,
};

use super::{call, guarded, strike, strike_at};
use crate::faults;
use crate::nccl::code::{self, INVALID_ARGUMENT, INVALID_USAGE, Result};
use crate::nccl::debug::warn;
use crate::nccl::group::{self, Call, Function};

pub(super) unsafe extern "C" fn ncclGroupStart() -> ncclResult_t {
    call("ncclGroupStart", std::ptr::null_mut(), || {
        group::start();
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclGroupEnd() -> ncclResult_t {
    guarded("ncclGroupEnd", || {
        strike_group("ncclGroupEnd");
        group::end()
    })
}

/// Lets the faults at the end of a group strike. A failure is recorded as if a call of the group
/// had failed, so that the end returns it and drops what was queued.
fn strike_group(function: &'static str) {
    if faults::any() {
        let result = strike_at(function, &group::communicators());
        let _ = group::record(result);
    }
}

/// Estimates nothing: there is no model of time. The estimate stays what the caller put there.
pub(super) unsafe extern "C" fn ncclGroupSimulateEnd(simInfo: *mut ncclSimInfo_t) -> ncclResult_t {
    const MAGIC: u32 = 0x7468_5283;
    guarded("ncclGroupSimulateEnd", || {
        strike_group("ncclGroupSimulateEnd");
        if group::is_outermost() && !simInfo.is_null() {
            // SAFETY: not null, and by the function's contract at least size and magic.
            let magic = unsafe { (&raw const (*simInfo).magic).read_unaligned() };
            if magic != MAGIC {
                warn!("ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER");
                let _ = group::record(Err(INVALID_ARGUMENT));
            }
        }
        group::simulate_end()
    })
}

/// `ncclParseCollConfig`: what is wrong with a configuration of a single call. Null is fine.
///
/// # Safety
/// `config` is null or points to a config of the size that its first field says.
pub(super) unsafe fn check_config(config: *const ncclCollConfig_t) -> Result {
    if config.is_null() {
        return Ok(());
    }
    let mut own = nccl_sys::NCCL_COLLCONFIG_INITIALIZER;
    own.magic = 0;
    // SAFETY: the caller's promise; as many bytes as both sides have.
    unsafe {
        let size = config
            .cast::<usize>()
            .read_unaligned()
            .min(size_of::<ncclCollConfig_t>());
        std::ptr::copy_nonoverlapping(
            config.cast::<u8>(),
            std::ptr::from_mut(&mut own).cast::<u8>(),
            size,
        );
    }
    if own.magic != NCCL_API_MAGIC {
        warn!(
            "ncclCollConfig_t magic mismatch (got {:#x}, expected {NCCL_API_MAGIC:#x})",
            own.magic
        );
        return Err(INVALID_ARGUMENT);
    }
    if !matches!(own.forceAlgSelection, 0 | 1) {
        warn!(
            "config->forceAlgSelection={} is invalid, accepted values are 0 or 1",
            own.forceAlgSelection
        );
        return Err(INVALID_ARGUMENT);
    }
    if own.CTAPolicy != nccl_sys::NCCL_CONFIG_UNDEF_INT && !(0..=3).contains(&own.CTAPolicy) {
        warn!("config->CTAPolicy={} is invalid", own.CTAPolicy);
        return Err(INVALID_ARGUMENT);
    }
    if !own.launchCompletionEvent.is_null() {
        warn!("nccl-emulator cannot record config->launchCompletionEvent yet");
        return Err(INVALID_USAGE);
    }
    Ok(())
}

fn enqueue(call: &Call) -> ncclResult_t {
    guarded(call.function.name(), || group::enqueue(call))
}

/// As [`enqueue`], for a call with a config.
///
/// # Safety
/// As [`check_config`].
unsafe fn enqueue_with(
    call: &Call,
    symbol: &'static str,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    guarded(symbol, || {
        strike(symbol, call.communicator)?;
        // SAFETY: the caller's promise.
        unsafe { check_config(config)? };
        group::enqueue(call)
    })
}

pub(super) unsafe extern "C" fn ncclSend(
    sendbuff: *const c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    enqueue(&Call {
        function: Function::Send,
        send: sendbuff,
        receive: std::ptr::null_mut(),
        count,
        data_type: datatype,
        operator: ncclRedOp_t::ncclSum,
        root: peer,
        communicator: comm,
        stream: stream.cast(),
    })
}

pub(super) unsafe extern "C" fn ncclRecv(
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    enqueue(&Call {
        function: Function::Recv,
        send: std::ptr::null(),
        receive: recvbuff,
        count,
        data_type: datatype,
        operator: ncclRedOp_t::ncclSum,
        root: peer,
        communicator: comm,
        stream: stream.cast(),
    })
}

fn all_to_all(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> Call {
    Call {
        function: Function::AlltoAll,
        send: sendbuff,
        receive: recvbuff,
        count,
        data_type: datatype,
        operator: ncclRedOp_t::ncclSum,
        root: 0,
        communicator: comm,
        stream: stream.cast(),
    }
}

pub(super) unsafe extern "C" fn ncclAlltoAll(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    enqueue(&all_to_all(
        sendbuff, recvbuff, count, datatype, comm, stream,
    ))
}

pub(super) unsafe extern "C" fn ncclAlltoAllConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    let call = all_to_all(sendbuff, recvbuff, count, datatype, comm, stream);
    // SAFETY: the function's contract.
    unsafe { enqueue_with(&call, "ncclAlltoAllConfig", config) }
}

pub(super) unsafe extern "C" fn ncclAllReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: null is fine.
    unsafe {
        ncclAllReduceConfig(
            sendbuff,
            recvbuff,
            count,
            datatype,
            op,
            comm,
            stream,
            std::ptr::null(),
        )
    }
}

pub(super) unsafe extern "C" fn ncclAllReduceConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    let call = Call {
        function: Function::AllReduce,
        send: sendbuff,
        receive: recvbuff,
        count,
        data_type: datatype,
        operator: op,
        root: 0,
        communicator: comm,
        stream: stream.cast(),
    };
    if config.is_null() {
        return enqueue(&call);
    }
    // SAFETY: the function's contract.
    unsafe { enqueue_with(&call, "ncclAllReduceConfig", config) }
}

/// A collective that is not there yet: checked as far as it can be, and an error of its group.
///
/// # Safety
/// As [`check_config`].
pub(super) unsafe fn unknown_collective(
    symbol: &'static str,
    name: &str,
    comm: ncclComm_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    call(symbol, comm, || {
        // SAFETY: the caller's promise.
        unsafe { check_config(config)? };
        let result = crate::nccl::communicator::lookup(comm, name).and_then(|_| {
            warn!("{symbol}: nccl-emulator does not have this function yet");
            Err(code::INVALID_USAGE)
        });
        group::record(result)
    })
}

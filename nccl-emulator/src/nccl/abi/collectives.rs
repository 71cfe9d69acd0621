//! The collectives, each with its form that takes a configuration.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;

use nccl_sys::{
    NCCL_API_MAGIC, cudaStream_t, ncclCollConfig_t, ncclComm_t, ncclDataType_t, ncclRedOp_t,
    ncclResult_t,
};

use super::guard::{guarded, strike};
use crate::code::{INVALID_ARGUMENT, Result};
use crate::nccl::debug::warn;
use crate::nccl::group::{self, Call};
use crate::nccl::task::Function;
use crate::version;

/// `ncclParseCollConfig`: checks the configuration of a single call. Null is a valid configuration. Fields that choose
/// algorithms or limit their resources have no effect here; NCCL does not check them before it runs, either.
///
/// # Safety
/// `config` is null or points to a config of the size that its first field says.
unsafe fn parse(config: *const ncclCollConfig_t) -> Result<ncclCollConfig_t> {
    let mut own = nccl_sys::NCCL_COLLCONFIG_INITIALIZER;
    if config.is_null() {
        return Ok(own);
    }
    own.magic = 0;
    let known = if version::is_at_least(2, 32, 3) {
        size_of::<ncclCollConfig_t>()
    } else {
        offset_of!(ncclCollConfig_t, launchCompletionEvent)
    };
    // SAFETY: the caller's promise; as many bytes as both sides have.
    unsafe {
        let size = config.cast::<usize>().read_unaligned().min(known);
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
        warn!(
            "config->CTAPolicy={} is invalid, accepted values are [1, 3]",
            own.CTAPolicy
        );
        return Err(INVALID_ARGUMENT);
    }
    Ok(own)
}

/// Enqueues an operation with a configuration.
///
/// # Safety
/// As [`parse`].
unsafe fn enqueue_with(
    mut call: Call,
    symbol: &'static str,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    guarded(symbol, || {
        strike(symbol, call.communicator)?;
        // SAFETY: the caller's promise.
        let config = unsafe { parse(config)? };
        call.event = config.launchCompletionEvent.cast();
        call.tag = config.userProfilerTag;
        group::enqueue(&call)
    })
}

macro_rules! collectives {
    ($($name:ident / $with_config:ident($($argument:ident: $type:ty),*) => $call:expr;)*) => {$(
        pub(super) unsafe extern "C" fn $name($($argument: $type),*) -> ncclResult_t {
            let call: Call = $call;
            guarded(stringify!($name), || group::enqueue(&call))
        }

        pub(super) unsafe extern "C" fn $with_config(
            $($argument: $type,)* config: *const ncclCollConfig_t
        ) -> ncclResult_t {
            // SAFETY: the function's contract.
            unsafe { enqueue_with($call, stringify!($with_config), config) }
        }
    )*};
}

collectives! {
    ncclAllReduce / ncclAllReduceConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, op: ncclRedOp_t,
        comm: ncclComm_t, stream: cudaStream_t
    ) => Call {
        send: sendbuff, receive: recvbuff, count, data_type: datatype, operator: op,
        ..Call::new(Function::AllReduce, comm, stream)
    };
    ncclReduce / ncclReduceConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, op: ncclRedOp_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t
    ) => Call {
        send: sendbuff, receive: recvbuff, count, data_type: datatype, operator: op, root,
        ..Call::new(Function::Reduce, comm, stream)
    };
    ncclReduceScatter / ncclReduceScatterConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t, op: ncclRedOp_t,
        comm: ncclComm_t, stream: cudaStream_t
    ) => Call {
        send: sendbuff, receive: recvbuff, count: recvcount, data_type: datatype, operator: op,
        ..Call::new(Function::ReduceScatter, comm, stream)
    };
    ncclBroadcast / ncclBroadcastConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int,
        comm: ncclComm_t, stream: cudaStream_t
    ) => Call {
        send: sendbuff, receive: recvbuff, count, data_type: datatype, root,
        ..Call::new(Function::Broadcast, comm, stream)
    };
    ncclAllGather / ncclAllGatherConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t
    ) => Call {
        send: sendbuff, receive: recvbuff, count: sendcount, data_type: datatype,
        ..Call::new(Function::AllGather, comm, stream)
    };
    ncclAlltoAll / ncclAlltoAllConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t
    ) => Call {
        send: sendbuff, receive: recvbuff, count, data_type: datatype,
        ..Call::new(Function::AlltoAll, comm, stream)
    };
    ncclGather / ncclGatherConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int,
        comm: ncclComm_t, stream: cudaStream_t
    ) => Call {
        send: sendbuff, receive: recvbuff, count, data_type: datatype, root,
        ..Call::new(Function::Gather, comm, stream)
    };
    ncclScatter / ncclScatterConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int,
        comm: ncclComm_t, stream: cudaStream_t
    ) => Call {
        send: sendbuff, receive: recvbuff, count, data_type: datatype, root,
        ..Call::new(Function::Scatter, comm, stream)
    };
}

/// The older form of an in-place broadcast. NCCL's messages use the newer name for it.
pub(super) unsafe extern "C" fn ncclBcast(
    buff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    guarded("ncclBcast", || {
        strike("ncclBcast", comm)?;
        group::enqueue(&Call {
            send: buff,
            receive: buff,
            count,
            data_type: datatype,
            root,
            ..Call::new(Function::Broadcast, comm, stream)
        })
    })
}

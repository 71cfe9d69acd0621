//! Groups, sends and receives.

use std::ffi::{c_int, c_void};

use nccl_sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclResult_t, ncclSimInfo_t};

use super::guard::{call, guarded, strike_at};
use crate::code::INVALID_ARGUMENT;
use crate::faults;
use crate::nccl::debug::warn;
use crate::nccl::group::{self, Call};
use crate::nccl::task::Function;

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

/// Applies the faults of the end of a group. A failure is recorded like that of a call in the group, so that the end returns it
/// and drops the queued work.
fn strike_group(function: &'static str) {
    if faults::any() {
        let result = strike_at(function, &group::communicators());
        let _ = group::record(result);
    }
}

/// Estimates nothing, because there is no model of time: the estimate keeps the caller's value.
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

fn enqueue(call: &Call) -> ncclResult_t {
    guarded(call.function.name(), || group::enqueue(call))
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
        send: sendbuff,
        count,
        data_type: datatype,
        root: peer,
        ..Call::new(Function::Send, comm, stream)
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
        receive: recvbuff,
        count,
        data_type: datatype,
        root: peer,
        ..Call::new(Function::Recv, comm, stream)
    })
}

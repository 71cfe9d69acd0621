//! User-defined operators.

use std::ffi::c_void;

use nccl_sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclScalarResidence_t};

use super::guard::{call, not_null};
use crate::code::{INTERNAL, INVALID_ARGUMENT, Result};
use crate::nccl::communicator;
use crate::nccl::debug::warn;
use crate::nccl::operators::UserOperator;
use crate::numbers::datatype::{DataType, Scalar};

/// Refuses null pointers, which crash NCCL.
pub(super) unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    op: *mut ncclRedOp_t,
    scalar: *mut c_void,
    datatype: ncclDataType_t,
    residence: ncclScalarResidence_t,
    comm: ncclComm_t,
) -> ncclResult_t {
    const NAME: &str = "ncclRedOpCreatePreMulSum";
    call(NAME, comm, || {
        let communicator = communicator::lookup(comm, NAME)?;
        communicator.ensure_ready()?;
        not_null(op, NAME, "op")?;
        not_null(scalar, NAME, "scalar")?;
        let scalar = if residence == ncclScalarResidence_t::ncclScalarHostImmediate {
            // SAFETY: not null, and by the function's contract a value of the type.
            unsafe { read(scalar, datatype)? }
        } else {
            Scalar::At(scalar.addr() as u64)
        };
        let operator = UserOperator {
            data_type: datatype,
            scalar,
        };
        let handle = communicator
            .operators()
            .create(communicator.handle(), operator);
        // SAFETY: not null, and by the function's contract a place for the handle.
        unsafe { op.write_unaligned(handle) };
        Ok(())
    })
}

/// Reads the bits of a value of this type.
///
/// # Safety
/// `scalar` points to such a value.
unsafe fn read(scalar: *const c_void, datatype: ncclDataType_t) -> Result<Scalar> {
    // NCCL has no check here, and fails on the size of the type.
    let data_type = DataType::from_c(datatype).ok_or(INTERNAL)?;
    let mut bits = [0; 8];
    let size = data_type.size() as usize;
    // SAFETY: the caller's promise; no type is longer than the bits.
    unsafe { std::ptr::copy_nonoverlapping(scalar.cast::<u8>(), bits.as_mut_ptr(), size) };
    Ok(Scalar::Value(u64::from_le_bytes(bits)))
}

/// Like NCCL, does not check the state of the communicator.
pub(super) unsafe extern "C" fn ncclRedOpDestroy(
    op: ncclRedOp_t,
    comm: ncclComm_t,
) -> ncclResult_t {
    call("ncclRedOpDestroy", comm, || {
        if op.0 < ncclRedOp_t::ncclNumOps.0 {
            warn!("ncclRedOpDestroy : operator is a NCCL builtin.");
        } else if op.0 > ncclRedOp_t::ncclMaxRedOp.0 {
            warn!("ncclRedOpDestroy :  operator is garbage.");
        } else if comm.is_null() {
            warn!("ncclRedOpDestroy : invalid communicator passed.");
        } else {
            let communicator = communicator::lookup(comm, "ncclRedOpDestroy")?;
            if communicator.operators().destroy(communicator.handle(), op) {
                return Ok(());
            }
            warn!("ncclRedOpDestroy : operator unknown to this communicator.");
        }
        Err(INVALID_ARGUMENT)
    })
}

//! The memory into which NCCL writes a communicator that it makes in the background, possibly long after the call has returned.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use nccl_sys as sys;

use crate::communicator::handle::RawComm;

/// The memory into which NCCL writes a communicator that it makes in the background.
#[derive(Default)]
pub(super) struct AsyncOut(AtomicPtr<sys::ncclComm>);

impl AsyncOut {
    /// Returns the address into which NCCL writes: during the call, later, or both.
    pub(super) fn as_out_pointer(&self) -> *mut sys::ncclComm_t {
        self.0.as_ptr()
    }

    /// Takes the communicator that NCCL has written.
    pub(super) fn take(&self) -> Option<RawComm> {
        NonNull::new(self.0.swap(std::ptr::null_mut(), Ordering::AcqRel)).map(RawComm)
    }
}

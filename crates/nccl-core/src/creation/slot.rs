//! Where NCCL puts a communicator that it makes in the background: it writes there when the call is long over.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use nccl_sys as sys;

use crate::communicator::handle::RawComm;

/// Where NCCL puts a communicator that it makes in the background.
#[derive(Default)]
pub(super) struct Slot(AtomicPtr<sys::ncclComm>);

impl Slot {
    /// For NCCL, which writes there at once, later, or both.
    pub(super) fn place(&self) -> *mut sys::ncclComm_t {
        self.0.as_ptr()
    }

    /// What NCCL has put there.
    pub(super) fn take(&self) -> Option<RawComm> {
        NonNull::new(self.0.swap(std::ptr::null_mut(), Ordering::AcqRel)).map(RawComm)
    }
}

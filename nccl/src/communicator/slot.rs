//! Where NCCL puts a communicator that it makes in the background: it writes there when the call is long over.

use std::ptr::NonNull;
use std::sync::Mutex;

use nccl_sys as sys;

use super::handle::RawComm;
use super::lock;

/// Where NCCL puts a communicator that it makes in the background.
#[derive(Default)]
pub(super) struct Slot(Mutex<Place>);

struct Place(std::cell::UnsafeCell<sys::ncclComm_t>);

impl Default for Place {
    fn default() -> Self {
        Self(std::cell::UnsafeCell::new(std::ptr::null_mut()))
    }
}

// SAFETY: a pointer to a communicator, which any thread may have ([`RawComm`]).
unsafe impl Send for Place {}

impl Slot {
    /// For NCCL, which writes before the parent is at rest.
    pub(super) fn place(&self) -> *mut sys::ncclComm_t {
        lock(&self.0).0.get()
    }

    /// What NCCL has put there; only when the parent is at rest, or freed.
    pub(super) fn take(&self) -> Option<RawComm> {
        let place = lock(&self.0);
        // SAFETY: the caller's promise: NCCL writes no more, and the lock is held.
        let made = unsafe { std::ptr::replace(place.0.get(), std::ptr::null_mut()) };
        NonNull::new(made).map(RawComm)
    }
}

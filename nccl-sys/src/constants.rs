//! The macros of `nccl.h` that bindgen cannot turn into constants, written by hand, and the standard
//! traits of [`ncclUniqueId`]. `tests/header.rs` compares the values with the header.

use core::ffi::{c_int, c_void};
use core::hash::{Hash, Hasher};

use crate::bindings::types::*;

/// A field of a config that is left to NCCL.
///
/// ```
/// assert_eq!(nccl_sys::NCCL_CONFIG_INITIALIZER.minCTAs, nccl_sys::NCCL_CONFIG_UNDEF_INT);
/// ```
pub const NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;

/// A pointer in a config that is left to NCCL.
///
/// ```
/// assert_eq!(nccl_sys::NCCL_CONFIG_INITIALIZER.netName, nccl_sys::NCCL_CONFIG_UNDEF_PTR.cast());
/// ```
pub const NCCL_CONFIG_UNDEF_PTR: *mut c_void = core::ptr::null_mut();

/// An estimate that NCCL has not made.
///
/// ```
/// assert!(nccl_sys::NCCL_UNDEF_FLOAT < 0.0);
/// ```
pub const NCCL_UNDEF_FLOAT: f32 = -1.0;

/// No communicator.
///
/// ```
/// let mut comm = nccl_sys::NCCL_COMM_NULL; // for ncclCommInitRank to write to
/// assert!(comm.is_null());
/// ```
pub const NCCL_COMM_NULL: ncclComm_t = core::ptr::null_mut();

impl Default for ncclUniqueId {
    /// All zeros: room for `ncclGetUniqueId` to write to.
    fn default() -> Self {
        Self {
            internal: [0; NCCL_UNIQUE_ID_BYTES],
        }
    }
}

impl PartialEq for ncclUniqueId {
    fn eq(&self, other: &Self) -> bool {
        self.internal == other.internal
    }
}

impl Eq for ncclUniqueId {}

impl Hash for ncclUniqueId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.internal.hash(state);
    }
}

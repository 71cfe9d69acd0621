//! The macros of `nccl.h` that bindgen cannot turn into constants, written by hand, and the standard
//! traits of the generated types. `tests/header.rs` compares all of it with the header.

use core::ffi::c_int;
use core::hash::{Hash, Hasher};

use crate::bindings::initializers::*;
use crate::bindings::types::*;

/// A field of a config that is left to NCCL.
pub const NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;

/// An estimate that NCCL has not made.
pub const NCCL_UNDEF_FLOAT: f32 = -1.0;

/// No communicator.
pub const NCCL_COMM_NULL: ncclComm_t = core::ptr::null_mut();

impl Default for ncclConfig_t {
    /// [`NCCL_CONFIG_INITIALIZER`].
    fn default() -> Self {
        NCCL_CONFIG_INITIALIZER
    }
}

impl Default for ncclCollConfig_t {
    /// [`NCCL_COLLCONFIG_INITIALIZER`].
    fn default() -> Self {
        NCCL_COLLCONFIG_INITIALIZER
    }
}

impl Default for ncclSimInfo_t {
    /// [`NCCL_SIM_INFO_INITIALIZER`].
    fn default() -> Self {
        NCCL_SIM_INFO_INITIALIZER
    }
}

impl Default for ncclEncryptionConfig_t {
    /// [`NCCL_ENCRYPTION_CONFIG_INITIALIZER`].
    fn default() -> Self {
        NCCL_ENCRYPTION_CONFIG_INITIALIZER
    }
}

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

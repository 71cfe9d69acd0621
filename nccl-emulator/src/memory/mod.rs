//! Device memory: pools, their allocation tables, address windows, and the mapping of peers' pools.

mod mapping;
mod pool;

use crate::driver::CUresult;
use crate::violations::Violation;

pub(crate) use mapping::{ImportError, Mapping, import};
pub(crate) use pool::Pool;

/// A device's number, as in `cuDeviceGet`.
pub(crate) type DeviceOrdinal = i32;

/// A range inside one allocation of one pool. Plain data: it may travel to a peer and be checked there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Span {
    /// Slot in the pool's table.
    pub(crate) index: u32,
    /// The allocation's number on its device; a slot that was reused has another.
    pub(crate) generation: u32,
    /// First byte, counted from the start of the pool's data.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// The allocation that `len` bytes at `ptr` lie in. Checks that it is not freed, and the bounds; a range of length zero
/// is always fine. The range is to be checked again, by [`Mapping::view`], when the work runs.
///
/// # Errors
/// What is wrong with the range, naming the allocation.
pub(crate) fn resolve(ptr: u64, len: u64) -> Result<(DeviceOrdinal, Span), Violation> {
    let _ = (ptr, len);
    todo!()
}

/// The pool of a device of this process, made at its first use.
///
/// # Errors
/// `CUDA_ERROR_INVALID_DEVICE`; `CUDA_ERROR_OUT_OF_MEMORY` when the host refuses the address space.
pub(crate) fn pool(device: DeviceOrdinal) -> Result<&'static Pool, CUresult> {
    let _ = device;
    todo!()
}

/// Device memory that is usable at once.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`, `CUDA_ERROR_INVALID_VALUE` for size 0.
pub(crate) fn allocate(device: DeviceOrdinal, size: u64) -> Result<u64, CUresult> {
    let _ = (device, size);
    todo!()
}

/// Frees at once, waiting for nothing: synchronize before.
///
/// # Errors
/// A violation when `ptr` is not the start of a live allocation.
pub(crate) fn free(ptr: u64) -> Result<(), Violation> {
    let _ = ptr;
    todo!()
}

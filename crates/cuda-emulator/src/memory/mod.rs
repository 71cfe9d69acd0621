//! Device memory: pools, their allocation tables, address windows, and the mapping of peers' pools.
//!
//! Each device of each process has one pool, a memfd: a table of allocations ([`table`]) and the
//! data. The process maps it as a "shadow" ([`Mapping`]) through which jobs copy; peers map the
//! same memfd once and copy straight from or into it. Callers see other addresses:
//! they lie in a window of the address space that is reserved and can neither be read nor written,
//! so a host that dereferences a device pointer gets the signal it would get on a GPU.
//!
//! A range is checked three times: [`resolve`] when a call names it, which fixes the allocation by
//! its number; [`Mapping::view`] when the work runs; [`Mapping::still_valid`] when it has run. So a
//! free that comes too early is caught, be it before the call, before the work or during it, and
//! the violation names the allocation.
//!
//! A range can be watched ([`Mapping::watch`]): then each use of its bytes by work of this process is reported.
//!
//! Freed memory stays in quarantine for a while before it is allocated again, so that an address
//! used after its free does not yet belong to another allocation. Its contents stay as they are, as
//! on a GPU.

mod access;
mod address;
mod host;
pub mod ipc;
mod mapping;
mod mempool;
mod peers;
mod physical;
mod pool;
mod pools;
mod reservation;
mod space;
mod span;
mod table;
mod watch;

use crate::result::CUresult;
use crate::violations::{Violation, ViolationKind};

use pools::pool_at;

pub use access::{Access, Place, access, locate};
pub use host::{allocate_host, free_host, host_block, pinned, register_host, unregister_host};
pub use mapping::{Mapping, import};
pub use mempool::MemPool;
pub use peers::{allow_peer, forbid_peer};
pub use physical::{GRANULARITY, Location, Physical};
pub use pool::{Freeing, Placement, Pool};
pub use pools::pool;
pub use reservation::{Piece, map, piece_at, reserve, set_access, unmap, unreserve};
pub use span::{DeviceOrdinal, Found, Span};
pub use watch::Watch;

/// The owner number of memory that belongs to no context.
const NO_OWNER: u32 = 0;

/// Whether an address is a device address, allocated or not.
pub fn is_device_address(ptr: u64) -> bool {
    pools::is_in_window(ptr) || reservation::is_device_address(ptr) || ipc::is_opened(ptr)
}

/// Returns the allocation that `len` bytes at `ptr` lie in. Checks that it is not freed, and the bounds; a range of length zero
/// is always valid. [`Mapping::view`] must check the range again when the work runs.
///
/// # Errors
/// The violation, naming the allocation.
pub fn resolve(ptr: u64, len: u64) -> Result<(DeviceOrdinal, Span), Violation> {
    match pool_at(ptr) {
        Some((pool, offset)) => Ok((pool.device(), pool.span(offset, len)?)),
        None if len == 0 => Ok((
            0,
            Span {
                index: 0,
                generation: 0,
                offset: 0,
                len: 0,
            },
        )),
        None => Err(not_device_memory(ptr, len)),
    }
}

#[cold]
fn not_device_memory(ptr: u64, len: u64) -> Violation {
    if let Some(block) = host_block(ptr as usize) {
        let text = format!(
            "device memory is needed, but 0x{ptr:x} is in {} bytes of pinned host memory",
            block.len
        );
        return Violation::new(ViolationKind::HostMemory, None, text);
    }
    if ipc::is_opened(ptr) {
        let text = format!(
            "memory of this process is needed, but 0x{ptr:x} is in memory that cuIpcOpenMemHandle opened"
        );
        return Violation::new(ViolationKind::Misuse, None, text);
    }
    if reservation::piece_at(ptr).is_some() {
        let text = format!(
            "memory of cuMemAlloc is needed, but 0x{ptr:x} is in memory that cuMemMap mapped: the emulator's own NCCL \
             takes none"
        );
        return Violation::new(ViolationKind::Misuse, None, text);
    }
    let text = format!(
        "device memory is needed, but {len} bytes at 0x{ptr:x} belong to no device (is it a host pointer?)"
    );
    Violation::new(ViolationKind::UnknownAddress, None, text)
}

/// Allocates device memory that is usable at once and belongs to no context.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`, `CUDA_ERROR_INVALID_VALUE` for size 0.
pub fn allocate(device: DeviceOrdinal, size: u64) -> Result<u64, CUresult> {
    pool(device)?
        .allocate(size, NO_OWNER, false)
        .map(|placement| placement.address)
}

/// Frees memory at once, without waiting; synchronize before.
///
/// # Errors
/// A violation when `ptr` is not the start of a live allocation.
pub fn free(ptr: u64) -> Result<(), Violation> {
    let freeing = begin_free(ptr)?;
    freeing.finish();
    Ok(())
}

/// Marks an allocation for a stream-ordered free. From now on a second free is a violation; use is
/// one only after [`Freeing::finish`].
///
/// # Errors
/// A violation when `ptr` is not the start of a live allocation.
pub fn begin_free(ptr: u64) -> Result<Freeing, Violation> {
    match pool_at(ptr) {
        Some((pool, offset)) => pool.begin_free(offset),
        None => Err(not_device_memory(ptr, 1)),
    }
}

/// Returns device, start and size of the allocation that an address lies in.
pub fn range(ptr: u64) -> Option<(DeviceOrdinal, u64, u64)> {
    let (pool, offset) = pool_at(ptr)?;
    let (start, size) = pool.range(offset)?;
    Some((pool.device(), start, size))
}

/// Returns the live allocation that an address lies in.
pub fn allocation_at(ptr: u64) -> Option<Found> {
    match pool_at(ptr) {
        Some((pool, offset)) => pool.allocation_at(offset),
        None => ipc::allocation_at(ptr),
    }
}

/// Frees all memory that belongs to a context.
pub fn free_all_of(device: DeviceOrdinal, context: u32) {
    if let Ok(pool) = pool(device) {
        pool.free_all_of(context);
    }
}

#[cfg(test)]
mod tests;

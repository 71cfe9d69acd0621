//! Pinned host memory: what `cuMemHostAlloc` gave out and `cuMemHostRegister` was told of. Copies
//! from and to it are asynchronous; those of other host memory are not.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::driver::CUresult;

const PAGE: usize = 4096;

/// A block of pinned memory.
#[derive(Debug, Clone, Copy)]
pub struct HostBlock {
    pub start: usize,
    pub len: usize,
    /// The device whose context pinned it.
    pub device: i32,
    pub flags: u32,
    /// Ours to free, or the caller's.
    allocated: bool,
}

static BLOCKS: RwLock<BTreeMap<usize, HostBlock>> = RwLock::new(BTreeMap::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn read() -> RwLockReadGuard<'static, BTreeMap<usize, HostBlock>> {
    BLOCKS.read().unwrap_or_else(PoisonError::into_inner)
}

fn write() -> RwLockWriteGuard<'static, BTreeMap<usize, HostBlock>> {
    BLOCKS.write().unwrap_or_else(PoisonError::into_inner)
}

fn containing(blocks: &BTreeMap<usize, HostBlock>, address: usize) -> Option<HostBlock> {
    let (_, block) = blocks.range(..=address).next_back()?;
    (address - block.start < block.len).then_some(*block)
}

/// The pinned block that an address lies in.
pub fn host_block(address: usize) -> Option<HostBlock> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    containing(&read(), address)
}

/// Whether a whole range is pinned.
pub fn pinned(address: usize, len: usize) -> bool {
    host_block(address).is_some_and(|block| len <= block.len - (address - block.start))
}

/// New pinned memory. Its contents are whatever they are.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for size 0, `CUDA_ERROR_OUT_OF_MEMORY`.
pub fn allocate_host(len: usize, device: i32, flags: u32) -> Result<*mut u8, CUresult> {
    if len == 0 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let layout = Layout::from_size_align(len, PAGE).map_err(|_| CUresult::ERROR_OUT_OF_MEMORY)?;
    // SAFETY: the layout's size is not zero.
    let memory = unsafe { std::alloc::alloc(layout) };
    if memory.is_null() {
        return Err(CUresult::ERROR_OUT_OF_MEMORY);
    }
    let start = memory.expose_provenance();
    write().insert(
        start,
        HostBlock {
            start,
            len,
            device,
            flags,
            allocated: true,
        },
    );
    COUNT.fetch_add(1, Ordering::Release);
    Ok(memory)
}

/// Frees pinned memory that nothing uses any more.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if it is not the start of one.
pub fn free_host(address: usize) -> Result<(), CUresult> {
    let mut blocks = write();
    match blocks.get(&address) {
        Some(block) if block.allocated => {}
        _ => return Err(CUresult::ERROR_INVALID_VALUE),
    }
    let block = blocks
        .remove(&address)
        .ok_or(CUresult::ERROR_INVALID_VALUE)?;
    COUNT.fetch_sub(1, Ordering::Release);
    drop(blocks);
    let layout =
        Layout::from_size_align(block.len, PAGE).map_err(|_| CUresult::ERROR_INVALID_VALUE)?;
    // SAFETY: allocated above with this layout, and just taken out of the list by this thread
    // alone.
    unsafe { std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(block.start), layout) };
    Ok(())
}

/// Pins memory of the caller's.
///
/// # Errors
/// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED` if part of it is pinned.
pub fn register_host(start: usize, len: usize, device: i32, flags: u32) -> Result<(), CUresult> {
    let end = start
        .checked_add(len)
        .ok_or(CUresult::ERROR_INVALID_VALUE)?;
    if start == 0 || len == 0 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let mut blocks = write();
    if containing(&blocks, start).is_some() || blocks.range(start..end).next().is_some() {
        return Err(CUresult::ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    }
    blocks.insert(
        start,
        HostBlock {
            start,
            len,
            device,
            flags,
            allocated: false,
        },
    );
    COUNT.fetch_add(1, Ordering::Release);
    Ok(())
}

/// Ends what [`register_host`] began.
///
/// # Errors
/// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`.
pub fn unregister_host(start: usize) -> Result<(), CUresult> {
    let mut blocks = write();
    match blocks.get(&start) {
        Some(block) if !block.allocated => {}
        _ => return Err(CUresult::ERROR_HOST_MEMORY_NOT_REGISTERED),
    }
    blocks.remove(&start);
    COUNT.fetch_sub(1, Ordering::Release);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_ranges_are_pinned() {
        let start = allocate_host(10_000, 0, 0).unwrap().addr();
        assert!(pinned(start, 10_000));
        assert!(pinned(start + 9_999, 1));
        assert!(!pinned(start + 1, 10_000));
        assert!(!pinned(start + 10_000, 1));
        assert_eq!(
            register_host(start + 5, 1, 0, 0),
            Err(CUresult::ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        );
        assert_eq!(
            unregister_host(start),
            Err(CUresult::ERROR_HOST_MEMORY_NOT_REGISTERED)
        );
        free_host(start).unwrap();
        assert_eq!(free_host(start), Err(CUresult::ERROR_INVALID_VALUE));
        assert!(!pinned(start, 1));
    }
}

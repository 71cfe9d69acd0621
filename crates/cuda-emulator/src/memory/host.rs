//! Pinned host memory: allocated by `cuMemHostAlloc`, or registered by `cuMemHostRegister`. Copies
//! from and to it are asynchronous; copies of other host memory are not.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::result::CUresult;
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::violations::{Violation, ViolationKind};

const PAGE: usize = 4096;

/// A block of pinned memory.
#[derive(Debug, Clone, Copy)]
pub struct HostBlock {
    pub start: usize,
    pub len: usize,
    /// The device whose context pinned it.
    pub device: i32,
    pub flags: u32,
    /// Blocks of this process are numbered from 1.
    pub number: u64,
}

/// Memory of [`allocate_host`], freed with its last user.
#[derive(Debug)]
struct Memory {
    start: usize,
    layout: Layout,
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and every user holds a reference to this.
        unsafe {
            std::alloc::dealloc(
                std::ptr::with_exposed_provenance_mut(self.start),
                self.layout,
            )
        };
    }
}

/// A block, and its memory unless the caller owns it.
type Entry = (HostBlock, Option<Arc<Memory>>);

static BLOCKS: RwLock<BTreeMap<usize, Entry>> = RwLock::new(BTreeMap::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);
static NUMBER: AtomicU64 = AtomicU64::new(1);

fn read() -> RwLockReadGuard<'static, BTreeMap<usize, Entry>> {
    BLOCKS.read()
}

fn write() -> RwLockWriteGuard<'static, BTreeMap<usize, Entry>> {
    BLOCKS.write()
}

fn containing(blocks: &BTreeMap<usize, Entry>, address: usize) -> Option<&Entry> {
    let (_, entry) = blocks.range(..=address).next_back()?;
    (address - entry.0.start < entry.0.len).then_some(entry)
}

/// A range of a pinned block. It keeps memory of [`allocate_host`] alive, but not the caller's own memory.
#[derive(Debug, Clone)]
pub(super) struct HostRange {
    address: usize,
    len: usize,
    number: u64,
    _memory: Option<Arc<Memory>>,
}

/// Returns the pinned range at an address, if a block contains its first byte.
pub(super) fn find(address: usize, len: usize) -> Option<Result<HostRange, Violation>> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let blocks = read();
    let (block, memory) = containing(&blocks, address)?;
    let from = address - block.start;
    if len > block.len - from {
        let text = format!(
            "{len} bytes at offset {from} of {} bytes of pinned host memory were used: {} bytes past its end",
            block.len,
            len - (block.len - from),
        );
        let device = Some(block.device);
        return Some(Err(Violation::new(
            ViolationKind::OutOfBounds,
            device,
            text,
        )));
    }
    Some(Ok(HostRange {
        address,
        len,
        number: block.number,
        _memory: memory.clone(),
    }))
}

impl HostRange {
    /// Returns the address of the bytes, if they are still pinned.
    pub(super) fn view(&self) -> Result<*mut u8, Violation> {
        match host_block(self.address) {
            Some(block) if block.number == self.number => {
                Ok(std::ptr::with_exposed_provenance_mut(self.address))
            }
            _ => Err(self.complain()),
        }
    }

    #[cold]
    fn complain(&self) -> Violation {
        let text = format!(
            "{} bytes at 0x{:x} of pinned host memory (block #{}) were used, but it was freed or unregistered",
            self.len, self.address, self.number
        );
        Violation::new(ViolationKind::UseAfterFree, None, text)
    }
}

/// Returns the pinned block that an address lies in.
pub fn host_block(address: usize) -> Option<HostBlock> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    containing(&read(), address).map(|(block, _)| *block)
}

/// Whether a whole range is pinned.
pub fn pinned(address: usize, len: usize) -> bool {
    host_block(address).is_some_and(|block| len <= block.len - (address - block.start))
}

/// Allocates pinned memory with undefined contents.
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
    let owned = Arc::new(Memory { start, layout });
    let block = HostBlock {
        start,
        len,
        device,
        flags,
        number: NUMBER.fetch_add(1, Ordering::Relaxed),
    };
    write().insert(start, (block, Some(owned)));
    COUNT.fetch_add(1, Ordering::Release);
    Ok(memory)
}

/// Frees pinned memory that no work uses any more.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if the address is not the start of memory of [`allocate_host`].
pub fn free_host(address: usize) -> Result<(), CUresult> {
    let mut blocks = write();
    match blocks.get(&address) {
        Some((_, Some(_))) => {}
        _ => return Err(CUresult::ERROR_INVALID_VALUE),
    }
    let removed = blocks.remove(&address);
    COUNT.fetch_sub(1, Ordering::Release);
    drop(blocks);
    drop(removed);
    Ok(())
}

/// Pins memory of the caller.
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
    let block = HostBlock {
        start,
        len,
        device,
        flags,
        number: NUMBER.fetch_add(1, Ordering::Relaxed),
    };
    blocks.insert(start, (block, None));
    COUNT.fetch_add(1, Ordering::Release);
    Ok(())
}

/// Unpins memory of [`register_host`].
///
/// # Errors
/// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`.
pub fn unregister_host(start: usize) -> Result<(), CUresult> {
    let mut blocks = write();
    match blocks.get(&start) {
        Some((_, None)) => {}
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

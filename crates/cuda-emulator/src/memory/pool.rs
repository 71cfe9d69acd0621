//! The memory of one device of this process: its free pages, the allocation of each address, and the
//! quarantine of freed memory.
//!
//! Every allocation begins at a page of its own; from 2 MiB on it begins and ends at a huge page. A
//! map from pages, and another from huge pages, to the table's entries finds the allocation of an
//! address without a lock or a search. A map entry stays after the free until the page is allocated
//! again, so that the violation of a late use names the former allocation.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::address::HUGE;
use super::mapping::{Mapping, punch, sealed_file};
use super::space::Space;
use super::span::{Found, Span};
use super::table::{ENTRIES, HEAD, Snapshot, State};

use crate::result::CUresult;
use crate::sync::{Mutex, MutexGuard};
use crate::violations::{Violation, ViolationKind};

const PAGE: u64 = 4 << 10;
const PAGES_PER_HUGE: u32 = (HUGE / PAGE) as u32;
/// The most freed memory in quarantine, in bytes and in allocations.
const QUARANTINE_BYTES: u64 = 128 << 20;
const QUARANTINE_BLOCKS: usize = 1024;
/// The most free memory that stays resident, to be warm for its next use.
const RESIDENT_BYTES: u64 = 256 << 20;
/// The fill of the first page of small new memory, which is not zero on a GPU either.
const GARBAGE: u8 = 0xDB;

/// The memory of one device of this process.
#[derive(Debug)]
pub struct Pool {
    device: i32,
    window: u64,
    file: File,
    mapping: Arc<Mapping>,
    /// Entry + 1 of the allocation that owns a whole huge page; 0 if no allocation ever did or the
    /// huge page is divided.
    huge_pages: Box<[AtomicU32]>,
    /// Entry + 1 of the allocation that owns a page, if its huge page is divided.
    pages: Box<[AtomicU32]>,
    total: u64,
    allocator: Mutex<Allocator>,
}

#[derive(Debug)]
struct Allocator {
    space: Space,
    /// Freed blocks that may not be allocated yet; oldest first.
    quarantine: VecDeque<Block>,
    quarantined_pages: u64,
    /// Pages of the device taken by memory outside the pool.
    charged_pages: u64,
    /// Freed pages that may still be resident.
    resident_pages: u64,
    /// Entries for reuse, oldest first.
    free_entries: VecDeque<u32>,
    /// The owner of each entry's allocation.
    owners: Vec<Owner>,
    /// The number of the last allocation.
    generation: u32,
    /// The usage of each memory pool, by handle.
    mempools: HashMap<usize, Usage>,
}

/// Allocated bytes: now, and the peak.
#[derive(Debug, Clone, Copy, Default)]
struct Usage {
    now: u64,
    most: u64,
}

/// The memory pool of an allocation: its handle, and its limit in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source {
    pub(super) mempool: usize,
    pub(super) limit: u64,
}

/// `cuMemAlloc`.
const NO_MEMPOOL: Source = Source {
    mempool: 0,
    limit: u64::MAX,
};

/// The owner of an allocation.
#[derive(Debug, Clone, Copy, Default)]
struct Owner {
    context: u32,
    /// The handle of the memory pool of the allocation; 0 for `cuMemAlloc`.
    mempool: usize,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    start: u32,
    pages: u32,
    entry: u32,
}

/// A new allocation.
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    /// The device address.
    pub address: u64,
    entry: u32,
    generation: u32,
}

/// An allocation that is going to be freed. Dropping this frees it.
#[derive(Debug)]
#[must_use]
pub struct Freeing {
    pool: &'static Pool,
    block: Block,
    generation: u32,
}

/// Returns the pages that an allocation takes: from a huge page on, whole huge pages.
fn pages_of(size: u64) -> u64 {
    let pages = size.div_ceil(PAGE);
    let huge = u64::from(PAGES_PER_HUGE);
    if pages >= huge {
        pages.next_multiple_of(huge)
    } else {
        pages
    }
}

fn zeroed(len: usize) -> Box<[AtomicU32]> {
    // The allocator takes large zeroed memory untouched from the kernel: most of a map is never used.
    let zeros = Box::into_raw(vec![0_u32; len].into_boxed_slice());
    // SAFETY: AtomicU32 has the size, alignment and values of u32, and the box has no other owner.
    unsafe { Box::from_raw(zeros as *mut [AtomicU32]) }
}

impl Allocator {
    fn usage_of(&self, mempool: usize) -> Usage {
        self.mempools.get(&mempool).copied().unwrap_or_default()
    }

    /// Counts memory that was allocated from a memory pool.
    fn took(&mut self, mempool: usize, size: u64) {
        if mempool != 0 {
            let usage = self.mempools.entry(mempool).or_default();
            usage.now += size;
            usage.most = usage.most.max(usage.now);
        }
    }

    /// Subtracts a freed allocation from its memory pool's usage.
    fn gave_back(&mut self, entry: u32, size: u64) {
        let mempool = self
            .owners
            .get(entry as usize)
            .map_or(0, |owner| owner.mempool);
        if let Some(usage) = self.mempools.get_mut(&mempool) {
            usage.now = usage.now.saturating_sub(size);
        }
    }

    /// Returns the pages that can be allocated, including the quarantine.
    fn available(&self) -> u64 {
        (self.space.free() + self.quarantined_pages).saturating_sub(self.charged_pages)
    }
}

impl Pool {
    pub(super) fn create(device: i32, window: u64, total: u64) -> Result<Self, CUresult> {
        Self::try_create(device, window, total).map_err(|error| {
            eprintln!("nccl-emulator: no memory for GPU {device}: {error}");
            CUresult::ERROR_OUT_OF_MEMORY
        })
    }

    fn try_create(device: i32, window: u64, total: u64) -> std::io::Result<Self> {
        let file = sealed_file(c"nccl-emulator:device-memory", HEAD + total)?;
        let mut token = [0_u8; 16];
        // SAFETY: the call writes at most the sixteen bytes of `token`.
        let got = unsafe { libc::getrandom(token.as_mut_ptr().cast(), token.len(), 0) };
        if got != 16 {
            return Err(std::io::Error::last_os_error());
        }
        let mapping = Mapping::create(&file, device, u128::from_ne_bytes(token), window, total)?;
        let pages = (total / PAGE) as u32;
        Ok(Self {
            device,
            window,
            file,
            mapping,
            huge_pages: zeroed((total / HUGE) as usize),
            pages: zeroed(pages as usize),
            total,
            allocator: Mutex::new(Allocator {
                space: Space::new(pages),
                quarantine: VecDeque::new(),
                quarantined_pages: 0,
                charged_pages: 0,
                resident_pages: 0,
                free_entries: VecDeque::new(),
                owners: Vec::new(),
                generation: 0,
                mempools: HashMap::new(),
            }),
        })
    }

    /// Returns the memfd behind the pool. A peer maps it with `import`.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the pool's token: random, unique for each process and device.
    pub fn token(&self) -> u128 {
        self.mapping.token()
    }

    /// Returns the pool as mapped in this process.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Returns the ordinal of the pool's device.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// Returns free and total bytes.
    pub fn usage(&self) -> (u64, u64) {
        (self.lock().available() * PAGE, self.total)
    }

    /// Counts memory outside the pool against the device's memory.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub(super) fn charge(&self, bytes: u64) -> Result<(), CUresult> {
        let pages = bytes.div_ceil(PAGE);
        let mut allocator = self.lock();
        if pages > allocator.available() {
            return Err(CUresult::ERROR_OUT_OF_MEMORY);
        }
        allocator.charged_pages += pages;
        Ok(())
    }

    /// Reverts a [`Pool::charge`].
    pub(super) fn discharge(&self, bytes: u64) {
        let mut allocator = self.lock();
        allocator.charged_pages = allocator.charged_pages.saturating_sub(bytes.div_ceil(PAGE));
    }

    fn lock(&self) -> MutexGuard<'_, Allocator> {
        self.allocator.lock()
    }

    /// Allocates memory for a context. `pending` memory becomes usable with [`Pool::reached`], when its
    /// stream gets there.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`, `CUDA_ERROR_INVALID_VALUE` for size 0.
    pub fn allocate(&self, size: u64, owner: u32, pending: bool) -> Result<Placement, CUresult> {
        self.allocate_from(size, owner, pending, NO_MEMPOOL)
    }

    /// Does what [`Pool::allocate`] does, from a memory pool.
    ///
    /// # Errors
    /// As [`Pool::allocate`]; `CUDA_ERROR_OUT_OF_MEMORY` beyond the limit.
    pub(super) fn allocate_from(
        &self,
        size: u64,
        owner: u32,
        pending: bool,
        source: Source,
    ) -> Result<Placement, CUresult> {
        if size == 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        if size > self.total {
            return Err(CUresult::ERROR_OUT_OF_MEMORY);
        }
        let pages = pages_of(size) as u32;
        let align = if pages >= PAGES_PER_HUGE {
            PAGES_PER_HUGE
        } else {
            1
        };
        let mut allocator = self.lock();
        let used = allocator.usage_of(source.mempool).now;
        let too_much = used.checked_add(size).is_none_or(|all| all > source.limit);
        if u64::from(pages) > allocator.available() || too_much {
            return Err(CUresult::ERROR_OUT_OF_MEMORY);
        }
        let start = loop {
            if let Some(start) = allocator.space.take(pages, align) {
                break start;
            }
            // Rather use quarantined memory than refuse.
            if !self.release_oldest(&mut allocator) {
                return Err(CUresult::ERROR_OUT_OF_MEMORY);
            }
        };
        allocator.resident_pages = allocator.resident_pages.saturating_sub(u64::from(pages));
        let Some(entry) = self.take_entry(&mut allocator) else {
            allocator.space.give(start, pages);
            eprintln!(
                "nccl-emulator: GPU {} has no room for more than {ENTRIES} allocations",
                self.device
            );
            return Err(CUresult::ERROR_OUT_OF_MEMORY);
        };
        allocator.owners[entry as usize] = Owner {
            context: owner,
            mempool: source.mempool,
        };
        allocator.took(source.mempool, size);
        allocator.generation = allocator.generation.wrapping_add(1);
        let generation = allocator.generation;
        let offset = u64::from(start) * PAGE;
        if let Some(slot) = self.mapping.entry(entry) {
            let state = if pending { State::Pending } else { State::Live };
            slot.open(generation, state, offset, size);
        }
        drop(allocator);
        self.note(start, pages, entry);
        if pages < PAGES_PER_HUGE {
            // SAFETY: the pages were just taken, so no other allocation has them; they lie inside the
            // data.
            unsafe {
                self.mapping
                    .data()
                    .add(offset as usize)
                    .write_bytes(GARBAGE, size.min(PAGE) as usize)
            };
        }
        Ok(Placement {
            address: self.window + offset,
            entry,
            generation,
        })
    }

    fn take_entry(&self, allocator: &mut Allocator) -> Option<u32> {
        // Unused entries first, so that an old entry keeps the record of its allocation for long.
        if allocator.free_entries.len() < QUARANTINE_BLOCKS
            && allocator.owners.len() < ENTRIES as usize
        {
            allocator.owners.push(Owner::default());
            return Some(allocator.owners.len() as u32 - 1);
        }
        loop {
            if let Some(entry) = allocator.free_entries.pop_front() {
                return Some(entry);
            }
            if !self.release_oldest(allocator) {
                return None;
            }
        }
    }

    /// Enters the new allocation into the page maps.
    fn note(&self, start: u32, pages: u32, entry: u32) {
        let huge = |page: u32| (page / PAGES_PER_HUGE) as usize;
        if pages >= PAGES_PER_HUGE {
            for slot in &self.huge_pages[huge(start)..huge(start + pages)] {
                slot.store(entry + 1, Ordering::Release);
            }
        } else {
            for slot in &self.pages[start as usize..(start + pages) as usize] {
                slot.store(entry + 1, Ordering::Release);
            }
            for slot in &self.huge_pages[huge(start)..=huge(start + pages - 1)] {
                if slot.load(Ordering::Relaxed) != 0 {
                    slot.store(0, Ordering::Release);
                }
            }
        }
    }

    /// Makes a pending allocation usable: its stream has reached it.
    pub fn reached(&self, placement: Placement) {
        if let Some(entry) = self.mapping.entry(placement.entry) {
            entry.advance(placement.generation, &[State::Pending], State::Live);
        }
    }

    /// Returns the entry of the allocation that an offset belongs to, or last belonged to.
    fn find(&self, offset: u64) -> Option<(u32, Snapshot)> {
        let covers = |slot: u32| {
            let index = slot.checked_sub(1)?;
            let now = self.mapping.entry(index)?.snapshot();
            let end = now.offset + pages_of(now.size) * PAGE;
            (now.state != State::Never && now.offset <= offset && offset < end)
                .then_some((index, now))
        };
        let huge = self
            .huge_pages
            .get((offset / HUGE) as usize)?
            .load(Ordering::Acquire);
        covers(huge).or_else(|| {
            covers(
                self.pages
                    .get((offset / PAGE) as usize)?
                    .load(Ordering::Acquire),
            )
        })
    }

    /// Returns the range as a span of its allocation.
    ///
    /// # Errors
    /// The range lies in no allocation or a freed one, or reaches beyond the end of its allocation.
    pub(super) fn span(&self, offset: u64, len: u64) -> Result<Span, Violation> {
        let found = self.find(offset);
        if let Some((index, now)) = found {
            let from = offset - now.offset;
            if now.state != State::Freed && len <= now.size && from <= now.size - len {
                return Ok(Span {
                    index,
                    generation: now.generation,
                    offset,
                    len,
                });
            }
        }
        if len == 0 {
            return Ok(Span {
                index: 0,
                generation: 0,
                offset,
                len: 0,
            });
        }
        Err(match found {
            Some((_, now)) => self.mapping.violation(&now, offset, len),
            None => self.nowhere(offset, len),
        })
    }

    #[cold]
    fn nowhere(&self, offset: u64, len: u64) -> Violation {
        let text = format!(
            "{len} bytes at 0x{:x} are in no allocation of GPU {}",
            self.window + offset,
            self.device
        );
        Violation::new(ViolationKind::UnknownAddress, Some(self.device), text)
    }

    /// Returns start and size of the allocation that an offset of this pool lies in.
    pub fn range(&self, offset: u64) -> Option<(u64, u64)> {
        let (_, now) = self.find(offset)?;
        (now.state != State::Freed && offset < now.offset + now.size)
            .then_some((self.window + now.offset, now.size))
    }

    /// Returns the bytes that are allocated from a memory pool: now, and the peak.
    pub(super) fn usage_of(&self, mempool: usize) -> (u64, u64) {
        let usage = self.lock().usage_of(mempool);
        (usage.now, usage.most)
    }

    /// Resets the peak usage of a memory pool to its present usage.
    pub(super) fn reset_peak_of(&self, mempool: usize) {
        if let Some(usage) = self.lock().mempools.get_mut(&mempool) {
            usage.most = usage.now;
        }
    }

    /// Returns the memory pool of an allocation, if it is not of `cuMemAlloc`.
    pub(super) fn mempool_of(&self, span: &Span) -> Option<usize> {
        let allocator = self.lock();
        let owner = allocator.owners.get(span.index as usize)?;
        (owner.mempool != 0).then_some(owner.mempool)
    }

    /// Returns the live allocation that an offset of this pool lies in.
    pub(super) fn allocation_at(&self, offset: u64) -> Option<Found> {
        let (index, now) = self.find(offset)?;
        if now.state == State::Freed || offset >= now.offset + now.size {
            return None;
        }
        let owners = &self.lock().owners;
        let mempool = owners.get(index as usize).map_or(0, |owner| owner.mempool);
        Some(Found {
            device: self.device,
            start: self.window + now.offset,
            size: now.size,
            id: (self.device as u64 + 1) << 32 | u64::from(now.generation),
            ipc: mempool == 0,
            mempool,
        })
    }

    pub(super) fn begin_free(&'static self, offset: u64) -> Result<Freeing, Violation> {
        let Some((entry, now)) = self.find(offset) else {
            let mut violation = self.nowhere(offset, 1);
            violation = violation.during("free");
            return Err(violation);
        };
        if now.offset != offset {
            let text = format!(
                "free of 0x{:x}, which is {} bytes inside allocation #{} of GPU {}",
                self.window + offset,
                offset - now.offset,
                now.generation,
                self.device
            );
            return Err(Violation::new(
                ViolationKind::InvalidFree,
                Some(self.device),
                text,
            ));
        }
        let from = [State::Pending, State::Live];
        let freed_first = self
            .mapping
            .entry(entry)
            .is_some_and(|e| e.advance(now.generation, &from, State::Freeing));
        if !freed_first {
            let text = format!(
                "allocation #{} ({} bytes at 0x{:x} on GPU {}) is freed twice",
                now.generation,
                now.size,
                self.window + now.offset,
                self.device
            );
            return Err(Violation::new(
                ViolationKind::InvalidFree,
                Some(self.device),
                text,
            ));
        }
        let block = Block {
            start: (offset / PAGE) as u32,
            pages: pages_of(now.size) as u32,
            entry,
        };
        Ok(Freeing {
            pool: self,
            block,
            generation: now.generation,
        })
    }

    /// Quarantines a freed block, and releases the oldest blocks beyond the limits.
    fn keep_aside(&self, allocator: &mut Allocator, block: Block) {
        allocator.quarantine.push_back(block);
        allocator.quarantined_pages += u64::from(block.pages);
        let limit = QUARANTINE_BYTES.min(self.total / 8) / PAGE;
        while allocator.quarantine.len() > QUARANTINE_BLOCKS
            || allocator.quarantined_pages > limit && allocator.quarantine.len() > 1
        {
            if !self.release_oldest(allocator) {
                break;
            }
        }
    }

    /// Releases the oldest quarantined block that no other process has open. Returns false if there is none.
    fn release_oldest(&self, allocator: &mut Allocator) -> bool {
        let closed = |block: &Block| {
            let entry = self.mapping.entry(block.entry);
            entry.is_none_or(|entry| !entry.is_open())
        };
        let oldest = allocator.quarantine.iter().position(closed);
        let Some(block) = oldest.and_then(|at| allocator.quarantine.remove(at)) else {
            return false;
        };
        let pages = u64::from(block.pages);
        allocator.quarantined_pages -= pages;
        allocator.resident_pages += pages;
        if block.pages >= PAGES_PER_HUGE && allocator.resident_pages > RESIDENT_BYTES / PAGE {
            punch(self.fd(), u64::from(block.start) * PAGE, pages * PAGE);
            allocator.resident_pages -= pages;
        }
        allocator.space.give(block.start, block.pages);
        allocator.free_entries.push_back(block.entry);
        true
    }

    pub(super) fn free_all_of(&self, owner: u32) {
        let mut allocator = self.lock();
        for entry in 0..allocator.owners.len() {
            if allocator.owners[entry].context != owner {
                continue;
            }
            let entry = entry as u32;
            let Some(slot) = self.mapping.entry(entry) else {
                continue;
            };
            let now = slot.snapshot();
            // The job of a `Freeing` allocation finishes the free; that job was dropped or is about
            // to be.
            if slot.advance(now.generation, &[State::Pending, State::Live], State::Freed) {
                let block = Block {
                    start: (now.offset / PAGE) as u32,
                    pages: pages_of(now.size) as u32,
                    entry,
                };
                allocator.gave_back(entry, now.size);
                self.keep_aside(&mut allocator, block);
            }
        }
    }
}

impl Freeing {
    /// Returns the ordinal of the memory's device.
    pub fn device(&self) -> i32 {
        self.pool.device
    }

    /// Frees the memory.
    pub fn finish(self) {
        // Drop does it.
    }
}

impl Drop for Freeing {
    /// Frees the memory, also when the job for that is dropped before it runs.
    fn drop(&mut self) {
        let mut allocator = self.pool.lock();
        let slot = self.pool.mapping.entry(self.block.entry);
        if slot.is_some_and(|slot| slot.advance(self.generation, &[State::Freeing], State::Freed)) {
            let size = slot.map_or(0, |slot| slot.snapshot().size);
            allocator.gave_back(self.block.entry, size);
            self.pool.keep_aside(&mut allocator, self.block);
        }
    }
}

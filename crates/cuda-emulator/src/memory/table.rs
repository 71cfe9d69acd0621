//! The head of a pool's memfd: its owner and its table of allocations, readable by every process
//! that maps it.
//!
//! The process that owns the pool is the only writer, except for `opened`, and writes under its
//! allocator's lock. Readers are in any process and take no lock. An entry's `tag` joins the number of
//! the allocation and its state. The owner sets the tag to `Never` with the new number, writes the
//! other fields, then stores the final tag. A reader loads the tag, the fields, and the tag again: the
//! same tag twice means that the fields belong to it, since numbers are not used again within 2^32
//! allocations of one device.
//!
//! ```text
//! Never ─┬─allocate──────────────▶ Live ──free──▶ Freed ──allocate (next number)──▶ …
//!        └─allocate on a stream──▶ Pending ─reached─▶ Live ─free on a stream─▶ Freeing ─reached─▶ Freed
//! ```

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// "ncclEmuP".
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"ncclEmuP");
/// The version of the layout below.
pub(super) const LAYOUT: u32 = 2;
/// The most live and remembered allocations of one pool.
pub(super) const ENTRIES: u32 = 65_535;
/// Bytes before the pool's data: header and table, a multiple of a huge page.
pub(super) const HEAD: u64 = (size_of::<Head>() as u64).next_multiple_of(2 << 20);

/// The first bytes of the memfd.
#[repr(C, align(64))]
pub(super) struct Head {
    pub(super) magic: u64,
    pub(super) layout: u32,
    /// The process that owns the pool, and the pool's device there, for messages.
    pub(super) pid: u32,
    pub(super) device: i32,
    pub(super) token: [u64; 2],
    /// The length of the data, which begins at [`HEAD`].
    pub(super) data_len: u64,
    pub(super) entries: [Entry; ENTRIES as usize],
}

/// One allocation.
#[repr(C, align(64))]
pub(super) struct Entry {
    tag: AtomicU64,
    /// The offset from the start of the data, and the requested size in bytes.
    offset: AtomicU64,
    size: AtomicU64,
    /// Milliseconds of the monotonic clock.
    allocated_at: AtomicU32,
    freed_at: AtomicU32,
    /// How often other processes have the allocation open; they write this. The owner does not reuse the pages
    /// before all have closed it.
    opened: AtomicU32,
}

/// The state of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum State {
    Never = 0,
    /// The stream has not reached the allocation.
    Pending = 1,
    Live = 2,
    /// The stream has not reached the free: still usable.
    Freeing = 3,
    Freed = 4,
}

impl State {
    fn from_tag(tag: u64) -> Self {
        match tag as u32 {
            1 => Self::Pending,
            2 => Self::Live,
            3 => Self::Freeing,
            4 => Self::Freed,
            _ => Self::Never,
        }
    }

    /// Whether work that runs now may use the memory.
    pub(super) fn usable(self) -> bool {
        matches!(self, Self::Live | Self::Freeing)
    }
}

/// An entry as it was at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Snapshot {
    /// The allocation's number.
    pub(super) generation: u32,
    pub(super) state: State,
    pub(super) offset: u64,
    pub(super) size: u64,
    pub(super) allocated_at: u32,
    pub(super) freed_at: u32,
}

fn tag(generation: u32, state: State) -> u64 {
    u64::from(generation) << 32 | u64::from(state as u32)
}

/// Returns the milliseconds of the monotonic clock, coarse and cheap; the same in every process of the host.
pub(super) fn now_ms() -> u32 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a timespec to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    (now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000) as u32
}

impl Entry {
    /// Returns the present contents. Numbers are 0 and the state is `Never` if the entry was never used.
    pub(super) fn snapshot(&self) -> Snapshot {
        loop {
            let before = self.tag.load(Ordering::Acquire);
            let snapshot = Snapshot {
                generation: (before >> 32) as u32,
                state: State::from_tag(before),
                offset: self.offset.load(Ordering::Relaxed),
                size: self.size.load(Ordering::Relaxed),
                allocated_at: self.allocated_at.load(Ordering::Relaxed),
                freed_at: self.freed_at.load(Ordering::Relaxed),
            };
            fence(Ordering::Acquire);
            if self.tag.load(Ordering::Relaxed) == before {
                return snapshot;
            }
        }
    }

    /// Returns the state of allocation `generation`; `Freed` once the entry belongs to a later allocation.
    pub(super) fn state_of(&self, generation: u32) -> State {
        let tag = self.tag.load(Ordering::Acquire);
        if (tag >> 32) as u32 == generation {
            State::from_tag(tag)
        } else {
            State::Freed
        }
    }

    /// Enters a new allocation into a free entry. Only under the owner's lock.
    pub(super) fn open(&self, generation: u32, state: State, offset: u64, size: u64) {
        // A reader that still sees the old tag sees `Freed` with it, and reads the tag again after
        // the fields.
        self.tag
            .store(tag(generation, State::Never), Ordering::Relaxed);
        fence(Ordering::Release);
        self.offset.store(offset, Ordering::Relaxed);
        self.size.store(size, Ordering::Relaxed);
        self.allocated_at.store(now_ms(), Ordering::Relaxed);
        self.tag.store(tag(generation, state), Ordering::Release);
    }

    /// Counts an open by another process, which afterwards checks that the allocation was still live.
    pub(super) fn opened(&self) {
        self.opened.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts a close by another process.
    pub(super) fn closed(&self) {
        self.opened.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether another process has the allocation open.
    pub(super) fn is_open(&self) -> bool {
        self.opened.load(Ordering::SeqCst) > 0
    }

    /// Moves allocation `generation` from a state in `from` to `to`. Returns false if it is in none of them.
    pub(super) fn advance(&self, generation: u32, from: &[State], to: State) -> bool {
        let mut current = self.tag.load(Ordering::Acquire);
        loop {
            if (current >> 32) as u32 != generation || !from.contains(&State::from_tag(current)) {
                return false;
            }
            if to == State::Freed {
                self.freed_at.store(now_ms(), Ordering::Relaxed);
            }
            match self.tag.compare_exchange_weak(
                current,
                tag(generation, to),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return true,
                Err(now) => current = now,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        // SAFETY: an entry is atomics, for which zero is a value.
        unsafe { std::mem::zeroed() }
    }

    #[test]
    fn an_entry_knows_only_its_latest_allocation() {
        let entry = entry();
        assert_eq!(entry.snapshot().state, State::Never);
        entry.open(1, State::Live, 4096, 100);
        assert_eq!(entry.state_of(1), State::Live);
        assert!(entry.advance(1, &[State::Live], State::Freed));
        assert!(
            !entry.advance(1, &[State::Live], State::Freed),
            "freed once"
        );
        entry.open(9, State::Pending, 8192, 200);
        assert_eq!(entry.state_of(1), State::Freed);
        let snapshot = entry.snapshot();
        assert_eq!((snapshot.generation, snapshot.state), (9, State::Pending));
        assert_eq!((snapshot.offset, snapshot.size), (8192, 200));
    }

    #[test]
    fn the_head_keeps_the_data_aligned_to_huge_pages() {
        assert_eq!(HEAD % (2 << 20), 0);
        assert_eq!(size_of::<Entry>(), 64);
    }
}

//! The layout of a communicator's segment, and access to its parts.
//!
//! Made by the bootstrap's root, mapped by every rank. Every field that changes after the root has
//! handed the segment out is an atomic; each says who writes it. [`RankInfo`] is written by the
//! root before anyone else maps the segment.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use super::exchange::{Exchange, Side, SpanCell};
use super::rendezvous::{Collective, OfferCell};
use super::shared_memory::{self, SharedMemory};
use cuda_emulator::exec::Bell;
use cuda_emulator::memory::Span;

const MAGIC: u64 = u64::from_le_bytes(*b"ncclemu2");

/// Bits of [`RankBlock::teardown`].
pub(crate) mod teardown {
    /// The rank is in finalize or destroy, and waits for the others to be.
    pub(crate) const LEAVING: u32 = 1;
    /// The rank has aborted or freed its communicator, and never comes back.
    pub(crate) const GONE: u32 = 2;
}

/// Signals from one rank to another that can be told apart.
pub(crate) const SIGNALS: usize = 64;

/// The start of the segment.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Header {
    magic: u64,
    ranks: u64,
    /// Ranks that have mapped everything. Each adds itself once; the init is over when all have.
    pub(crate) ready: AtomicU32,
    /// Executors that spin just now. Any rank.
    pub(crate) spinners: Padded<AtomicU32>,
    /// Arrivals of ranks at the host's barriers, since the beginning. Each rank adds itself once for each.
    pub(crate) barrier: AtomicU64,
    /// The collective in flight.
    pub(crate) collective: Padded<Collective>,
}

/// Keeps a hot field on cache lines of its own.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

/// What the others know of a rank, and how they reach it.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct RankBlock {
    /// Where this rank sleeps. Rung by whoever completes what it waits for.
    pub(crate) bell: Bell,
    /// Messages of this rank that a peer completed, since the beginning. Peers add.
    pub(crate) delivered: AtomicU64,
    /// The value of `delivered` at which the rank wants its bell rung. Written by the rank.
    pub(crate) wake_at: AtomicU64,
    /// Counts what a peer found wrong with a message or a collective of this rank. Peers add, and
    /// ring.
    pub(crate) attention: AtomicU32,
    /// Bits of [`teardown`]. Written by the rank.
    pub(crate) teardown: AtomicU32,
    /// Bits of the algorithms for which the rank has set up its connections. Written by the rank.
    pub(crate) algorithms: AtomicU32,
    /// What the rank says to the splits of the communicator: of two that follow each other, one each.
    /// Written by the rank.
    splits: [SplitCell; 2],
    /// The same for windows.
    windows: [WindowCell; 2],
    /// The grow that a coordinator has announced to this rank; 0 for none. Taken by the rank.
    pub(crate) grow: AtomicU64,
    /// What this rank brings to the collective in flight. Written by the rank before it arrives.
    pub(crate) offer: OfferCell,
    info: RankInfo,
}

/// What a rank says to one split. A split is over for nobody before all have said it, so when a rank
/// writes to a cell again, everybody has read it.
#[derive(Debug, Default)]
#[repr(C)]
struct SplitCell {
    number: AtomicU64,
    color: AtomicI32,
    key: AtomicI32,
}

/// What a rank says to the registration of one window, as [`SplitCell`].
#[derive(Debug, Default)]
#[repr(C)]
struct WindowCell {
    number: AtomicU64,
    span: SpanCell,
}

/// Who a rank is. Written by the root.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RankInfo {
    /// Process, as its own namespace numbers it.
    pub(crate) pid: u32,
    /// The ordinal of its device.
    pub(crate) device: i32,
    /// `NCCL_VERSION_CODE` of the library that it believes to be.
    pub(crate) version: i32,
    /// Which of the descriptors that the root hands out is its pool.
    pub(crate) pool: u32,
    /// When the process started, in clock ticks since boot; tells it from a later one of the same
    /// number.
    pub(crate) started: u64,
    /// The PID namespace in which `pid` means something.
    pub(crate) pid_namespace: u64,
    /// The same for all ranks of a host (`NCCL_HOSTID` changes it).
    pub(crate) host_hash: u64,
    /// Random, the same for all ranks of a process.
    pub(crate) process: u64,
    /// The device's PCI bus.
    pub(crate) bus_id: i64,
    /// Random, unique for each pool; the two halves of its token.
    pub(crate) pool_token: [u64; 2],
    /// The physical device: two ranks with the same one share a GPU.
    pub(crate) uuid: [u8; 16],
}

/// A communicator's segment, mapped here.
#[derive(Debug)]
pub(crate) struct Segment {
    memory: Arc<SharedMemory>,
    ranks: usize,
}

fn round_up(bytes: usize) -> usize {
    bytes.next_multiple_of(128)
}

impl Segment {
    fn sides_at(ranks: usize) -> usize {
        round_up(size_of::<Header>()) + ranks * size_of::<RankBlock>()
    }

    fn exchanges_at(ranks: usize) -> usize {
        Self::sides_at(ranks) + round_up(ranks * ranks * size_of::<Side>())
    }

    fn signals_at(ranks: usize) -> usize {
        Self::exchanges_at(ranks) + round_up(2 * ranks * ranks * size_of::<Exchange>())
    }

    fn size(ranks: usize) -> usize {
        Self::signals_at(ranks) + ranks * ranks * SIGNALS * size_of::<AtomicU64>()
    }

    /// Makes the segment of a communicator. Untouched parts of it cost no memory.
    pub(crate) fn create(infos: &[RankInfo]) -> io::Result<(Self, OwnedFd)> {
        let ranks = infos.len();
        let fd = shared_memory::create(c"nccl-emulator:communicator", Self::size(ranks))?;
        let memory = SharedMemory::map(fd.as_fd())?;
        let header = memory.base().cast::<Header>();
        // SAFETY: the mapping is large enough and zeroed, and no other process has the descriptor
        // yet; all-zero is a valid value of everything in it.
        unsafe {
            (*header).magic = MAGIC;
            (*header).ranks = ranks as u64;
        }
        let segment = Self { memory, ranks };
        for (rank, info) in infos.iter().enumerate() {
            let block = std::ptr::from_ref(segment.block(rank)).cast_mut();
            // SAFETY: as above.
            unsafe { (&raw mut (*block).info).write(*info) };
        }
        Ok((segment, fd))
    }

    /// Maps the segment that the root made for `ranks` ranks.
    pub(crate) fn open(fd: BorrowedFd<'_>, ranks: usize) -> io::Result<Self> {
        let memory = SharedMemory::map(fd)?;
        if memory.len() != Self::size(ranks) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the segment has the wrong size",
            ));
        }
        let segment = Self { memory, ranks };
        let header = segment.header();
        if header.magic != MAGIC || header.ranks != ranks as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not a segment of this version",
            ));
        }
        Ok(segment)
    }

    /// Number of ranks.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    /// The start of the segment.
    pub(crate) fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a header, is aligned to a page and lives as long as
        // `self`.
        unsafe { &*self.memory.base().cast::<Header>() }
    }

    /// What the others know of `rank`.
    pub(crate) fn block(&self, rank: usize) -> &RankBlock {
        assert!(rank < self.ranks);
        let at = round_up(size_of::<Header>()) + rank * size_of::<RankBlock>();
        // SAFETY: in bounds (asserted) and aligned: the header's size and the block's are multiples
        // of 128.
        unsafe { &*self.memory.base().add(at).cast::<RankBlock>() }
    }

    /// What `owner` has posted for `peer`.
    pub(crate) fn side(&self, owner: usize, peer: usize) -> &Side {
        assert!(owner < self.ranks && peer < self.ranks);
        let at = Self::sides_at(self.ranks) + (owner * self.ranks + peer) * size_of::<Side>();
        // SAFETY: in bounds (asserted) and aligned: everything before has a size that is a multiple
        // of 64.
        unsafe { &*self.memory.base().add(at).cast::<Side>() }
    }

    /// The message in flight from `source` to `destination`.
    pub(crate) fn exchange(&self, source: usize, destination: usize) -> &Exchange {
        assert!(source < self.ranks && destination < self.ranks);
        // Both of a pair are on one cache line: the rank that comes second claims both of an all-to-all.
        let (low, high) = (source.min(destination), source.max(destination));
        let index = 2 * (low * self.ranks + high) + usize::from(source > destination);
        let at = Self::exchanges_at(self.ranks) + index * size_of::<Exchange>();
        // SAFETY: as above.
        unsafe { &*self.memory.base().add(at).cast::<Exchange>() }
    }

    /// Who `rank` is.
    pub(crate) fn info(&self, rank: usize) -> RankInfo {
        // SAFETY: the block is in bounds; the root wrote the info before this process mapped the
        // segment. Volatile, because only good manners keep another process from writing to it.
        unsafe { (&raw const self.block(rank).info).read_volatile() }
    }

    /// Says what `rank` brings to split `number` (counted from 1), and tells everybody.
    pub(crate) fn say_split(&self, rank: usize, number: u64, color: i32, key: i32) {
        let cell = &self.block(rank).splits[number as usize % 2];
        cell.color.store(color, Ordering::Relaxed);
        cell.key.store(key, Ordering::Relaxed);
        cell.number.store(number, Ordering::SeqCst);
        self.ring_others(rank);
    }

    /// The color and the key that `rank` brings to split `number`, once it has said so.
    pub(crate) fn split(&self, rank: usize, number: u64) -> Option<(i32, i32)> {
        let cell = &self.block(rank).splits[number as usize % 2];
        (cell.number.load(Ordering::SeqCst) == number).then(|| {
            (
                cell.color.load(Ordering::Relaxed),
                cell.key.load(Ordering::Relaxed),
            )
        })
    }

    /// Says where the part of `rank` of window `number` (counted from 1) is, and tells everybody.
    pub(crate) fn say_window(&self, rank: usize, number: u64, part: &Span) {
        let cell = &self.block(rank).windows[number as usize % 2];
        cell.span.store(part);
        cell.number.store(number, Ordering::SeqCst);
        self.ring_others(rank);
    }

    /// Where the part of `rank` of window `number` is, once it has said so.
    pub(crate) fn window(&self, rank: usize, number: u64) -> Option<Span> {
        let cell = &self.block(rank).windows[number as usize % 2];
        (cell.number.load(Ordering::SeqCst) == number).then(|| cell.span.load())
    }

    /// How often `source` has signalled `destination`, since the beginning. The source adds.
    pub(crate) fn signals(&self, source: usize, destination: usize, signal: usize) -> &AtomicU64 {
        assert!(source < self.ranks && destination < self.ranks && signal < SIGNALS);
        let index = (source * self.ranks + destination) * SIGNALS + signal;
        let at = Self::signals_at(self.ranks) + index * size_of::<AtomicU64>();
        // SAFETY: in bounds (asserted) and aligned: everything before has a size that is a multiple
        // of 64.
        unsafe { &*self.memory.base().add(at).cast::<AtomicU64>() }
    }

    /// Signals `destination`, which sees what `source` has written to its memory before.
    pub(crate) fn signal(&self, source: usize, destination: usize, signal: usize) {
        self.signals(source, destination, signal)
            .fetch_add(1, Ordering::SeqCst);
        self.block(destination).bell.ring();
    }

    /// Rings the bells of all ranks but `but`.
    pub(crate) fn ring_others(&self, but: usize) {
        for rank in (0..self.ranks).filter(|&rank| rank != but) {
            self.block(rank).bell.ring();
        }
    }

    /// Tells `rank` that something is wrong with what it posted.
    pub(crate) fn call_attention(&self, rank: usize) {
        let block = self.block(rank);
        block.attention.fetch_add(1, Ordering::SeqCst);
        block.bell.ring();
    }

    /// Tells `rank` that `messages` of its messages were completed for it.
    pub(crate) fn deliver(&self, rank: usize, messages: u64) {
        let block = self.block(rank);
        let now = block.delivered.fetch_add(messages, Ordering::SeqCst) + messages;
        // Either this load sees what the rank stored before it looked at `delivered` for the last
        // time, or that look saw the addition above.
        if now >= block.wake_at.load(Ordering::SeqCst) {
            block.bell.ring();
        }
    }
}

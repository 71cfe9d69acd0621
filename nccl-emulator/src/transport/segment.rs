//! The layout of a communicator's segment, and access to its parts.
//!
//! The bootstrap's root makes the segment, and every rank maps it. Every field that changes after
//! that is an atomic, and its documentation names its writers. The root writes [`RankInfo`] before
//! any rank maps the segment.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use super::exchange::{Exchange, Side, SpanCell};
use super::put_log::PutLog;
use super::rendezvous::{Collective, OfferCell};
use super::shared_memory::{self, SharedMemory};
use cuda_emulator::exec::Bell;
use cuda_emulator::memory::Span;

const MAGIC: u64 = u64::from_le_bytes(*b"ncclemu5");

/// Bits of [`RankBlock::teardown`].
pub(crate) mod teardown {
    /// The rank is in finalize or destroy, and waits for the others to get there.
    pub(crate) const LEAVING: u32 = 1;
    /// The rank has aborted or freed its communicator, for good.
    pub(crate) const GONE: u32 = 2;
}

/// Values of [`RankBlock::busy`].
pub(crate) mod busy {
    /// Nobody's.
    pub(crate) const IDLE: u32 = 0;
    /// That of all ranks.
    pub(crate) const ALL: u32 = u32::MAX;

    /// That of this rank.
    pub(crate) fn with(rank: usize) -> u32 {
        rank as u32 + 1
    }
}

/// The number of distinct signals from one rank to another.
pub(crate) const SIGNALS: usize = 64;

/// The start of the segment.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Header {
    magic: u64,
    ranks: u64,
    /// Ranks that have mapped the segment and all pools. Each adds itself once, after it has set its [`RankBlock::ready`];
    /// the last one rings.
    pub(crate) ready: AtomicU32,
    /// Executors that spin now. Written by any rank.
    pub(crate) spinners: Padded<AtomicU32>,
    /// Arrivals of ranks at host-side barriers, since the beginning. Each rank adds itself once for each
    /// barrier, after it has set its [`RankBlock::barriers`]; the last one rings.
    pub(crate) barrier: AtomicU64,
    /// The collective in flight.
    pub(crate) collective: Padded<Collective>,
}

/// Keeps a hot field on cache lines of its own.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

/// The published state of a rank.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct RankBlock {
    /// The bell that this rank sleeps on. A rank that completes what this rank waits for rings it.
    pub(crate) bell: Bell,
    /// Messages of this rank that a peer completed, since the beginning. Written by peers.
    pub(crate) delivered: AtomicU64,
    /// The value of `delivered` at which the rank wants its bell rung. Written by the rank.
    pub(crate) wake_at: AtomicU64,
    /// Faults that peers found in messages and collectives of this rank. Written by peers, which
    /// also ring.
    pub(crate) attention: AtomicU32,
    /// Bits of [`teardown`]. Written by the rank.
    pub(crate) teardown: AtomicU32,
    /// 1 once the rank has mapped the segment and all pools. Written by the rank.
    pub(crate) ready: AtomicU32,
    /// The number of host-side barriers that the rank has reached. Written by the rank.
    pub(crate) barriers: AtomicU64,
    /// Bits of the algorithms for which the rank has set up its connections. Written by the rank.
    pub(crate) algorithms: AtomicU32,
    /// The rank's arguments for splits of the communicator, alternating between the cells. Written by
    /// the rank.
    splits: [SplitCell; 2],
    /// The same for windows.
    windows: [WindowCell; 2],
    /// The grow that a coordinator has announced to this rank; 0 for none. Cleared by the rank.
    pub(crate) grow: AtomicU64,
    /// The number of the last collective that the rank has arrived at. Written by the rank before it arrives.
    pub(crate) collective: AtomicU64,
    /// Whose memory the rank reads and writes now: [`busy`]. Written by the rank, for each chunk and block, so that
    /// a cache line of its own keeps that cheap; read by a rank that gives up its operations.
    pub(crate) busy: Padded<AtomicU32>,
    /// This rank's offer for the collective in flight. Written by the rank before it arrives.
    pub(crate) offer: OfferCell,
    info: RankInfo,
}

/// A rank's arguments for one split. No rank leaves a split before all ranks have written their
/// arguments, so all have read a cell before its rank writes to it again.
#[derive(Debug, Default)]
#[repr(C)]
struct SplitCell {
    number: AtomicU64,
    color: AtomicI32,
    key: AtomicI32,
}

/// A rank's part of one window under registration, used like [`SplitCell`].
#[derive(Debug, Default)]
#[repr(C)]
struct WindowCell {
    number: AtomicU64,
    span: SpanCell,
}

/// The identity of a rank. Written by the root.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RankInfo {
    /// The process id in its own PID namespace.
    pub(crate) pid: u32,
    /// The ordinal of the rank's device.
    pub(crate) device: i32,
    /// The `NCCL_VERSION_CODE` of the release that the rank emulates.
    pub(crate) version: i32,
    /// The index of the rank's pool among the descriptors that the root hands out.
    pub(crate) pool: u32,
    /// The start of the process, in clock ticks since boot; it tells the process from a later one with
    /// the same id.
    pub(crate) started: u64,
    /// The PID namespace of `pid`.
    pub(crate) pid_namespace: u64,
    /// A hash that is the same for all ranks of a host (`NCCL_HOSTID` changes it).
    pub(crate) host_hash: u64,
    /// A random number that is the same for all ranks of a process.
    pub(crate) process: u64,
    /// The device's PCI bus.
    pub(crate) bus_id: i64,
    /// The two halves of the pool's token, which is random and unique.
    pub(crate) pool_token: [u64; 2],
    /// The physical device: two ranks with the same one share a GPU.
    pub(crate) uuid: [u8; 16],
    /// The address of the RAS thread of the rank's process.
    pub(crate) ras_address: u32,
    /// Its ports: of datagrams, and of queries. Zero without a thread.
    pub(crate) ras_ports: [u16; 2],
}

/// A communicator's segment, mapped in this process.
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

    fn puts_at(ranks: usize) -> usize {
        Self::signals_at(ranks) + round_up(ranks * ranks * SIGNALS * size_of::<AtomicU64>())
    }

    fn size(ranks: usize) -> usize {
        Self::puts_at(ranks) + ranks * ranks * size_of::<PutLog>()
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

    /// Returns the number of ranks.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    /// The start of the segment.
    pub(crate) fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a header, is aligned to a page and lives as long as
        // `self`.
        unsafe { &*self.memory.base().cast::<Header>() }
    }

    /// Returns the published state of `rank`.
    pub(crate) fn block(&self, rank: usize) -> &RankBlock {
        assert!(rank < self.ranks);
        let at = round_up(size_of::<Header>()) + rank * size_of::<RankBlock>();
        // SAFETY: in bounds (asserted) and aligned: the header's size and the block's are multiples
        // of 128.
        unsafe { &*self.memory.base().add(at).cast::<RankBlock>() }
    }

    /// Notes whose memory `rank` uses from now on: [`busy`]. Before it takes a chunk or block, which the rank that gives
    /// up then sees together with this; and after.
    pub(crate) fn set_busy(&self, rank: usize, whose: u32) {
        self.block(rank).busy.0.store(whose, Ordering::Release);
    }

    /// Whether `other` reads or writes the memory of `rank` for a chunk or block that it took before `rank` gave it up.
    pub(crate) fn uses_memory_of(&self, other: usize, rank: usize) -> bool {
        let whose = self.block(other).busy.0.load(Ordering::Acquire);
        other != rank && (whose == busy::ALL || whose == busy::with(rank))
    }

    /// Returns the messages that `owner` has posted for `peer`.
    pub(crate) fn side(&self, owner: usize, peer: usize) -> &Side {
        assert!(owner < self.ranks && peer < self.ranks);
        let at = Self::sides_at(self.ranks) + (owner * self.ranks + peer) * size_of::<Side>();
        // SAFETY: in bounds (asserted) and aligned: everything before has a size that is a multiple
        // of 64.
        unsafe { &*self.memory.base().add(at).cast::<Side>() }
    }

    /// Returns the message in flight from `source` to `destination`.
    pub(crate) fn exchange(&self, source: usize, destination: usize) -> &Exchange {
        assert!(source < self.ranks && destination < self.ranks);
        // Both exchanges of a pair share a cache line: the second rank claims both in an all-to-all.
        let (low, high) = (source.min(destination), source.max(destination));
        let index = 2 * (low * self.ranks + high) + usize::from(source > destination);
        let at = Self::exchanges_at(self.ranks) + index * size_of::<Exchange>();
        // SAFETY: as above.
        unsafe { &*self.memory.base().add(at).cast::<Exchange>() }
    }

    /// Returns the identity of `rank`.
    pub(crate) fn info(&self, rank: usize) -> RankInfo {
        // SAFETY: the block is in bounds; the root wrote the info before this process mapped the
        // segment. Volatile, because nothing prevents another process from writing to it.
        unsafe { (&raw const self.block(rank).info).read_volatile() }
    }

    /// Publishes the arguments of `rank` for split `number` (counted from 1), and rings the other ranks.
    pub(crate) fn say_split(&self, rank: usize, number: u64, color: i32, key: i32) {
        let cell = &self.block(rank).splits[number as usize % 2];
        cell.color.store(color, Ordering::Relaxed);
        cell.key.store(key, Ordering::Relaxed);
        cell.number.store(number, Ordering::SeqCst);
        self.ring_others(rank);
    }

    /// Returns the color and the key of `rank` for split `number`, once published.
    pub(crate) fn split(&self, rank: usize, number: u64) -> Option<(i32, i32)> {
        let cell = &self.block(rank).splits[number as usize % 2];
        (cell.number.load(Ordering::SeqCst) == number).then(|| {
            (
                cell.color.load(Ordering::Relaxed),
                cell.key.load(Ordering::Relaxed),
            )
        })
    }

    /// Publishes the part of `rank` in window `number` (counted from 1), and rings the other ranks.
    pub(crate) fn say_window(&self, rank: usize, number: u64, part: &Span) {
        let cell = &self.block(rank).windows[number as usize % 2];
        cell.span.store(part);
        cell.number.store(number, Ordering::SeqCst);
        self.ring_others(rank);
    }

    /// Returns the part of `rank` in window `number`, once published.
    pub(crate) fn window(&self, rank: usize, number: u64) -> Option<Span> {
        let cell = &self.block(rank).windows[number as usize % 2];
        (cell.number.load(Ordering::SeqCst) == number).then(|| cell.span.load())
    }

    /// Returns the number of signals from `source` to `destination`, since the beginning. Written by the
    /// source.
    pub(crate) fn signals(&self, source: usize, destination: usize, signal: usize) -> &AtomicU64 {
        assert!(source < self.ranks && destination < self.ranks && signal < SIGNALS);
        let index = (source * self.ranks + destination) * SIGNALS + signal;
        let at = Self::signals_at(self.ranks) + index * size_of::<AtomicU64>();
        // SAFETY: in bounds (asserted) and aligned: everything before has a size that is a multiple
        // of 64.
        unsafe { &*self.memory.base().add(at).cast::<AtomicU64>() }
    }

    /// Signals `destination`, which then sees all earlier writes of `source` to its memory.
    pub(crate) fn signal(&self, source: usize, destination: usize, signal: usize) {
        self.signals(source, destination, signal)
            .fetch_add(1, Ordering::SeqCst);
        self.block(destination).bell.ring();
    }

    /// Returns the log of the puts and signals from `source` to `destination`. Written by the source.
    pub(crate) fn puts(&self, source: usize, destination: usize) -> &PutLog {
        assert!(source < self.ranks && destination < self.ranks);
        // A destination reads the logs of all sources: they are neighbours.
        let index = destination * self.ranks + source;
        let at = Self::puts_at(self.ranks) + index * size_of::<PutLog>();
        // SAFETY: in bounds (asserted) and aligned: it begins at a multiple of 128, and its size is one of 64.
        unsafe { &*self.memory.base().add(at).cast::<PutLog>() }
    }

    /// Rings the bells of all ranks but `but`.
    pub(crate) fn ring_others(&self, but: usize) {
        for rank in (0..self.ranks).filter(|&rank| rank != but) {
            self.block(rank).bell.ring();
        }
    }

    /// Tells `rank` that one of its messages or collectives has a fault.
    pub(crate) fn call_attention(&self, rank: usize) {
        let block = self.block(rank);
        block.attention.fetch_add(1, Ordering::SeqCst);
        block.bell.ring();
    }

    /// Tells `rank` that a peer completed `messages` of its messages.
    pub(crate) fn deliver(&self, rank: usize, messages: u64) {
        let block = self.block(rank);
        let now = block.delivered.fetch_add(messages, Ordering::SeqCst) + messages;
        // Either this load sees the value that the rank stored before its last look at `delivered`,
        // or that look saw the addition above.
        if now >= block.wake_at.load(Ordering::SeqCst) {
            block.bell.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_sees_which_ranks_use_its_memory() {
        let (segment, _file) = Segment::create(&[RankInfo::default(); 3]).unwrap();
        let users = |rank| {
            let uses = |&other: &usize| segment.uses_memory_of(other, rank);
            (0..3).filter(uses).collect::<Vec<_>>()
        };
        segment.set_busy(1, busy::with(0));
        segment.set_busy(2, busy::ALL);
        assert_eq!(users(0), [1, 2]);
        assert_eq!(users(1), [2]);
        assert!(users(2).is_empty());
        segment.set_busy(2, busy::IDLE);
        assert_eq!(users(0), [1]);
        assert!(users(1).is_empty());
    }
}

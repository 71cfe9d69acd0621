//! The counters of one communicator: plain stores by the thread that holds its lock, readable by any thread.
//!
//! Counting must not add to the cost of an operation. So there is no atomic addition (with one writer at a time, plain
//! ones suffice), and a message adds to only one counter besides the one that it needs anyway, its number among the
//! messages of its peer. The number of all messages is the sum of those numbers, computed on reading.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::op::Function;
use crate::operation::OperationKind;
use nccl_base::data_type::DataType;

/// A counter that has one writer at a time.
#[derive(Debug, Default)]
pub(crate) struct SingleWriterCounter(AtomicU64);

impl SingleWriterCounter {
    const fn zero() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `more`, for the one thread that writes.
    #[inline]
    pub(crate) fn add(&self, more: u64) {
        let sum = self.get().wrapping_add(more);
        self.0.store(sum, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The number of kinds of operations; below, of functions.
pub(crate) const KINDS: usize = OperationKind::ALL.len();
pub(crate) const FUNCTIONS: usize = Function::ALL.len();

/// Elements of collectives are counted for type codes below this; all types with a known size are.
const TYPES: usize = 16;

/// The counters of one communicator.
pub(crate) struct Tally {
    world_size: u64,
    /// Calls that have a sequence number, by their kind.
    calls: [SingleWriterCounter; KINDS],
    /// Operations by their function, without the messages of groups.
    operations: [SingleWriterCounter; FUNCTIONS],
    /// Their elements, by type.
    elements: [[SingleWriterCounter; TYPES]; FUNCTIONS],
    /// The messages of groups.
    pub(crate) messages: MessageTally,
}

/// How many messages there were by peer, and their elements by type.
pub(crate) struct MessageTally {
    sent: MessageCounts,
    received: MessageCounts,
}

struct MessageCounts {
    by_peer: Box<[SingleWriterCounter]>,
    /// One for each value of a byte, so that no bound has to be checked.
    elements: [SingleWriterCounter; 256],
}

impl MessageCounts {
    fn new(world_size: usize) -> Self {
        Self {
            by_peer: (0..world_size)
                .map(|_| SingleWriterCounter::zero())
                .collect(),
            elements: [const { SingleWriterCounter::zero() }; 256],
        }
    }

    /// Counts a message. Returns its number among those of its peer, from 1.
    #[inline]
    fn next(&self, peer: i32, data_type: u8, elements: u64) -> u32 {
        self.elements[usize::from(data_type)].add(elements);
        let Some(count) = self.by_peer.get(peer as u32 as usize) else {
            no_such_peer();
        };
        count.add(1);
        count.get() as u32
    }

    fn total(&self) -> Total {
        let bytes = self.elements.iter().enumerate();
        Total {
            operations: self.by_peer.iter().map(SingleWriterCounter::get).sum(),
            bytes: bytes.map(|(code, count)| bytes_of(code, count)).sum(),
        }
    }
}

/// Panics without the index: the message of a bounds check contains the index and the length, which need two registers
/// too many for a message.
#[cold]
#[inline(never)]
fn no_such_peer() -> ! {
    unreachable!("no other peer was admitted")
}

fn bytes_of(data_type: usize, elements: &SingleWriterCounter) -> u64 {
    let data_type = DataType::from_raw(data_type as u32);
    let size = data_type.size_in_bytes().unwrap_or_default();
    elements.get().wrapping_mul(size as u64)
}

impl MessageTally {
    /// Returns how many messages were sent to each rank, and received from it.
    pub(crate) fn by_peer(&self) -> (Vec<u64>, Vec<u64>) {
        let counts =
            |side: &MessageCounts| side.by_peer.iter().map(SingleWriterCounter::get).collect();
        (counts(&self.sent), counts(&self.received))
    }

    #[inline]
    pub(crate) fn next_sent(&self, peer: i32, data_type: u8, elements: u64) -> u32 {
        self.sent.next(peer, data_type, elements)
    }

    #[inline]
    pub(crate) fn next_received(&self, peer: i32, data_type: u8, elements: u64) -> u32 {
        self.received.next(peer, data_type, elements)
    }
}

/// How many operations of one function, and how many bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(hidden)]
pub struct Total {
    #[doc(hidden)]
    pub operations: u64,
    #[doc(hidden)]
    pub bytes: u64,
}

/// The operations of a captured plan: by function and type, how many operations and elements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Volume(Vec<(Function, u8, u64, u64)>);

impl Volume {
    pub(crate) fn add(&mut self, function: Function, data_type: u8, elements: u64) {
        let known = self.0.iter_mut();
        let mut known = known.filter(|(f, t, ..)| (*f, *t) == (function, data_type));
        match known.next() {
            Some((_, _, operations, sum)) => {
                *operations += 1;
                *sum = sum.wrapping_add(elements);
            }
            None => self.0.push((function, data_type, 1, elements)),
        }
    }
}

impl Tally {
    pub(crate) fn new(world_size: usize) -> Self {
        Self {
            world_size: world_size as u64,
            calls: [const { SingleWriterCounter::zero() }; KINDS],
            operations: [const { SingleWriterCounter::zero() }; FUNCTIONS],
            elements: [const { [const { SingleWriterCounter::zero() }; TYPES] }; FUNCTIONS],
            messages: MessageTally {
                sent: MessageCounts::new(world_size),
                received: MessageCounts::new(world_size),
            },
        }
    }

    /// Counts a call.
    #[inline]
    pub(crate) fn call(&self, kind: OperationKind) {
        self.calls[kind as usize].add(1);
    }

    /// Counts a collective.
    #[inline]
    pub(crate) fn operation(&self, function: Function, data_type: u8, elements: u64) {
        self.operations(function, data_type, 1, elements);
    }

    /// Counts a launch of a plan. The plan's operations were all counted before.
    pub(crate) fn replay(&self, volume: &Volume) {
        for &(function, data_type, operations, elements) in &volume.0 {
            self.operations(function, data_type, operations, elements);
        }
    }

    #[inline]
    fn operations(&self, function: Function, data_type: u8, operations: u64, elements: u64) {
        self.operations[function as usize].add(operations);
        if let Some(count) = self.elements[function as usize].get(usize::from(data_type)) {
            count.add(elements);
        }
    }

    /// How many calls of a kind there were.
    pub(crate) fn calls(&self, kind: OperationKind) -> u64 {
        self.calls[kind as usize].get()
    }

    /// Returns the number of operations of a function, and their bytes: those of all blocks, if each rank has a block.
    pub(crate) fn total(&self, function: Function) -> Total {
        let elements = self.elements[function as usize].iter().enumerate();
        let alone = Total {
            operations: self.operations[function as usize].get(),
            bytes: elements.map(|(code, count)| bytes_of(code, count)).sum(),
        };
        let grouped = match function {
            Function::Send => self.messages.sent.total(),
            Function::Recv => self.messages.received.total(),
            _ => Total::default(),
        };
        let blocks = match function {
            Function::AllGather
            | Function::ReduceScatter
            | Function::AllToAll
            | Function::Gather
            | Function::Scatter => self.world_size,
            _ => 1,
        };
        Total {
            operations: alone.operations.wrapping_add(grouped.operations),
            bytes: alone.bytes.wrapping_add(grouped.bytes).wrapping_mul(blocks),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: u8 = DataType::Float32.as_raw() as u8;
    const BF16: u8 = DataType::BFloat16.as_raw() as u8;

    #[test]
    fn every_type_with_a_size_has_a_place() {
        for data_type in DataType::ALL {
            assert!((data_type.as_raw() as usize) < TYPES, "{data_type}");
        }
    }

    #[test]
    fn messages_are_numbered_by_peer_and_counted_together() {
        let tally = Tally::new(3);
        assert_eq!(tally.messages.next_sent(2, F32, 10), 1);
        assert_eq!(tally.messages.next_sent(2, BF16, 1), 2);
        assert_eq!(tally.messages.next_sent(0, F32, 5), 1);
        assert_eq!(tally.messages.next_received(2, F32, 1), 1);
        let (operations, bytes) = (3, 62);
        assert_eq!(tally.total(Function::Send), Total { operations, bytes });
        assert_eq!(tally.total(Function::Recv).bytes, 4);
        assert_eq!(tally.total(Function::AllReduce), Total::default());
    }

    #[test]
    fn where_every_rank_has_a_block_all_of_them_count() {
        let tally = Tally::new(3);
        tally.operation(Function::AllGather, F32, 10);
        tally.operation(Function::Broadcast, F32, 10);
        assert_eq!(tally.total(Function::AllGather).bytes, 120);
        assert_eq!(tally.total(Function::Broadcast).bytes, 40);
    }

    #[test]
    fn a_launch_counts_everything_in_its_plan() {
        let mut volume = Volume::default();
        volume.add(Function::Send, F32, 10);
        volume.add(Function::Send, F32, 2);
        volume.add(Function::AllReduce, BF16, 3);
        let tally = Tally::new(1);
        tally.replay(&volume);
        tally.replay(&volume);
        let (operations, bytes) = (4, 96);
        assert_eq!(tally.total(Function::Send), Total { operations, bytes });
        assert_eq!(tally.total(Function::AllReduce).bytes, 12);
    }
}

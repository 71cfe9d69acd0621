//! One operation with checked arguments: a group queues it and a launch runs it.

use std::cmp::Reverse;
use std::num::NonZeroU32;
use std::sync::Arc;

use super::communicator::Window;
use crate::numbers::datatype::{DataType, Reduction};
use crate::transport::Direction;

/// The place of an operation's profile in the list of its launch, counted from 1.
pub(crate) type ProfileIndex = NonZeroU32;

/// The operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    Send,
    Recv,
    AlltoAll,
    Gather,
    Scatter,
    AllReduce,
    Reduce,
    ReduceScatter,
    AllGather,
    Broadcast,
}

impl Function {
    /// The number of functions.
    pub(crate) const COUNT: usize = Self::Broadcast as usize + 1;

    /// Returns the name as NCCL spells it in its messages.
    pub(crate) fn name(self) -> &'static str {
        // The C function's name without its prefix.
        &self.symbol()["nccl".len()..]
    }

    /// Returns the name of the C function.
    pub(crate) fn symbol(self) -> &'static str {
        match self {
            Self::Send => "ncclSend",
            Self::Recv => "ncclRecv",
            Self::AlltoAll => "ncclAlltoAll",
            Self::Gather => "ncclGather",
            Self::Scatter => "ncclScatter",
            Self::AllReduce => "ncclAllReduce",
            Self::Reduce => "ncclReduce",
            Self::ReduceScatter => "ncclReduceScatter",
            Self::AllGather => "ncclAllGather",
            Self::Broadcast => "ncclBroadcast",
        }
    }

    /// Whether the function computes; the others only move bytes.
    pub(crate) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }
}

/// One send or receive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MessageTask {
    pub(crate) peer: u32,
    pub(crate) direction: Direction,
    /// Position among the messages of its group; keeps those of one peer in order.
    pub(crate) order: u32,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The function of the call that it comes from.
    pub(crate) function: Function,
    /// Whether it is the first message of its call.
    pub(crate) leads: bool,
    /// The data for profiler events, in the list of its launch.
    pub(crate) profile: Option<ProfileIndex>,
}

/// One collective, which all ranks process together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CollectiveTask {
    pub(crate) function: Function,
    pub(crate) data_type: DataType,
    /// The reduction of functions that reduce.
    pub(crate) reduction: Reduction,
    /// The number of elements of the smaller of the two buffers, as the function counts them.
    pub(crate) count: u64,
    /// The root of functions that have one.
    pub(crate) root: u32,
    pub(crate) send: u64,
    pub(crate) receive: u64,
    /// Whether the call has a launch-completion event.
    pub(crate) has_event: bool,
    /// The data for profiler events, in the list of its launch.
    pub(crate) profile: Option<ProfileIndex>,
}

impl CollectiveTask {
    /// Returns the size of `count` elements in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.count * self.data_type.size()
    }

    /// Returns the unit of `count`, for messages.
    pub(crate) fn unit(&self) -> &'static str {
        if self.function.reduces() {
            "elements"
        } else {
            "bytes"
        }
    }

    /// Returns the number of parts of `count` elements: one, or one for each rank.
    pub(crate) fn parts(&self, ranks: u64) -> u64 {
        match self.function {
            Function::AllGather | Function::ReduceScatter => ranks,
            _ => 1,
        }
    }

    /// Returns the size of `rank`'s input in bytes; 0 if it has none.
    pub(crate) fn send_bytes(&self, rank: usize, ranks: u64) -> u64 {
        match self.function {
            Function::ReduceScatter => self.bytes() * ranks,
            Function::Broadcast if rank != self.root as usize => 0,
            _ => self.bytes(),
        }
    }

    /// Returns the size of `rank`'s output in bytes; 0 if it has none.
    pub(crate) fn receive_bytes(&self, rank: usize, ranks: u64) -> u64 {
        match self.function {
            Function::AllGather => self.bytes() * ranks,
            Function::Reduce if rank != self.root as usize => 0,
            _ => self.bytes(),
        }
    }

    /// Returns the size by which NCCL sorts the collectives of a group.
    fn traffic(&self, ranks: u64) -> u64 {
        let per_byte = match self.function {
            Function::AllReduce => 2,
            Function::AllGather | Function::ReduceScatter => ranks,
            _ => 1,
        };
        self.bytes().saturating_mul(per_byte)
    }
}

/// One put, signal, or wait for signals.
#[derive(Debug, Clone)]
pub(crate) enum OneSidedTask {
    /// Writes to a peer's part of a window.
    Put {
        peer: usize,
        from: u64,
        bytes: u64,
        window: Arc<Window>,
        offset: u64,
        /// The signal that the next task sends.
        signal: usize,
    },
    /// Adds one to a counter of a peer.
    Signal { peer: usize, signal: usize },
    /// Waits until peers have added the given counts to counters of this rank, and subtracts them.
    Wait(Vec<(usize, usize, u64)>),
}

/// Sorts the collectives of a group as NCCL does: roughly by size, largest first. Sizes that are
/// within a quarter of each other may count as equal, and equal ones keep their order, so ranks
/// that issue such collectives in different orders do not match. NCCL treats broadcasts from
/// several roots as one operation, after all others, and matches them root by root.
pub(crate) fn sort(tasks: &mut [CollectiveTask], ranks: u64) {
    let is_broadcast = |task: &CollectiveTask| task.function == Function::Broadcast;
    let mut roots = tasks
        .iter()
        .filter(|task| is_broadcast(task))
        .map(|task| task.root);
    let first = roots.next();
    let several = roots.any(|root| Some(root) != first);
    tasks.sort_by_key(|task| {
        if several && is_broadcast(task) {
            (true, Reverse(0), task.root)
        } else {
            (false, Reverse(size_class(task.traffic(ranks))), 0)
        }
    });
}

/// Returns the size class: four classes for each power of two, beginning with a kilobyte.
fn size_class(bytes: u64) -> u32 {
    const LARGEST: u64 = 1 << 30;
    let kilobytes = (bytes.min(LARGEST) >> 10) as u32;
    match kilobytes {
        0..4 => kilobytes,
        _ => {
            let log = kilobytes.ilog2();
            (log - 1) << 2 | (kilobytes >> (log - 2) & 3)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::datatype::{Operator, Scalar};

    fn task(function: Function, count: u64, root: u32) -> CollectiveTask {
        CollectiveTask {
            function,
            data_type: DataType::I8,
            reduction: Reduction {
                operator: Operator::Sum,
                scalar: Scalar::Value(0),
            },
            count,
            root,
            send: 0,
            receive: 0,
            has_event: false,
            profile: None,
        }
    }

    fn sorted(tasks: &[(Function, u64, u32)]) -> Vec<(Function, u64, u32)> {
        let mut tasks: Vec<_> = tasks.iter().map(|&(f, c, r)| task(f, c, r)).collect();
        sort(&mut tasks, 8);
        tasks
            .iter()
            .map(|t| (t.function, t.count, t.root))
            .collect()
    }

    #[test]
    fn larger_classes_come_first_and_a_class_keeps_its_order() {
        use Function::{AllGather, AllReduce, Broadcast, Reduce};
        assert_eq!(
            sorted(&[
                (Reduce, 100, 0),
                (AllGather, 1 << 20, 0),
                (AllReduce, 1 << 21, 0),
                (Reduce, 900, 0)
            ]),
            [
                (AllGather, 1 << 20, 0),
                (AllReduce, 1 << 21, 0),
                (Reduce, 100, 0),
                (Reduce, 900, 0)
            ]
        );
        assert_eq!(
            sorted(&[(Broadcast, 10, 3), (Reduce, 5000, 0), (Broadcast, 99999, 3)]),
            [(Broadcast, 99999, 3), (Reduce, 5000, 0), (Broadcast, 10, 3)]
        );
        assert_eq!(
            sorted(&[(Broadcast, 99999, 3), (Broadcast, 10, 1), (Reduce, 5, 0)]),
            [(Reduce, 5, 0), (Broadcast, 10, 1), (Broadcast, 99999, 3)]
        );
    }

    #[test]
    fn size_classes_grow_with_the_size() {
        let classes: Vec<u32> = (0..1 << 14)
            .map(|kilobytes| size_class(kilobytes << 10))
            .collect();
        assert!(classes.is_sorted() && classes.windows(2).all(|two| two[1] - two[0] <= 1));
        assert_eq!(size_class(u64::MAX), size_class(1 << 30));
        assert_eq!(size_class(8 << 10) + 4, size_class(16 << 10));
    }
}

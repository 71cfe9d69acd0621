//! The slots of calls and operations, and copies of them.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::error::{Error, ErrorKind};
use crate::op::Descriptor;
use crate::recorder::seqlock_ring::RingSlot;
use crate::recorder::spans::SpanRef;

/// The slot of a call.
#[derive(Default)]
pub(in crate::recorder) struct CallSlot {
    pub(super) sequence: AtomicU64,
    /// Nanoseconds since [`origin`](crate::recorder::origin).
    pub(super) time: AtomicU64,
    pub(super) stream: AtomicU64,
    /// The number of its first operation.
    pub(super) first: AtomicU64,
    /// The number of its operations in the lower half, and the index of its span's name in the upper half.
    pub(super) count: AtomicU64,
    /// The number of the span in which it was called.
    pub(super) span: AtomicU64,
    /// Its [`CallProgress`] in the lowest byte, its kind in the next, and its timeout above
    /// ([`timeout_code`](super::timeout_code())).
    pub(super) state: AtomicU64,
    /// When it was first known to be done, in nanoseconds since [`origin`](crate::recorder::origin); 0 while that is not known,
    /// and for a call if only a later call on its stream was queried.
    pub(super) done: AtomicU64,
}

/// A copy of a call's slot.
pub(in crate::recorder) struct RawCall {
    pub(in crate::recorder) sequence: u64,
    pub(in crate::recorder) time: u64,
    pub(in crate::recorder) stream: u64,
    pub(in crate::recorder) first: u64,
    pub(in crate::recorder) count: u64,
    pub(in crate::recorder) span: SpanRef,
    pub(in crate::recorder) state: u64,
    pub(in crate::recorder) done: u64,
}

impl RingSlot for CallSlot {
    type Record = RawCall;

    fn copy(&self) -> RawCall {
        let count = self.count.load(Ordering::Relaxed);
        RawCall {
            sequence: self.sequence.load(Ordering::Relaxed),
            time: self.time.load(Ordering::Relaxed),
            stream: self.stream.load(Ordering::Relaxed),
            first: self.first.load(Ordering::Relaxed),
            count: count & u64::from(u32::MAX),
            span: SpanRef {
                id: self.span.load(Ordering::Relaxed),
                name: (count >> 32) as u32,
            },
            state: self.state.load(Ordering::Relaxed),
            done: self.done.load(Ordering::Relaxed),
        }
    }
}

/// The slot of an operation.
#[derive(Default)]
pub(crate) struct OperationSlot {
    count: AtomicU64,
    rank: AtomicI32,
    packed: AtomicU32,
    message_number: AtomicU32,
}

impl OperationSlot {
    #[inline]
    pub(crate) fn write(&self, descriptor: &Descriptor, message_number: u32) {
        self.count.store(descriptor.count, Ordering::Relaxed);
        self.rank.store(descriptor.rank, Ordering::Relaxed);
        self.packed.store(descriptor.packed, Ordering::Relaxed);
        self.message_number.store(message_number, Ordering::Relaxed);
    }
}

impl RingSlot for OperationSlot {
    /// The operation, and for a message its number among those of its side and peer, from 1.
    type Record = Option<(Descriptor, u32)>;

    fn copy(&self) -> Self::Record {
        let descriptor = Descriptor::of(
            self.count.load(Ordering::Relaxed),
            self.rank.load(Ordering::Relaxed),
            self.packed.load(Ordering::Relaxed),
        );
        Some((descriptor?, self.message_number.load(Ordering::Relaxed)))
    }
}

/// How far the C calls of a call have come, on this rank and without querying the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::recorder) enum CallProgress {
    /// NCCL is being called, and has not returned.
    Issuing = 0,
    /// The work is on the stream.
    Issued = 1,
    /// A call failed.
    Failed = 2,
    /// The call was given up before it was on the stream; as far as known, it was waiting for other ranks.
    GivenUp = 3,
}

impl CallProgress {
    #[cold]
    pub(super) fn of_failure(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::TimedOut { .. } | ErrorKind::Aborted { .. } => Self::GivenUp,
            _ => Self::Failed,
        }
    }

    pub(in crate::recorder) fn from_word(word: u64) -> Self {
        match word & 0xff {
            0 => Self::Issuing,
            1 => Self::Issued,
            2 => Self::Failed,
            _ => Self::GivenUp,
        }
    }
}

//! The index of a call among the collectives of its communicator, which is the same on all ranks. The sequence numbers
//! of calls also count messages between some of the ranks.
//!
//! The index is derived, on request, from what is recorded and counted anyway.

use std::time::Duration;

use super::seqlock_ring::Copied;
use super::track::{RawCall, Track};
use crate::operation::OperationKind;

/// Whether all ranks of a communicator call `kind`, in the same order. This includes a replay, because all ranks have
/// compared their captures, but not a group, which may differ between ranks.
pub(crate) fn is_collective(kind: OperationKind) -> bool {
    use OperationKind::{
        AllGather, AllReduce, AllToAll, AllToAllV, Broadcast, Gather, Reduce, ReduceScatter,
        Replay, Scatter,
    };
    matches!(
        kind,
        AllReduce
            | Broadcast
            | Reduce
            | AllGather
            | ReduceScatter
            | AllToAll
            | AllToAllV
            | Gather
            | Scatter
            | Replay
    )
}

/// Whether only some ranks of a communicator call `kind`, so that the number of such calls differs between ranks. All ranks
/// make all other calls, in the same order.
#[doc(hidden)]
#[must_use]
pub fn is_of_some_ranks(kind: OperationKind) -> bool {
    kind == OperationKind::Group || kind.is_pairwise()
}

/// The collectives that a communicator has called.
pub(crate) struct RecordedCollectives {
    /// The number of collectives that it has called.
    pub(crate) called: u64,
    /// The last of them, oldest first.
    recorded: Vec<IndexedCall>,
    /// The last call of any kind.
    pub(crate) last: Option<IndexedCall>,
}

/// A recorded call, as the collective index needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct IndexedCall {
    /// Its sequence number among all calls.
    #[doc(hidden)]
    pub sequence: u64,
    #[doc(hidden)]
    pub kind: OperationKind,
    /// When it was called, since [`origin`](crate::recorder::origin).
    pub(crate) since: Duration,
    /// CUDA's handle of its stream.
    pub(crate) stream: u64,
}

impl IndexedCall {
    fn of(raw: &RawCall) -> Self {
        Self {
            sequence: raw.sequence,
            kind: OperationKind::from_code((raw.state >> 8) as u8),
            since: Duration::from_nanos(raw.time),
            stream: raw.stream,
        }
    }
}

impl RecordedCollectives {
    /// Returns the index of call `sequence` among the collectives, from 1.
    pub(crate) fn index_of(&self, sequence: u64) -> Option<u64> {
        let at = self
            .recorded
            .iter()
            .position(|collective| collective.sequence == sequence)?;
        Some(self.called - (self.recorded.len() - 1 - at) as u64)
    }

    /// Returns the `collective_index`-th collective, if it was called and is still recorded.
    pub(crate) fn get(&self, collective_index: u64) -> Option<&IndexedCall> {
        let back = usize::try_from(self.called.checked_sub(collective_index)?).ok()?;
        self.recorded
            .get(self.recorded.len().checked_sub(back + 1)?)
    }

    /// Returns the recorded collectives, newest first, with their indices.
    pub(crate) fn newest_first(&self) -> impl Iterator<Item = (u64, &IndexedCall)> {
        self.recorded
            .iter()
            .rev()
            .enumerate()
            .map(|(back, collective)| (self.called - back as u64, collective))
    }
}

/// The number of calls of each kind.
type CallCounts = [u64; OperationKind::ALL.len()];

/// How many times counting is repeated because calls were made meanwhile.
const TRIES: usize = 8;

impl Track {
    /// Copies the recorded calls, and returns the number of calls of each kind up to the last of them; that number is
    /// `None` if further calls were made meanwhile.
    fn counted_calls(&self) -> (Copied<RawCall>, Option<CallCounts>) {
        let counted = || OperationKind::ALL.map(|kind| self.tally.calls(kind));
        let before = counted();
        let read = self.call_ring.read();
        let written = read.first + read.records.len() as u64;
        // A call is counted before it is recorded, and both are plain stores of one thread.
        let fits = before == counted() && before.iter().sum::<u64>() == written;
        (read, fits.then_some(before))
    }

    /// Copies the recorded calls, and returns the number of earlier calls that [only some ranks](is_of_some_ranks) made;
    /// that number is `None` while calls are made too fast to be counted.
    pub(super) fn recorded_calls(&self) -> (Copied<RawCall>, Option<u64>) {
        let mut tries = 0;
        loop {
            let (read, counts) = self.counted_calls();
            tries += 1;
            if read.first > 0 && counts.is_none() && tries < TRIES {
                std::thread::yield_now();
                continue;
            }
            let earlier = match counts {
                _ if read.first == 0 => Some(0),
                None => None,
                Some(counts) => {
                    let kinds = OperationKind::ALL.into_iter();
                    let all = kinds.filter(|kind| is_of_some_ranks(*kind));
                    let all: u64 = all.map(|kind| counts[kind as usize]).sum();
                    let recorded = read.records.iter().map(IndexedCall::of);
                    let recorded = recorded.filter(|call| is_of_some_ranks(call.kind));
                    all.checked_sub(recorded.count() as u64)
                }
            };
            return (read, earlier);
        }
    }

    /// Returns `None` while calls are made too fast to be counted.
    pub(crate) fn recorded_collectives(&self) -> Option<RecordedCollectives> {
        (0..TRIES).find_map(|_| {
            let (read, counts) = self.counted_calls();
            let Some(counts) = counts else {
                std::thread::yield_now();
                return None;
            };
            let all = read.records.iter();
            let recorded = all
                .map(IndexedCall::of)
                .filter(|collective| is_collective(collective.kind));
            let called = OperationKind::ALL
                .into_iter()
                .filter(|kind| is_collective(*kind))
                .map(|kind| counts[kind as usize]);
            Some(RecordedCollectives {
                called: called.sum(),
                recorded: recorded.collect(),
                last: read.records.last().map(IndexedCall::of),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collective(sequence: u64) -> IndexedCall {
        IndexedCall {
            sequence,
            kind: OperationKind::AllReduce,
            since: Duration::from_secs(sequence),
            stream: 7,
        }
    }

    #[test]
    fn collectives_are_counted_whatever_lies_between_them_and_was_forgotten() {
        // Of 12 collectives the last three are recorded; their numbers also count messages.
        let recorded_collectives = RecordedCollectives {
            called: 12,
            recorded: vec![collective(20), collective(23), collective(24)],
            last: Some(collective(25)),
        };
        assert_eq!(recorded_collectives.index_of(20), Some(10));
        assert_eq!(recorded_collectives.index_of(24), Some(12));
        assert_eq!(recorded_collectives.index_of(25), None);
        assert_eq!(recorded_collectives.get(11), Some(&collective(23)));
        assert_eq!(recorded_collectives.get(13), None);
        assert_eq!(recorded_collectives.get(9), None);
        let newest: Vec<_> = recorded_collectives
            .newest_first()
            .map(|(at, collective)| (at, collective.sequence))
            .collect();
        assert_eq!(newest, [(12, 24), (11, 23), (10, 20)]);
    }
}

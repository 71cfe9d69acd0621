//! The calls of a communicator, as the watchdog and other readers see them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::slots::{CallProgress, RawCall};
use super::{MAX_CALLS, Track, timeout_of_code};
use crate::op::Descriptor;
use crate::operation::OperationKind;
use crate::recorder::is_of_some_ranks;
use crate::recorder::seqlock_ring::RingSlot;

/// A recorded call, as the watchdog sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct RecordedCall {
    #[doc(hidden)]
    pub sequence: u64,
    pub(crate) kind: OperationKind,
    /// Since [`origin`](crate::recorder::origin).
    pub(crate) since: Duration,
    /// How long it may run; `None` for no limit.
    pub(crate) timeout: Option<Duration>,
    /// CUDA's handle.
    pub(crate) stream: u64,
    /// Whether NCCL, or the launch of a graph, has not returned.
    #[doc(hidden)]
    pub issuing: bool,
}

impl Track {
    /// Returns the calls that are kept and have not failed, oldest first. Work that is put on a stream afterwards comes
    /// after those that are issued.
    #[doc(hidden)]
    pub fn calls(&self) -> Vec<RecordedCall> {
        let records = self.call_ring.read().records;
        let calls = records.iter().map(|raw| RecordedCall {
            sequence: raw.sequence,
            kind: OperationKind::from_code((raw.state >> 8) as u8),
            since: Duration::from_nanos(raw.time),
            timeout: timeout_of_code(raw.state >> 16),
            stream: raw.stream,
            issuing: CallProgress::from_word(raw.state) == CallProgress::Issuing,
        });
        let failed = records.iter().map(|raw| {
            let progress = CallProgress::from_word(raw.state);
            matches!(progress, CallProgress::Failed | CallProgress::GivenUp)
        });
        calls
            .zip(failed)
            .filter_map(|(call, failed)| (!failed).then_some(call))
            .collect()
    }

    /// How many calls were recorded so far.
    pub(crate) fn written(&self) -> u64 {
        self.call_ring.written()
    }

    /// Returns when the last call began, since [`origin`](crate::recorder::origin), and whether it is being issued; `None`
    /// while a call is being recorded.
    #[doc(hidden)]
    pub fn last_call(&self) -> Option<(Duration, bool)> {
        let last = self.call_ring.last()?;
        let issuing = CallProgress::from_word(last.state) == CallProgress::Issuing;
        Some((Duration::from_nanos(last.time), issuing))
    }

    /// Returns the sequence numbers of the kept calls that were given up before they were on their stream.
    #[doc(hidden)]
    pub fn given_up(&self) -> Vec<u64> {
        let records = self.call_ring.read().records;
        let given_up = |raw: &RawCall| CallProgress::from_word(raw.state) == CallProgress::GivenUp;
        let given_up = records.into_iter().filter(given_up);
        given_up.map(|raw| raw.sequence).collect()
    }

    /// How many messages were sent to each rank, and received from it.
    #[doc(hidden)]
    pub fn message_counts(&self) -> (Vec<u64>, Vec<u64>) {
        self.tally.messages.by_peer()
    }

    /// Whether all calls so far are of the kinds that all ranks make.
    #[doc(hidden)]
    pub fn only_calls_for_all(&self) -> bool {
        let kinds = OperationKind::ALL.into_iter();
        let mut of_some = kinds.filter(|kind| is_of_some_ranks(*kind));
        of_some.all(|kind| self.tally.calls(kind) == 0)
    }

    /// Returns the call in which the communicator was waiting, as far as known without a query: a call from which NCCL has not
    /// returned, or one that is not known to be done.
    pub(crate) fn pending_call(&self) -> Option<String> {
        let calls = self.calls();
        let pending = |call: &&RecordedCall| {
            call.issuing
                || (call.kind != OperationKind::Capture
                    && call.sequence > self.done_on(call.stream))
        };
        let first = calls.iter().find(pending)?;
        let last = calls.iter().rfind(pending)?;
        let name = format!("{} #{}", last.kind, last.sequence);
        Some(match last.sequence - first.sequence {
            0 => name,
            _ => format!("{name}, or one of those from #{} on", first.sequence),
        })
    }

    /// Whether NCCL may wait for other ranks inside call `sequence`, judged by the operations that NCCL has received: the first
    /// message between two ranks connects them, and the first collective of a kind connects all ranks of the communicator.
    pub(crate) fn may_connect(&self, sequence: u64) -> bool {
        // Each sequence number is one record, from 1 on.
        let raw = sequence
            .checked_sub(1)
            .and_then(|at| self.call_ring.get(at));
        let raw = raw.filter(|raw| raw.sequence == sequence && self.identity.world_size > 1);
        let Some(raw) = raw else { return false };
        // A group's operations are recorded when NCCL has received all of them, or a large part. Until then, its thread
        // is inside the call of one operation, which only queues that operation.
        let indices = raw.first..raw.first.saturating_add(raw.count);
        let operations: Vec<_> = indices
            .filter_map(|index| self.operation_ring.get(index)?)
            .collect();
        operations
            .iter()
            .any(|(descriptor, message)| match descriptor.peer() {
                Some(peer) => peer != self.identity.rank && *message == 1,
                None => {
                    let same =
                        |(other, _): &&(Descriptor, u32)| other.function() == descriptor.function();
                    let here = operations.iter().filter(same).count() as u64;
                    self.tally.total(descriptor.function()).operations <= here
                }
            })
    }

    /// Returns up to which sequence number, below `sequence`, no call on `stream` is still being issued. Allocates nothing,
    /// and reads the records only while a replay is being launched, because all other calls are made one after another.
    pub(crate) fn issued_below(&self, stream: u64, sequence: u64) -> u64 {
        if self.launching.load(Ordering::Acquire) == 0 {
            return sequence - 1;
        }
        let calls = (0..MAX_CALLS as u64).map(|index| self.call_ring.slot(index));
        let issuing = calls.filter_map(|slot| {
            let raw = slot.copy();
            let is_one = raw.stream == stream
                && (1..sequence).contains(&raw.sequence)
                && CallProgress::from_word(raw.state) == CallProgress::Issuing;
            is_one.then_some(raw.sequence)
        });
        issuing.min().unwrap_or(sequence) - 1
    }
}

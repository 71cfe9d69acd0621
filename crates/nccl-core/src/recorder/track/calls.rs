//! The calls of a communicator, as the watchdog and other readers see them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::slots::{IssueProgress, IssueRecord};
use super::{ISSUES, Track, limit_of_word};
use crate::op::Descriptor;
use crate::operation::OperationKind;
use crate::recorder::seqlock_ring::RingSlot;

/// A call, as the watchdog sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct TrackedCall {
    #[doc(hidden)]
    pub number: u64,
    pub(crate) kind: OperationKind,
    /// Since [`origin`].
    pub(crate) since: Duration,
    /// How long it may run; `None` for ever.
    pub(crate) timeout: Option<Duration>,
    /// CUDA's handle.
    pub(crate) stream: u64,
    /// Whether NCCL, or the launch of a graph, has not returned.
    #[doc(hidden)]
    pub issuing: bool,
}

impl Track {
    /// The calls that are kept and have not failed, oldest first. Work that is put on a stream afterwards
    /// comes behind the calls that are issued.
    #[doc(hidden)]
    pub fn calls(&self) -> Vec<TrackedCall> {
        let records = self.issues.read().records;
        let calls = records.iter().map(|issue| TrackedCall {
            number: issue.number,
            kind: OperationKind::from_code((issue.state >> 8) as u8),
            since: Duration::from_nanos(issue.time),
            timeout: limit_of_word(issue.state >> 16),
            stream: issue.stream,
            issuing: IssueProgress::from_word(issue.state) == IssueProgress::Issuing,
        });
        let failed = records.iter().map(|issue| {
            let progress = IssueProgress::from_word(issue.state);
            matches!(progress, IssueProgress::Failed | IssueProgress::GivenUp)
        });
        calls
            .zip(failed)
            .filter_map(|(call, failed)| (!failed).then_some(call))
            .collect()
    }

    /// How many calls were recorded so far.
    pub(crate) fn written(&self) -> u64 {
        self.issues.written()
    }

    /// When the last call began, since [`origin`], and whether it is being issued; `None` while one is being recorded.
    #[doc(hidden)]
    pub fn last_call(&self) -> Option<(Duration, bool)> {
        let last = self.issues.last()?;
        let issuing = IssueProgress::from_word(last.state) == IssueProgress::Issuing;
        Some((Duration::from_nanos(last.time), issuing))
    }

    /// The numbers of the kept calls that were given up before they were on their stream.
    #[doc(hidden)]
    pub fn given_up(&self) -> Vec<u64> {
        let records = self.issues.read().records;
        let given_up =
            |issue: &IssueRecord| IssueProgress::from_word(issue.state) == IssueProgress::GivenUp;
        let given_up = records.into_iter().filter(given_up);
        given_up.map(|issue| issue.number).collect()
    }

    /// How many messages were sent to each rank, and received from it.
    #[doc(hidden)]
    pub fn message_counts(&self) -> (Vec<u64>, Vec<u64>) {
        self.tally.messages.by_peer()
    }

    /// Whether no call was made that only some ranks make.
    #[doc(hidden)]
    pub fn only_calls_for_all(&self) -> bool {
        use OperationKind::{Group, Recv, Send};
        [Group, Send, Recv]
            .into_iter()
            .all(|kind| self.tally.calls(kind) == 0)
    }

    /// The call that the communicator was waiting in, as far as known without asking: a call that NCCL has not returned from, or
    /// one that is not known to be done.
    pub(crate) fn pending_call(&self) -> Option<String> {
        let calls = self.calls();
        let pending = |call: &&TrackedCall| {
            call.issuing
                || (call.kind != OperationKind::Capture && call.number > self.done_on(call.stream))
        };
        let first = calls.iter().find(pending)?;
        let last = calls.iter().rfind(pending)?;
        let name = format!("{} #{}", last.kind, last.number);
        Some(match last.number - first.number {
            0 => name,
            _ => format!("{name}, or one of those from #{} on", first.number),
        })
    }

    /// Whether NCCL may wait for other ranks inside call `number`, judging by its operations that NCCL was given: the first message
    /// between two ranks connects them, and the first collective of a kind connects all ranks of the communicator.
    pub(crate) fn may_connect(&self, number: u64) -> bool {
        // Each number is one record, from 1 on.
        let issue = number.checked_sub(1).and_then(|at| self.issues.get(at));
        let issue = issue.filter(|issue| issue.number == number && self.identity.world_size > 1);
        let Some(issue) = issue else { return false };
        // A group's operations are recorded when NCCL was given all of them, or a large part: until then its thread is inside the
        // call of one operation, which only queues it.
        let numbers = issue.first..issue.first.saturating_add(issue.count);
        let operations: Vec<_> = numbers
            .filter_map(|number| self.operations.get(number)?)
            .collect();
        operations.iter().any(|(op, message)| match op.peer() {
            Some(peer) => peer != self.identity.rank && *message == 1,
            None => {
                let same = |(other, _): &&(Descriptor, u32)| other.function() == op.function();
                let here = operations.iter().filter(same).count() as u64;
                self.tally.total(op.function()).operations <= here
            }
        })
    }

    /// Up to which number, below `number`, no call on `stream` is still being issued. Allocates nothing, and reads
    /// the records only while a replay is being launched: all other calls are made one after another.
    pub(crate) fn issued_below(&self, stream: u64, number: u64) -> u64 {
        if self.launching.load(Ordering::Acquire) == 0 {
            return number - 1;
        }
        let calls = (0..ISSUES as u64).map(|index| self.issues.slot(index));
        let issuing = calls.filter_map(|slot| {
            let issue = slot.copy();
            let is_one = issue.stream == stream
                && (1..number).contains(&issue.number)
                && IssueProgress::from_word(issue.state) == IssueProgress::Issuing;
            is_one.then_some(issue.number)
        });
        issuing.min().unwrap_or(number) - 1
    }
}

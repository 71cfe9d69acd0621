//! The writers of a track: the thread that holds the communicator's lock, and a launch that does not hold it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;

use super::slots::{CallProgress, CallSlot, OperationSlot};
use super::{Track, handle_of, timeout_code};
use crate::error::Error;
use crate::operation::OperationKind;
use crate::recorder::spans;
use crate::stats::{self, Tally, Volume};
use nccl_base::clock::origin;

/// The right to write the records, which belongs to the holder of the communicator's lock.
pub(crate) struct Writer {
    pub(super) track: Arc<Track>,
    pub(super) origin: Instant,
    /// How many calls were written so far, whether or not they are still kept.
    pub(super) calls_written: u64,
    pub(super) operations_written: u64,
    /// When a call that shows that NCCL reaches all ranks was last recorded as such, in nanoseconds since `origin`.
    pub(super) reach_noted: u64,
    pub(super) tally: Arc<Tally>,
}

/// A call that is being made.
#[derive(Clone, Copy)]
pub(crate) struct CallTicket {
    index: u64,
    sequence: u64,
    /// Whether [`Writer::note_reach`] is to be called if its operations reach all ranks.
    pub(crate) is_reach_due: bool,
    /// Whether the call has to be reported to the watchdog.
    pub(crate) needs_report: bool,
}

/// The slots of the next operations.
pub(crate) struct NextSlots<'w> {
    /// As many as are contiguous.
    pub(crate) slots: &'w [OperationSlot],
    pub(crate) tally: &'w Tally,
}

/// One in this many calls of a communicator is timed, because reading a clock costs as much as a message. The first
/// call, in which NCCL may connect the ranks, is not timed.
const TIMED: u64 = 64;

/// How often it is checked whether calls reach all ranks, in nanoseconds.
const REACH_INTERVAL: u64 = 50_000_000;

impl Writer {
    /// Records call `sequence` of `operations` operations, which is about to be made.
    #[inline]
    pub(crate) fn begin(
        &mut self,
        sequence: u64,
        kind: OperationKind,
        started: Instant,
        stream: &CudaStream,
        timeout: Duration,
        operations: usize,
    ) -> CallTicket {
        let track = &*self.track;
        let since = started.saturating_duration_since(self.origin);
        let started_ns = since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos());
        let index = self.calls_written;
        let span = spans::current();
        self.tally.call(kind);
        track
            .operation_ring
            .begin(self.operations_written, operations);
        track.call_ring.begin(index, 1);
        let slot = track.call_ring.slot(index);
        slot.sequence.store(sequence, Ordering::Relaxed);
        slot.time.store(started_ns, Ordering::Relaxed);
        slot.stream.store(handle_of(stream), Ordering::Relaxed);
        slot.first.store(self.operations_written, Ordering::Relaxed);
        let count_and_name = u64::from(span.name) << 32 | u64::from(operations as u32);
        slot.count.store(count_and_name, Ordering::Relaxed);
        slot.span.store(span.id, Ordering::Relaxed);
        slot.done.store(0, Ordering::Relaxed);
        let timeout = timeout_code(timeout);
        let state = timeout << 16 | (kind as u64) << 8 | CallProgress::Issuing as u64;
        slot.state.store(state, Ordering::Relaxed);
        self.calls_written += 1;
        track.call_ring.publish(self.calls_written);
        // Read after the record is written, so that a watchdog that takes the stream off the list finds the call.
        let is_covered =
            track
                .fast_path
                .covers(std::ptr::from_ref(stream).addr(), started_ns, timeout);
        CallTicket {
            index,
            sequence,
            is_reach_due: started_ns.saturating_sub(self.reach_noted) >= REACH_INTERVAL,
            needs_report: !is_covered,
        }
    }

    /// Returns the slots of the next `operations` of the call that was begun last.
    #[inline]
    pub(crate) fn next_slots(&self, operations: usize) -> NextSlots<'_> {
        NextSlots {
            slots: self
                .track
                .operation_ring
                .slots(self.operations_written, operations),
            tally: &self.tally,
        }
    }

    /// Returns the statistics of the communicator.
    #[inline]
    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Makes the operations readable whose C calls were made.
    #[inline]
    pub(crate) fn publish_operations(&mut self, operations: usize) {
        self.operations_written += operations as u64;
        self.track.operation_ring.publish(self.operations_written);
    }

    /// Records that the call that was begun last reaches all ranks of the communicator.
    pub(crate) fn note_reach(&mut self, ticket: CallTicket) {
        let slot = self.track.call_ring.slot(ticket.index);
        self.reach_noted = slot.time.load(Ordering::Relaxed);
        let stream = slot.stream.load(Ordering::Relaxed);
        self.track.note_reach(ticket.sequence, stream);
    }

    /// Counts the operations that a launch replays.
    pub(crate) fn count_replay(&self, volume: &Volume) {
        self.tally.replay(volume);
    }

    /// Records how the C calls ended.
    #[inline]
    pub(crate) fn end(&self, ticket: CallTicket, failure: Option<&Error>) {
        let progress = failure.map_or(CallProgress::Issued, CallProgress::of_failure);
        self.track.set_progress(ticket, progress);
    }
}

impl Track {
    /// Records the progress of a call's C calls.
    pub(super) fn set_progress(&self, ticket: CallTicket, progress: CallProgress) {
        let slot = self.call_ring.slot(ticket.index);
        // If the calls were made without the lock, another call may have taken the slot meanwhile.
        if slot.sequence.load(Ordering::Relaxed) == ticket.sequence {
            let state_without_progress = slot.state.load(Ordering::Relaxed) & !0xff;
            slot.state
                .store(state_without_progress | progress as u64, Ordering::Release);
            if ticket.index % TIMED == 1 {
                record_enqueue_time(slot, state_without_progress);
            }
        }
    }
}

#[cold]
fn record_enqueue_time(slot: &CallSlot, state: u64) {
    let now = origin().monotonic.elapsed();
    let began = Duration::from_nanos(slot.time.load(Ordering::Relaxed));
    let kind = OperationKind::from_code((state >> 8) as u8);
    stats::enqueue(kind).add(now.saturating_sub(began));
}

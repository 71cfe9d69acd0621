//! The writers of the record: the thread that holds the communicator's lock, and a launch without it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;

use super::slots::{Issue, IssueProgress, OperationSlot};
use super::{Track, handle_of, limit_word};
use crate::error::Error;
use crate::operation::OperationKind;
use crate::recorder::spans;
use crate::stats::{self, Tally, Volume};
use nccl_base::clock::origin;

/// The right to write the record; the holder of the communicator's lock has it.
pub(crate) struct Writer {
    pub(super) track: Arc<Track>,
    pub(super) origin: Instant,
    /// How many were written so far, whether or not they are still kept.
    pub(super) issues: u64,
    pub(super) operations: u64,
    pub(super) tally: Arc<Tally>,
}

/// An issue that is being called.
#[derive(Clone, Copy)]
pub(crate) struct IssueTicket {
    index: u64,
    number: u64,
    /// Whether it has to be reported to the watchdog.
    pub(crate) needs_report: bool,
}

/// The slots of the next operations.
pub(crate) struct OperationRoom<'w> {
    /// As many as are contiguous.
    pub(crate) slots: &'w [OperationSlot],
    pub(crate) tally: &'w Tally,
}

/// One issue in this many of a communicator is timed, because reading a clock costs as much as a message. Not
/// the first, in which NCCL may connect the ranks.
const TIMED: u64 = 64;

impl Writer {
    /// Records the issue `number` of `operations` operations, which is about to be called.
    #[inline]
    pub(crate) fn begin(
        &mut self,
        number: u64,
        kind: OperationKind,
        started: Instant,
        stream: &CudaStream,
        limit: Duration,
        operations: usize,
    ) -> IssueTicket {
        let track = &*self.track;
        let since = started.saturating_duration_since(self.origin);
        let time = since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos());
        let index = self.issues;
        let mention = spans::current();
        self.tally.call(kind);
        track.operations.begin(self.operations, operations);
        track.issues.begin(index, 1);
        let Issue {
            number: slot,
            time: at,
            stream: on,
            first,
            count,
            span,
            state,
            done,
        } = track.issues.slot(index);
        slot.store(number, Ordering::Relaxed);
        at.store(time, Ordering::Relaxed);
        on.store(handle_of(stream), Ordering::Relaxed);
        first.store(self.operations, Ordering::Relaxed);
        let named = u64::from(mention.name) << 32 | u64::from(operations as u32);
        count.store(named, Ordering::Relaxed);
        span.store(mention.id, Ordering::Relaxed);
        done.store(0, Ordering::Relaxed);
        let limit = limit_word(limit);
        let word = limit << 16 | (kind as u64) << 8 | IssueProgress::Issuing as u64;
        state.store(word, Ordering::Relaxed);
        self.issues += 1;
        track.issues.publish(self.issues);
        // After the record is written: a watchdog that takes the stream off the list finds the call.
        let is_usual = track
            .fast_path
            .covers(std::ptr::from_ref(stream).addr(), time, limit);
        IssueTicket {
            index,
            number,
            needs_report: !is_usual,
        }
    }

    /// The slots of the next `operations` of the issue that was begun last.
    #[inline]
    pub(crate) fn room(&self, operations: usize) -> OperationRoom<'_> {
        OperationRoom {
            slots: self.track.operations.slots(self.operations, operations),
            tally: &self.tally,
        }
    }

    /// Makes the operations that were called readable.
    #[inline]
    pub(crate) fn called(&mut self, operations: usize) {
        self.operations += operations as u64;
        self.track.operations.publish(self.operations);
    }

    /// Counts what a launch replays.
    pub(crate) fn replays(&self, volume: &Volume) {
        self.tally.replay(volume);
    }

    /// Notes how the calls ended.
    #[inline]
    pub(crate) fn end(&self, ticket: IssueTicket, failure: Option<&Error>) {
        let progress = failure.map_or(IssueProgress::Issued, IssueProgress::of_failure);
        self.track.set_progress(ticket, progress);
    }
}

impl Track {
    /// Notes how the calls of an issue ended.
    pub(super) fn set_progress(&self, ticket: IssueTicket, progress: IssueProgress) {
        let slot = self.issues.slot(ticket.index);
        // Other issues may have taken the slot meanwhile, when the calls were made without the lock.
        if slot.number.load(Ordering::Relaxed) == ticket.number {
            let kind = slot.state.load(Ordering::Relaxed) & !0xff;
            slot.state.store(kind | progress as u64, Ordering::Release);
            if ticket.index % TIMED == 1 {
                time(slot, kind);
            }
        }
    }
}

#[cold]
fn time(slot: &Issue, kind: u64) {
    let now = origin().monotonic.elapsed();
    let began = Duration::from_nanos(slot.time.load(Ordering::Relaxed));
    let kind = OperationKind::from_code((kind >> 8) as u8);
    stats::enqueue(kind).add(now.saturating_sub(began));
}

//! The track of one communicator.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::CudaStream;

use super::reach::Reach;
use super::slots::{CallSlot, OperationSlot};
use super::stream_progress::StreamProgressTable;
use crate::identity::Identity;
use crate::recorder::fast_path::FastPathFilter;
use crate::recorder::seqlock_ring::SeqlockRing;
use crate::state::Lifecycle;
use crate::stats::Tally;
use crate::sync::Mutex;
use nccl_base::clock::now;

/// How many calls of each communicator are kept; below, how many operations.
pub(in crate::recorder) const MAX_CALLS: usize = 512;

pub(crate) const MAX_OPERATIONS: usize = 2048;

/// All data that the recorder has of one communicator. A record is one entry of its rings: a call or an operation.
#[doc(hidden)]
pub struct Track {
    /// Its number among the communicators of this process, from 1.
    #[doc(hidden)]
    pub communicator_number: u64,
    #[doc(hidden)]
    pub identity: Identity,
    #[doc(hidden)]
    pub lifecycle: Arc<Lifecycle>,
    pub(in crate::recorder) call_ring: SeqlockRing<CallSlot>,
    pub(in crate::recorder) operation_ring: SeqlockRing<OperationSlot>,
    pub(super) stream_progress: StreamProgressTable,
    /// The number of replays that are being launched, which happens without the communicator's lock.
    pub(super) launching: AtomicU64,
    /// The call that waited for other work on its stream at the watchdog's last poll; 0 for none.
    pub(super) queued_call: AtomicU64,
    pub(crate) fast_path: FastPathFilter,
    pub(super) reach: Mutex<Reach>,
    pub(in crate::recorder) tally: Arc<Tally>,
}

/// CUDA's handle of a stream.
pub(crate) fn handle_of(stream: &CudaStream) -> u64 {
    stream.cu_stream().addr() as u64
}

impl Track {
    /// Counts a replay that is about to be launched without the communicator's lock. The caller still holds the lock.
    pub(crate) fn begin_launch(&self) {
        self.launching.fetch_add(1, Ordering::AcqRel);
    }

    /// Records the call that waits for other work on its stream, if the first pending call does.
    pub(crate) fn set_queued_call(&self, sequence: Option<u64>) {
        self.queued_call
            .store(sequence.unwrap_or(0), Ordering::Relaxed);
    }

    /// Returns the call that waited for other work on its stream at the watchdog's last poll. The value is kept when the
    /// communicator ends, because its failure is diagnosed after that.
    #[doc(hidden)]
    pub fn queued_call(&self) -> Option<u64> {
        match self.queued_call.load(Ordering::Relaxed) {
            0 => None,
            sequence => Some(sequence),
        }
    }

    /// Up to which sequence number the operations on `stream` are done; 0 for none.
    pub(crate) fn done_on(&self, stream: u64) -> u64 {
        self.stream_progress.done_on(stream)
    }

    /// Records that operation `sequence` on `stream` is done, and with it all earlier ones on that stream. A number of 0
    /// stands for no operation.
    pub(crate) fn done(&self, stream: &CudaStream, sequence: u64) {
        if sequence == 0 {
            return;
        }
        let handle = handle_of(stream);
        self.record_done_time(sequence, handle);
        self.stream_progress.done_at(handle, sequence);
    }

    /// Records that call `sequence` is known to be done from now on, if it is on this stream: the last number that is known to
    /// be done on a stream may be that of a call on another one.
    fn record_done_time(&self, sequence: u64, stream: u64) {
        // Each sequence number is one record, from 1 on.
        let slot = self.call_ring.slot(sequence.wrapping_sub(1));
        if slot.sequence.load(Ordering::Relaxed) == sequence
            && slot.stream.load(Ordering::Relaxed) == stream
            && slot.done.load(Ordering::Relaxed) == 0
        {
            let now = u64::try_from(now().as_nanos()).unwrap_or(u64::MAX);
            // If another call takes the slot at this moment, that call seems to be done before it began; readers ignore
            // such a time.
            slot.done.store(now, Ordering::Relaxed);
        }
    }

    /// Records that operation `sequence` on `stream` shows, once it is done, that NCCL reaches all ranks.
    pub(super) fn note_reach(&self, sequence: u64, stream: u64) {
        let mut reach = self.reach.lock();
        reach.note((sequence, stream), |stream| self.done_on(stream));
    }

    /// Returns the number of the last operation that has shown that NCCL reaches all ranks; 0 for none.
    pub(super) fn last_reaching_all(&self) -> u64 {
        self.reach.lock().update(|stream| self.done_on(stream))
    }
}

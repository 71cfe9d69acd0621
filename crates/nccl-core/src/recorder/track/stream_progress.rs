//! For each stream, up to which call its work is done.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::Mutex;

/// The number of streams whose entries are read without a lock.
const STREAMS: usize = 8;

/// The maximum number of further entries. When there are more, the entry with the lowest number is removed.
const MORE_STREAMS: usize = 1024;

/// Up to which sequence number the operations of a stream are done.
#[derive(Default)]
struct StreamProgress {
    /// The stream's handle plus 1, so that the default stream is not 0; 0 while the entry is free.
    stream: AtomicU64,
    done: AtomicU64,
}

/// The progress of the streams of one communicator.
#[derive(Default)]
pub(super) struct StreamProgressTable {
    few: [StreamProgress; STREAMS],
    /// The progress of further streams, by handle.
    more: Mutex<BTreeMap<u64, u64>>,
}

impl StreamProgressTable {
    /// Up to which sequence number the operations on `stream` are done; 0 for none.
    pub(super) fn done_on(&self, stream: u64) -> u64 {
        let mut is_full = true;
        for progress in &self.few {
            match progress.stream.load(Ordering::Acquire) {
                taken if taken == stream.wrapping_add(1) => {
                    return progress.done.load(Ordering::Acquire);
                }
                taken => is_full &= taken != 0,
            }
        }
        match is_full {
            true => self.more.lock().get(&stream).copied().unwrap_or(0),
            false => 0,
        }
    }

    pub(super) fn done_at(&self, stream: u64, sequence: u64) {
        let name = stream.wrapping_add(1);
        for progress in &self.few {
            let taken =
                progress
                    .stream
                    .compare_exchange(0, name, Ordering::AcqRel, Ordering::Acquire);
            if taken.is_ok() || taken == Err(name) {
                progress.done.fetch_max(sequence, Ordering::AcqRel);
                return;
            }
        }
        let mut more = self.more.lock();
        if more.len() >= MORE_STREAMS && !more.contains_key(&stream) {
            let oldest = more.iter().min_by_key(|(_, done)| **done);
            if let Some(oldest) = oldest.map(|(&stream, _)| stream) {
                more.remove(&oldest);
            }
        }
        let done = more.entry(stream).or_default();
        *done = sequence.max(*done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_kept_of_a_bounded_number_of_streams_and_the_oldest_is_forgotten() {
        let table = StreamProgressTable::default();
        let streams = (STREAMS + MORE_STREAMS) as u64;
        for stream in 0..streams {
            table.done_at(stream, stream + 1);
        }
        for stream in 0..streams {
            assert_eq!(table.done_on(stream), stream + 1);
        }
        table.done_at(9, 5);
        assert_eq!(table.done_on(9), 10, "it only grows");
        table.done_at(streams, streams + 1);
        assert_eq!(table.done_on(streams), streams + 1);
        assert_eq!(table.done_on(STREAMS as u64), 0, "the oldest is forgotten");
    }
}

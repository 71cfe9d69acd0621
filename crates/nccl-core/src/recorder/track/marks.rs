//! Up to which call the work on each stream is done.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::Mutex;

/// How many streams have marks that are read without a lock.
const STREAMS: usize = 8;

/// How many further streams have marks: the one with the lowest number is forgotten first.
const MORE_STREAMS: usize = 1024;

/// Up to which number the operations of a stream are done.
#[derive(Default)]
struct StreamMark {
    /// The stream's handle plus 1, so that the default stream is not 0; 0 while the mark is free.
    stream: AtomicU64,
    done: AtomicU64,
}

/// The marks of one communicator.
#[derive(Default)]
pub(super) struct StreamMarks {
    few: [StreamMark; STREAMS],
    /// The marks of further streams, by handle.
    more: Mutex<BTreeMap<u64, u64>>,
}

impl StreamMarks {
    /// Up to which number the operations on `stream` are done; 0 for none.
    pub(super) fn done_on(&self, stream: u64) -> u64 {
        let mut is_full = true;
        for mark in &self.few {
            match mark.stream.load(Ordering::Acquire) {
                taken if taken == stream.wrapping_add(1) => {
                    return mark.done.load(Ordering::Acquire);
                }
                taken => is_full &= taken != 0,
            }
        }
        match is_full {
            true => self.more.lock().get(&stream).copied().unwrap_or(0),
            false => 0,
        }
    }

    pub(super) fn done_at(&self, stream: u64, number: u64) {
        let name = stream.wrapping_add(1);
        for mark in &self.few {
            let taken = mark
                .stream
                .compare_exchange(0, name, Ordering::AcqRel, Ordering::Acquire);
            if taken.is_ok() || taken == Err(name) {
                mark.done.fetch_max(number, Ordering::AcqRel);
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
        *done = number.max(*done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_streams_than_there_are_places_are_known_to_be_done_up_to_a_bound() {
        let marks = StreamMarks::default();
        let streams = (STREAMS + MORE_STREAMS) as u64;
        for stream in 0..streams {
            marks.done_at(stream, stream + 1);
        }
        for stream in 0..streams {
            assert_eq!(marks.done_on(stream), stream + 1);
        }
        marks.done_at(9, 5);
        assert_eq!(marks.done_on(9), 10, "it goes on only");
        marks.done_at(streams, streams + 1);
        assert_eq!(marks.done_on(streams), streams + 1);
        assert_eq!(marks.done_on(STREAMS as u64), 0, "the oldest is forgotten");
    }
}

//! Up to where the work on each stream is done.

use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::CudaStream;

use super::{Track, handle_of, now};

/// Streams whose marks are kept where no lock is needed.
pub(super) const STREAMS: usize = 8;

/// Further ones of which it is known how far they are: what was done first is forgotten first.
const MORE_STREAMS: usize = 1024;

/// Up to which number the operations of a stream are done.
#[derive(Default)]
pub(super) struct Mark {
    /// 0 while nobody has it: the default stream is counted from 1 like all others.
    stream: AtomicU64,
    done: AtomicU64,
}

impl Track {
    /// Up to which number the operations on `stream` are done; 0 for none.
    pub(crate) fn done_on(&self, stream: u64) -> u64 {
        let mut is_full = true;
        for mark in &self.marks {
            match mark.stream.load(Ordering::Acquire) {
                taken if taken == stream.wrapping_add(1) => {
                    return mark.done.load(Ordering::Acquire);
                }
                taken => is_full &= taken != 0,
            }
        }
        match is_full {
            true => self.more_marks.lock().get(&stream).copied().unwrap_or(0),
            false => 0,
        }
    }

    /// Notes that operation `number` on `stream` is done, and with it all that were put there before.
    pub(crate) fn done(&self, stream: &CudaStream, number: u64) {
        self.done_at(handle_of(stream), number);
    }

    fn done_at(&self, stream: u64, number: u64) {
        self.stamp(number);
        let name = stream.wrapping_add(1);
        for mark in &self.marks {
            let taken = mark
                .stream
                .compare_exchange(0, name, Ordering::AcqRel, Ordering::Acquire);
            if taken.is_ok() || taken == Err(name) {
                mark.done.fetch_max(number, Ordering::AcqRel);
                return;
            }
        }
        let mut more = self.more_marks.lock();
        if more.len() >= MORE_STREAMS && !more.contains_key(&stream) {
            let oldest = more.iter().min_by_key(|(_, done)| **done);
            if let Some(oldest) = oldest.map(|(&stream, _)| stream) {
                more.remove(&oldest);
            }
        }
        let done = more.entry(stream).or_default();
        *done = number.max(*done);
    }

    /// Notes that issue `number` is known to be done from now on.
    fn stamp(&self, number: u64) {
        // Each number is one record, from 1 on.
        let slot = self.issues.slot(number.wrapping_sub(1));
        if slot.number.load(Ordering::Relaxed) == number && slot.done.load(Ordering::Relaxed) == 0 {
            let now = u64::try_from(now().as_nanos()).unwrap_or(u64::MAX);
            // Should the slot become another's just now, that one seems done before it began, and nobody
            // believes it.
            slot.done.store(now, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::recorder::track::{Identity, Tracked, Writer};
    use crate::state::Phase;
    use crate::stats::Tally;

    fn track() -> (Tracked, Writer) {
        let identity = Identity {
            name: "unit".into(),
            rank: 0,
            world_size: 1,
            key: None,
            home: None,
            members: None,
            roster: Arc::default(),
        };
        Tracked::new(identity, &Arc::new(Phase::new()), &Arc::new(Tally::new(1)))
    }

    #[test]
    fn more_streams_than_there_are_places_are_known_to_be_done_up_to_a_bound() {
        let (tracked, _writer) = track();
        let track = tracked.track();
        let streams = (STREAMS + MORE_STREAMS) as u64;
        for stream in 0..streams {
            track.done_at(stream, stream + 1);
        }
        for stream in 0..streams {
            assert_eq!(track.done_on(stream), stream + 1);
        }
        track.done_at(9, 5);
        assert_eq!(track.done_on(9), 10, "it goes on only");
        track.done_at(streams, streams + 1);
        assert_eq!(track.done_on(streams), streams + 1);
        assert_eq!(track.done_on(STREAMS as u64), 0, "the oldest is forgotten");
    }
}

//! The recorder's rings, read while they are written.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use crate::seqlock_ring::{RingSlot, SeqlockRing};

/// A record of two words, which have to be equal.
#[derive(Default)]
struct Pair([AtomicU64; 2]);

impl RingSlot for Pair {
    type Record = [u64; 2];

    fn copy(&self) -> [u64; 2] {
        self.0.each_ref().map(|word| word.load(Ordering::Relaxed))
    }
}

#[test]
fn a_record_that_is_read_is_whole_and_the_one_that_was_asked_for() {
    loom::model(|| {
        let ring = Arc::new(SeqlockRing::<Pair>::new(2));
        let writing = Arc::clone(&ring);
        let writer = thread::spawn(move || {
            // The third overwrites the first.
            for number in 0..3 {
                writing.begin(number, 1);
                for word in &writing.slot(number).0 {
                    word.store(number + 1, Ordering::Relaxed);
                }
                writing.publish(number + 1);
            }
        });
        if let Some(record) = ring.get(0) {
            assert_eq!(record, [1; 2]);
        }
        let read = ring.read();
        for (number, record) in (read.first..).zip(&read.records) {
            assert_eq!(*record, [number + 1; 2]);
        }
        writer.join().unwrap();
        let read = ring.read();
        assert_eq!((read.first, &read.records[..]), (1, &[[2; 2], [3; 2]][..]));
    });
}

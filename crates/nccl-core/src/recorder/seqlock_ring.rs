//! A ring of small records that one thread writes and any other thread may copy; neither waits for the other.
//!
//! Records are numbered from 0; record `n` lies in slot `n` modulo the length. `begun` is the number of records that
//! may have been touched, `written` the number that are complete:
//!
//! ```text
//! writer                                    reader
//!   begun = from + count                      written (acquire)
//!   release fence                             copies the last slots
//!   writes the slots                          acquire fence
//!   written = until (release)                 begun: what it may have overtaken is thrown away
//! ```
//!
//! If a copied word belongs to a newer record, the fences make that record's `begun` visible as well, and the older
//! record is not returned. The writer holds the communicator's lock, but the ring requires only that there is one
//! writer at a time. `tests/loom/rings.rs` explores the interleavings.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The place of one record, made of atomic words, so that it may be copied while it is written.
pub(crate) trait RingSlot: Default {
    type Record;

    /// Reads the words, relaxed.
    fn copy(&self) -> Self::Record;
}

pub(crate) struct SeqlockRing<S> {
    /// Their number is a power of two.
    slots: Box<[S]>,
    begun: AtomicU64,
    written: AtomicU64,
}

/// The records of a ring that were complete when it was read, oldest first.
pub(crate) struct Copied<R> {
    /// The number of the first record.
    pub(crate) first: u64,
    pub(crate) records: Vec<R>,
}

impl<S: RingSlot> SeqlockRing<S> {
    /// A ring that keeps the last `length` records.
    pub(crate) fn new(length: usize) -> Self {
        assert!(length.is_power_of_two(), "a mask finds the slot");
        Self {
            slots: (0..length).map(|_| S::default()).collect(),
            begun: AtomicU64::new(0),
            written: AtomicU64::new(0),
        }
    }

    /// Announces `count` records from number `from` on; `from` records have been written before.
    #[inline]
    pub(crate) fn begin(&self, from: u64, count: usize) {
        self.begun.store(from + count as u64, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// The slot of record `number`, which was announced.
    #[inline]
    pub(crate) fn slot(&self, number: u64) -> &S {
        // In range: the length is a power of two, and not 0.
        &self.slots[number as usize & (self.slots.len() - 1)]
    }

    /// Returns the slots of up to `count` announced records from number `from` on: as many as are contiguous.
    #[inline]
    pub(crate) fn slots(&self, from: u64, count: usize) -> &[S] {
        let start = from as usize & (self.slots.len() - 1);
        let rest = &self.slots[start..];
        &rest[..count.min(rest.len())]
    }

    /// Makes all records before number `until` readable.
    #[inline]
    pub(crate) fn publish(&self, until: u64) {
        self.written.store(until, Ordering::Release);
    }

    /// How many records were written so far.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// Record `number`, unless it was overwritten or is not there yet.
    pub(crate) fn get(&self, number: u64) -> Option<S::Record> {
        if number >= self.written.load(Ordering::Acquire) {
            return None;
        }
        let record = self.slot(number).copy();
        fence(Ordering::Acquire);
        let begun = self.begun.load(Ordering::Relaxed);
        (number + self.slots.len() as u64 >= begun).then_some(record)
    }

    /// The last record, unless it is overwritten while it is read.
    pub(crate) fn last(&self) -> Option<S::Record> {
        let last = self.written.load(Ordering::Acquire).checked_sub(1)?;
        self.get(last)
    }

    /// Copies the complete records.
    pub(crate) fn read(&self) -> Copied<S::Record> {
        let length = self.slots.len() as u64;
        let written = self.written.load(Ordering::Acquire);
        let oldest = written.saturating_sub(length);
        let mut records: Vec<_> = (oldest..written)
            .map(|number| self.slot(number).copy())
            .collect();
        fence(Ordering::Acquire);
        let begun = self.begun.load(Ordering::Relaxed);
        let first = begun.saturating_sub(length).clamp(oldest, written);
        records.drain(..(first - oldest) as usize);
        Copied { first, records }
    }
}

impl<R> Copied<R> {
    /// Record `number`, unless it was overwritten or is not there yet.
    pub(crate) fn get(&self, number: u64) -> Option<&R> {
        let index = number.checked_sub(self.first)?;
        self.records.get(usize::try_from(index).ok()?)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Pair([AtomicU64; 2]);

    impl RingSlot for Pair {
        type Record = [u64; 2];

        fn copy(&self) -> [u64; 2] {
            self.0.each_ref().map(|word| word.load(Ordering::Relaxed))
        }
    }

    fn write(ring: &SeqlockRing<Pair>, number: u64) {
        ring.begin(number, 1);
        for word in &ring.slot(number).0 {
            word.store(number * 10, Ordering::Relaxed);
        }
        ring.publish(number + 1);
    }

    #[test]
    fn the_last_records_are_read_in_their_order() {
        let ring = SeqlockRing::<Pair>::new(4);
        assert!(ring.read().records.is_empty());
        for number in 0..7 {
            write(&ring, number);
        }
        let copied = ring.read();
        assert_eq!(copied.first, 3);
        assert_eq!(copied.records, [[30; 2], [40; 2], [50; 2], [60; 2]]);
        assert_eq!(copied.get(4), Some(&[40; 2]));
        assert_eq!(copied.get(2), None);
        assert_eq!(copied.get(7), None);
        for (number, there) in [(2, false), (3, true), (6, true), (7, false)] {
            let record = ring.get(number);
            assert_eq!(record, there.then_some([number * 10; 2]));
        }
    }

    #[test]
    fn a_record_that_is_being_overwritten_is_not_handed_out() {
        let ring = SeqlockRing::<Pair>::new(4);
        for number in 0..4 {
            write(&ring, number);
        }
        ring.begin(4, 2);
        assert_eq!(ring.read().first, 2);
        assert_eq!(ring.read().records.len(), 2);
        assert_eq!((ring.get(1), ring.get(2)), (None, Some([20; 2])));
        ring.begin(4, 400);
        assert!(ring.read().records.is_empty());
    }

    #[test]
    fn announced_slots_go_on_at_the_start() {
        let ring = SeqlockRing::<Pair>::new(4);
        assert_eq!(ring.slots(6, 3).len(), 2);
        assert_eq!(ring.slots(8, 1).len(), 1);
        assert_eq!(ring.slots(8, 9).len(), 4);
    }
}

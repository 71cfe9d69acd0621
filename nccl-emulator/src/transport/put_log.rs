//! The last puts and signals from one rank to another, from which the other rank knows for which puts it has not waited.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::exchange::SpanCell;
use cuda_emulator::memory::Span;

/// How many puts and signals are kept.
pub(crate) const KEPT: u64 = 32;

/// The last puts and signals from a source to a destination. Written by the source.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct PutLog {
    /// The number of the last entry.
    last: AtomicU64,
    cells: [Cell; KEPT as usize],
}

#[derive(Debug)]
#[repr(C, align(64))]
struct Cell {
    /// The number of the entry, from 1; 0 while the cell is written.
    number: AtomicU64,
    signal: AtomicU64,
    /// 0 for a put.
    count: AtomicU64,
    span: SpanCell,
}

/// A put that has begun, or a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its number among those of this source and destination, from 1, in the order in which the source has come to them.
    pub(crate) number: u64,
    /// The signal, or the one that follows the put.
    pub(crate) signal: usize,
    pub(crate) action: Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// A put into this range.
    Put(Span),
    /// A signal; so many of its number have been sent with it.
    Signal(u64),
}

impl PutLog {
    /// Adds an entry. The callers of the source take turns.
    pub(crate) fn add(&self, signal: usize, action: Action) {
        let number = self.last() + 1;
        let cell = &self.cells[(number % KEPT) as usize];
        cell.number.store(0, Ordering::Relaxed);
        // A reader that sees a part of the new entry does not see the old number.
        fence(Ordering::SeqCst);
        cell.signal.store(signal as u64, Ordering::Relaxed);
        match action {
            Action::Put(span) => {
                cell.count.store(0, Ordering::Relaxed);
                cell.span.store(&span);
            }
            Action::Signal(count) => cell.count.store(count, Ordering::Relaxed),
        }
        cell.number.store(number, Ordering::Release);
        self.last.store(number, Ordering::Release);
        // What the source does next comes after this for the destination as well.
        fence(Ordering::SeqCst);
    }

    /// Returns the number of the last entry; 0 for none.
    pub(crate) fn last(&self) -> u64 {
        self.last.load(Ordering::Acquire)
    }

    /// Returns the entries that are kept.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry> {
        // What the destination has read came before this.
        fence(Ordering::SeqCst);
        let cells = match self.last() {
            0 => &[][..],
            _ => &self.cells[..],
        };
        cells.iter().filter_map(Cell::load)
    }
}

impl Cell {
    fn load(&self) -> Option<Entry> {
        let number = self.number.load(Ordering::Acquire);
        let signal = self.signal.load(Ordering::Relaxed) as usize;
        let action = match self.count.load(Ordering::Relaxed) {
            0 => Action::Put(self.span.load()),
            count => Action::Signal(count),
        };
        fence(Ordering::SeqCst);
        let is_whole = number != 0 && self.number.load(Ordering::Relaxed) == number;
        is_whole.then_some(Entry {
            number,
            signal,
            action,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> PutLog {
        let cell = || Cell {
            number: AtomicU64::new(0),
            signal: AtomicU64::new(0),
            count: AtomicU64::new(0),
            span: SpanCell::default(),
        };
        PutLog {
            last: AtomicU64::new(0),
            cells: std::array::from_fn(|_| cell()),
        }
    }

    fn put(number: u64) -> Action {
        Action::Put(Span {
            index: number as u32,
            generation: number as u32,
            offset: number,
            len: number,
        })
    }

    #[test]
    fn the_last_entries_are_kept() {
        let log = log();
        assert_eq!(log.entries().count(), 0);
        for number in 1..=2 * KEPT + 3 {
            match number % 2 {
                0 => log.add(7, Action::Signal(number)),
                _ => log.add(3, put(number)),
            }
        }
        let mut entries: Vec<Entry> = log.entries().collect();
        entries.sort_by_key(|entry| entry.number);
        let numbers: Vec<u64> = entries.iter().map(|entry| entry.number).collect();
        assert_eq!(numbers, (KEPT + 4..=2 * KEPT + 3).collect::<Vec<_>>());
        for entry in entries {
            let expected = match entry.number % 2 {
                0 => (7, Action::Signal(entry.number)),
                _ => (3, put(entry.number)),
            };
            assert_eq!((entry.signal, entry.action), expected);
        }
    }

    #[test]
    fn a_reader_sees_whole_entries_while_they_are_overwritten() {
        const ALL: u64 = 200_000;
        let log = log();
        std::thread::scope(|scope| {
            scope.spawn(|| (1..=ALL).for_each(|number| log.add(number as usize, put(number))));
            while log.last() < ALL {
                for entry in log.entries() {
                    let whole = (entry.number as usize, put(entry.number));
                    assert_eq!((entry.signal, entry.action), whole);
                }
            }
        });
    }
}

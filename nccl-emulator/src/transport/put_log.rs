//! The puts from one rank into the windows of another, for that rank to see which it has not waited for.

use std::sync::atomic::{AtomicU64, Ordering};

use super::exchange::SpanCell;
use cuda_emulator::memory::Span;

/// How many puts are kept.
const KEPT: usize = 16;

/// The last puts from a source to a destination. Written by the source.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct PutLog {
    begun: AtomicU64,
    puts: [PutCell; KEPT],
}

#[derive(Debug)]
#[repr(C, align(64))]
struct PutCell {
    /// The number of the put, from 1; 0 while the cell is written.
    number: AtomicU64,
    signal: AtomicU64,
    count: AtomicU64,
    span: SpanCell,
}

/// A put that has begun, and may be over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Put {
    /// Its number among the puts of this source to this destination, from 1.
    pub(crate) number: u64,
    /// The signal that follows it.
    pub(crate) signal: usize,
    /// How many of these signals the destination has to have taken to have taken that one.
    pub(crate) count: u64,
    /// Where it writes.
    pub(crate) span: Span,
}

impl PutLog {
    /// Notes a put that is about to write; its number is ignored.
    pub(crate) fn note(&self, put: &Put) {
        let number = self.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let cell = &self.puts[number as usize % KEPT];
        cell.number.store(0, Ordering::SeqCst);
        cell.signal.store(put.signal as u64, Ordering::Relaxed);
        cell.count.store(put.count, Ordering::Relaxed);
        cell.span.store(&put.span);
        cell.number.store(number, Ordering::SeqCst);
    }

    /// Returns the puts that are kept.
    pub(crate) fn all(&self) -> impl Iterator<Item = Put> {
        let is_empty = self.begun.load(Ordering::SeqCst) == 0;
        let cells = if is_empty { &[][..] } else { &self.puts[..] };
        cells.iter().filter_map(PutCell::load)
    }
}

impl PutCell {
    fn load(&self) -> Option<Put> {
        let number = self.number.load(Ordering::SeqCst);
        let put = Put {
            number,
            signal: self.signal.load(Ordering::Relaxed) as usize,
            count: self.count.load(Ordering::Relaxed),
            span: self.span.load(),
        };
        std::sync::atomic::fence(Ordering::SeqCst);
        let is_whole = number != 0 && self.number.load(Ordering::SeqCst) == number;
        is_whole.then_some(put)
    }
}

//! The rendezvous of a collective, whose blocks all ranks of a communicator process together.
//!
//! Every rank writes its arguments (its [`Offer`]) and arrives. The last rank to arrive compares the
//! offers and opens the collective. From then on every running rank takes block after block, of any
//! rank's data, until none is left. Thus no block waits for a rank without a core, and the last rank
//! to arrive completes a small collective alone.
//!
//! ```text
//! arrived = n * k ──last arrival──▶ word = k | 0        open: blocks are taken from the word
//!                 └──offers differ──▶ word = k | SPOILED  never completes
//! any word ──a rank that has arrived gives up──▶ word = k | WITHDRAWN  no block is taken any more
//! word = k | blocks, all finished ──▶ done = k           everybody leaves; only then can anyone arrive at k + 1
//! ```

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::exchange::SpanCell;
use cuda_emulator::memory::Span;

/// The arguments of one rank for a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Function, type, operator, root and event flag in one number, which must be the same on all ranks.
    pub(crate) signature: u64,
    /// The number of elements.
    pub(crate) count: u64,
    /// The bits of the operator's scalar.
    pub(crate) scalar: u64,
    /// The rank's input.
    pub(crate) send: Span,
    /// The rank's output.
    pub(crate) receive: Span,
}

/// An offer in shared memory. Written by its rank before it arrives.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct OfferCell {
    signature: AtomicU64,
    count: AtomicU64,
    scalar: AtomicU64,
    send: SpanCell,
    receive: SpanCell,
}

impl OfferCell {
    pub(crate) fn store(&self, offer: &Offer) {
        self.signature.store(offer.signature, Ordering::Relaxed);
        self.count.store(offer.count, Ordering::Relaxed);
        self.scalar.store(offer.scalar, Ordering::Relaxed);
        self.send.store(&offer.send);
        self.receive.store(&offer.receive);
    }

    /// Returns the offer. Stable from the last arrival until the collective is done.
    pub(crate) fn load(&self) -> Offer {
        Offer {
            signature: self.signature.load(Ordering::Relaxed),
            count: self.count.load(Ordering::Relaxed),
            scalar: self.scalar.load(Ordering::Relaxed),
            send: self.send.load(),
            receive: self.receive.load(),
        }
    }
}

/// The state of a collective, for a rank that has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// A rank has not arrived yet.
    Waiting,
    /// Blocks can be taken.
    Open,
    /// The offers differ, so the collective never completes.
    Spoiled,
    /// A rank has given the collective up.
    Withdrawn,
}

/// The result of [`Collective::take`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The caller works on the block of this number.
    Block(u32),
    /// No block is left.
    Nothing,
    /// A rank has given the collective up.
    Withdrawn,
}

/// The collective in flight.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Collective {
    arrived: AtomicU64,
    word: AtomicU64,
    done: AtomicU64,
    finished: AtomicU32,
}

const SPOILED: u64 = 1 << 31;
const WITHDRAWN: u64 = 1 << 30;
const INDEX: u64 = WITHDRAWN - 1;

fn belongs(word: u64, number: u64) -> bool {
    word >> 32 == number & 0xffff_ffff
}

/// Whether a word is that of a later collective, so that `number` is done.
fn is_later(word: u64, number: u64) -> bool {
    ((word >> 32) as u32)
        .wrapping_sub(number as u32)
        .cast_signed()
        > 0
}

impl Collective {
    /// Arrives at collective `number` (the first of a communicator is 1). Returns true for the last
    /// rank, which then calls [`Collective::open`] or [`Collective::spoil`].
    pub(crate) fn arrive(&self, number: u64, ranks: u64) -> bool {
        self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == number * ranks
    }

    /// Opens collective `number`, unless a rank has given it up.
    pub(crate) fn open(&self, number: u64) {
        // Nonzero after a collective that was given up in the middle.
        self.finished.store(0, Ordering::Relaxed);
        self.begin(number, 0);
    }

    /// Marks collective `number` as never completing, unless a rank has given it up.
    pub(crate) fn spoil(&self, number: u64) {
        self.begin(number, SPOILED);
    }

    fn begin(&self, number: u64, bits: u64) {
        // The error is a word of this collective: that of a rank that has given it up.
        let _ = self
            .word
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |word| {
                (!belongs(word, number)).then_some(number << 32 | bits)
            });
    }

    /// Gives up collective `number`, at which the caller has arrived, unless it is done: no block of it is taken any
    /// more. A block that the caller has taken is never counted.
    pub(crate) fn withdraw(&self, number: u64) {
        if self.is_done(number) {
            return;
        }
        let withdraw = |word| match belongs(word, number) {
            // The others still have to learn that the offers differ.
            true => (word & SPOILED == 0).then_some(word | WITHDRAWN),
            // It was done meanwhile, and a rank has given up the next one.
            false => (!is_later(word, number)).then_some(number << 32 | WITHDRAWN),
        };
        let _ = self
            .word
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, withdraw);
    }

    /// Returns the state of collective `number`. Says `Waiting` for one that is done if a rank has given up the next one.
    pub(crate) fn state(&self, number: u64) -> Arrival {
        let word = self.word.load(Ordering::SeqCst);
        if !belongs(word, number) {
            Arrival::Waiting
        } else if word & WITHDRAWN != 0 {
            Arrival::Withdrawn
        } else if word & SPOILED != 0 {
            Arrival::Spoiled
        } else {
            Arrival::Open
        }
    }

    /// Takes a block of the open collective.
    pub(crate) fn take(&self, blocks: u32) -> Taken {
        // No overflow: every rank adds past the end at most once before the next collective opens.
        if self.word.load(Ordering::Relaxed) & INDEX >= u64::from(blocks) {
            return Taken::Nothing;
        }
        let word = self.word.fetch_add(1, Ordering::AcqRel);
        match (word & INDEX) as u32 {
            _ if word & WITHDRAWN != 0 => Taken::Withdrawn,
            index if index < blocks => Taken::Block(index),
            _ => Taken::Nothing,
        }
    }

    /// Counts a block as finished. Returns true for the last block; the caller then rings all ranks.
    pub(crate) fn finish(&self, number: u64, blocks: u32) -> bool {
        if self.finished.fetch_add(1, Ordering::AcqRel) + 1 != blocks {
            return false;
        }
        self.finished.store(0, Ordering::Relaxed);
        self.done.store(number, Ordering::SeqCst);
        true
    }

    /// Returns the number of finished blocks of the open collective. Zero again once the last one is finished.
    pub(crate) fn finished(&self) -> u32 {
        self.finished.load(Ordering::Acquire)
    }

    /// Whether collective `number` is complete.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.done.load(Ordering::SeqCst) >= number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_of_every_collective_is_taken_once_by_somebody() {
        const RANKS: u64 = 3;
        const BLOCKS: u32 = 4;
        const ROUNDS: u64 = 5_000;
        let collective = Collective::default();
        let taken: Vec<AtomicU32> = (0..ROUNDS).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for _ in 0..RANKS {
                scope.spawn(|| {
                    for number in 1..=ROUNDS {
                        if collective.arrive(number, RANKS) {
                            collective.open(number);
                        }
                        while collective.state(number) == Arrival::Waiting {
                            std::thread::yield_now();
                        }
                        while let Taken::Block(block) = collective.take(BLOCKS) {
                            taken[number as usize - 1]
                                .fetch_add(1 << (8 * block), Ordering::Relaxed);
                            collective.finish(number, BLOCKS);
                        }
                        while !collective.is_done(number) {
                            std::thread::yield_now();
                        }
                    }
                });
            }
        });
        assert!(
            taken
                .iter()
                .all(|t| t.load(Ordering::Relaxed) == 0x0101_0101)
        );
    }

    #[test]
    fn a_collective_that_a_rank_has_withdrawn_from_gives_out_no_blocks() {
        let collective = Collective::default();
        // Before the last arrival.
        assert!(!collective.arrive(1, 2));
        collective.withdraw(1);
        assert!(collective.arrive(1, 2));
        collective.open(1);
        assert_eq!(collective.state(1), Arrival::Withdrawn);
        assert_eq!(collective.take(2), Taken::Withdrawn);
        // In the middle.
        assert!(!collective.arrive(2, 2));
        assert!(collective.arrive(2, 2));
        collective.open(2);
        assert_eq!(collective.take(3), Taken::Block(0));
        assert!(!collective.finish(2, 3));
        collective.withdraw(2);
        assert_eq!(collective.take(3), Taken::Withdrawn);
        assert_eq!(collective.state(2), Arrival::Withdrawn);
        // The count of a collective that was given up is not another one's.
        collective.open(3);
        assert_eq!(collective.take(1), Taken::Block(0));
        assert!(collective.finish(3, 1));
        collective.withdraw(3);
        assert_eq!(collective.state(3), Arrival::Open);
        // What differs stays so.
        collective.spoil(4);
        collective.withdraw(4);
        assert_eq!(collective.state(4), Arrival::Spoiled);
    }

    #[test]
    fn a_rank_that_is_slow_in_a_collective_sees_its_end_although_another_has_given_up_the_next_one()
    {
        let collective = Collective::default();
        collective.open(1);
        assert_eq!(collective.take(1), Taken::Block(0));
        assert!(collective.finish(1, 1));
        collective.withdraw(2);
        // It finds no block, and its own end of the first one does not undo the second one's.
        assert_ne!(collective.take(1), Taken::Block(0));
        assert!(collective.is_done(1));
        collective.done.store(0, Ordering::Relaxed);
        collective.withdraw(1);
        assert_eq!(collective.state(2), Arrival::Withdrawn);
    }
}

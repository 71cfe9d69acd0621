//! The exchange of one message at a time between two ranks.
//!
//! Each end posts its half: a range of its own pool and the number of the message (the first
//! between a source and a destination is 1). Both stores are sequentially consistent, so at least
//! one of the two ends sees both halves. The first end to swap the message's number into the
//! exchange's word has claimed the message.
//!
//! ```text
//! word       = number of the message (low 32 bits) | what is wrong with it (3 bits) | chunks handed out (29 bits)
//! idle       ──claim (either end)──▶  claimed, chunk 0 is the claimant's
//! claimed    ──take (either end)───▶  the next chunk is the taker's
//! claimed    ──spoil───────────────▶  spoiled: never completes; the ends look at what is wrong
//! idle, claimed ──withdraw (either end)──▶ spoiled: no chunk is handed out any more
//! claimed    ──last chunk copied───▶  idle, `done` = the message's number
//! ```
//!
//! The numbers in the word only grow: the word of a later message means that the earlier ones are over.
//!
//! Only the two ends touch an exchange, and an end posts message n + 1 only when it knows that n is
//! done. So the holder of a chunk of message n may read both halves: neither is posted anew before
//! that chunk is counted.
//!
//! An end that gives up a message (an abort) withdraws it. The other end may then still hold a chunk: it has said so in
//! its [`RankBlock::busy`](super::RankBlock) before it took the chunk.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::direction::Direction;
use cuda_emulator::memory::Span;

/// The messages that an owner has posted for one peer. Only the owner writes.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Side {
    send: Half,
    receive: Half,
}

#[derive(Debug, Default)]
#[repr(C)]
struct Half {
    number: AtomicU64,
    span: SpanCell,
}

/// A span in shared memory.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct SpanCell {
    index: AtomicU32,
    generation: AtomicU32,
    offset: AtomicU64,
    len: AtomicU64,
}

impl SpanCell {
    pub(crate) fn store(&self, span: &Span) {
        self.index.store(span.index, Ordering::Relaxed);
        self.generation.store(span.generation, Ordering::Relaxed);
        self.offset.store(span.offset, Ordering::Relaxed);
        self.len.store(span.len, Ordering::Relaxed);
    }

    pub(crate) fn load(&self) -> Span {
        Span {
            index: self.index.load(Ordering::Relaxed),
            generation: self.generation.load(Ordering::Relaxed),
            offset: self.offset.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
        }
    }
}

impl Side {
    fn half(&self, direction: Direction) -> &Half {
        match direction {
            Direction::Send => &self.send,
            Direction::Receive => &self.receive,
        }
    }

    /// Returns the number of the last message that the owner posted in this direction. Only the
    /// owner may rely on it.
    pub(crate) fn last(&self, direction: Direction) -> u64 {
        self.half(direction).number.load(Ordering::Relaxed)
    }

    /// Posts message `number`. Only the owner calls this, once the previous message is done.
    pub(crate) fn post(&self, direction: Direction, number: u64, span: &Span) {
        let half = self.half(direction);
        half.span.store(span);
        half.number.store(number, Ordering::SeqCst);
    }

    /// Compares message `number` with the last one that the owner has posted: `Less` if the owner
    /// has posted a later message, so that this one is done; `Greater` if it has not posted this one.
    pub(crate) fn compare(&self, direction: Direction, number: u64) -> std::cmp::Ordering {
        number.cmp(&self.half(direction).number.load(Ordering::SeqCst))
    }

    /// Returns the range of the owner's last posted message. Stable for the holder of a chunk of the
    /// message.
    pub(crate) fn posted(&self, direction: Direction) -> Posted {
        Posted(self.half(direction).span.load())
    }
}

/// A peer's half of a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Posted(pub(crate) Span);

/// The fault of a message that can never complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spoiled {
    /// The two ends gave different sizes.
    SizeMismatch = 1,
    /// The sender's memory may not be read.
    BadSource = 2,
    /// The receiver's memory may not be written.
    BadDestination = 3,
    /// One end has given the message up.
    Withdrawn = 4,
}

/// The result of [`Exchange::claim`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The caller copies the chunk of this number. With chunk 0 the caller has claimed the message.
    Chunk(u32),
    /// No chunk is left; the other end copies the rest.
    Theirs,
    /// The message will never complete.
    Spoiled(Spoiled),
}

/// The message in flight between a source and a destination. Only the two ends write.
#[derive(Debug, Default)]
#[repr(C, align(32))]
pub(crate) struct Exchange {
    word: AtomicU64,
    done: AtomicU64,
    /// The number of a message of several chunks (low 32 bits) | its copied chunks (32 bits).
    copied: AtomicU64,
    source_connected: AtomicU32,
    destination_connected: AtomicU32,
}

// The two exchanges of a pair, one in each direction, share a cache line.
const _: () = assert!(size_of::<Exchange>() == 32);

const INDEX_BITS: u32 = 29;
const INDEX: u64 = (1 << INDEX_BITS) - 1;

fn fresh(number: u64) -> u64 {
    number << 32
}

fn belongs(word: u64, number: u64) -> bool {
    word >> 32 == number & 0xffff_ffff
}

/// Whether a word is that of a later message.
fn is_later(word: u64, number: u64) -> bool {
    ((word >> 32) as u32)
        .wrapping_sub(number as u32)
        .cast_signed()
        > 0
}

fn spoiled(word: u64) -> Option<Spoiled> {
    match word >> INDEX_BITS & 7 {
        1 => Some(Spoiled::SizeMismatch),
        2 => Some(Spoiled::BadSource),
        3 => Some(Spoiled::BadDestination),
        4 => Some(Spoiled::Withdrawn),
        _ => None,
    }
}

impl Exchange {
    /// Takes the next chunk of message `number`, which both ends have posted. `chunks` is the number
    /// of chunks by the caller's half. After [`Claim::Chunk`] the caller must look at both halves
    /// before it copies: their sizes may differ.
    pub(crate) fn claim(&self, number: u64, chunks: u32) -> Claim {
        let mut word = self.word.load(Ordering::Acquire);
        while !belongs(word, number) {
            if is_later(word, number) {
                return Claim::Theirs;
            }
            let claimed = fresh(number) | 1;
            match self.word.compare_exchange_weak(
                word,
                claimed,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Claim::Chunk(0),
                // The other end claimed it.
                Err(now) => word = now,
            }
        }
        loop {
            if let Some(why) = spoiled(word) {
                return Claim::Spoiled(why);
            }
            if word & INDEX >= u64::from(chunks) || !belongs(word, number) {
                return Claim::Theirs;
            }
            match self.word.compare_exchange_weak(
                word,
                word + 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Claim::Chunk((word & INDEX) as u32),
                Err(now) => word = now,
            }
        }
    }

    /// Marks message `number` as never completing. Returns true for the first caller.
    pub(crate) fn spoil(&self, number: u64, why: Spoiled) -> bool {
        self.word
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
                (belongs(word, number) && spoiled(word).is_none())
                    .then_some(word | (why as u64) << INDEX_BITS)
            })
            .is_ok()
    }

    /// Gives up message `number`, which the caller has posted, unless it is done: no chunk of it is handed out any more.
    /// A chunk that the caller holds is never counted.
    pub(crate) fn withdraw(&self, number: u64) {
        if self.is_done(number) {
            return;
        }
        let withdraw = |word| {
            let word = match belongs(word, number) {
                true => word,
                false if is_later(word, number) => return None,
                false => fresh(number),
            };
            spoiled(word)
                .is_none()
                .then_some(word | (Spoiled::Withdrawn as u64) << INDEX_BITS)
        };
        // The error is a word that says already that the message is over.
        let _ = self
            .word
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, withdraw);
    }

    /// Returns the fault of message `number`, if it has one.
    pub(crate) fn spoiled(&self, number: u64) -> Option<Spoiled> {
        let word = self.word.load(Ordering::Acquire);
        if belongs(word, number) {
            spoiled(word)
        } else {
            None
        }
    }

    /// Counts a chunk of message `number`, which has `chunks`, as copied. Returns true if that completes
    /// the message; the caller then tells the other end.
    pub(crate) fn finish(&self, number: u64, chunks: u32) -> bool {
        if chunks != 1 {
            // The count of an earlier message that was given up is not this one's.
            let count = |copied| match belongs(copied, number) {
                true => copied + 1,
                false => fresh(number) | 1,
            };
            let mut before = self.copied.load(Ordering::Acquire);
            while let Err(now) = self.copied.compare_exchange_weak(
                before,
                count(before),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                before = now;
            }
            if count(before) as u32 != chunks {
                return false;
            }
        }
        self.done.store(number, Ordering::Release);
        true
    }

    /// Returns the number of copied chunks of message `number`, which has `chunks`.
    pub(crate) fn copied(&self, number: u64, chunks: u32) -> u32 {
        if self.is_done(number) {
            return chunks;
        }
        match self.copied.load(Ordering::Acquire) {
            copied if belongs(copied, number) => (copied as u32).min(chunks),
            _ => 0,
        }
    }

    /// Whether message `number` is complete.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.done.load(Ordering::Acquire) >= number
    }

    fn connected(&self, direction: Direction) -> &AtomicU32 {
        match direction {
            Direction::Send => &self.source_connected,
            Direction::Receive => &self.destination_connected,
        }
    }

    /// Marks the end that sees the traffic as `direction` as ready to use the connection.
    pub(crate) fn connect(&self, direction: Direction) {
        self.connected(direction).store(1, Ordering::SeqCst);
    }

    /// Whether the end that sees the traffic as `direction` is ready.
    pub(crate) fn is_connected(&self, direction: Direction) -> bool {
        self.connected(direction).load(Ordering::SeqCst) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    fn span(len: u64) -> Span {
        Span {
            index: 1,
            generation: 2,
            offset: 3,
            len,
        }
    }

    #[test]
    fn each_chunk_of_each_message_is_copied_once() {
        const MESSAGES: u64 = 20_000;
        const CHUNKS: u32 = 3;
        let exchange = Exchange::default();
        let sides = [Side::default(), Side::default()];
        let taken: Vec<AtomicU64> = (0..MESSAGES).map(|_| AtomicU64::new(0)).collect();
        let end = |me: usize, direction: Direction, other: Direction| {
            for number in 1..=MESSAGES {
                sides[me].post(direction, number, &span(3));
                while !exchange.is_done(number) {
                    if sides[1 - me].compare(other, number) != std::cmp::Ordering::Equal {
                        std::hint::spin_loop();
                        continue;
                    }
                    if let Claim::Chunk(chunk) = exchange.claim(number, CHUNKS) {
                        assert_eq!(sides[1 - me].posted(other).0, span(3));
                        taken[number as usize - 1].fetch_add(1 << (8 * chunk), Ordering::Relaxed);
                        exchange.finish(number, CHUNKS);
                    } else {
                        std::thread::yield_now();
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| end(0, Direction::Send, Direction::Receive));
            scope.spawn(|| end(1, Direction::Receive, Direction::Send));
        });
        assert!(
            taken
                .iter()
                .all(|t| t.load(Ordering::Relaxed) == 0x0001_0101)
        );
    }

    #[test]
    fn a_spoiled_message_is_spoiled_for_both_ends_and_only_once() {
        let exchange = Exchange::default();
        assert_eq!(exchange.claim(1, 1), Claim::Chunk(0));
        let barrier = Barrier::new(2);
        let first = std::thread::scope(|scope| {
            let ends: Vec<_> = [Spoiled::BadSource, Spoiled::BadSource]
                .map(|why| {
                    scope.spawn({
                        let (exchange, barrier) = (&exchange, &barrier);
                        move || {
                            barrier.wait();
                            exchange.spoil(1, why)
                        }
                    })
                })
                .into_iter()
                .collect();
            ends.into_iter()
                .map(|end| end.join().unwrap())
                .filter(|&first| first)
                .count()
        });
        assert_eq!(first, 1);
        assert_eq!(exchange.claim(1, 1), Claim::Spoiled(Spoiled::BadSource));
        assert!(!exchange.is_done(1));
        // The next message of a pair is not tainted by an old word.
        assert_eq!(exchange.claim(2, 1), Claim::Chunk(0));
    }

    #[test]
    fn a_message_that_an_end_has_withdrawn_is_claimed_by_nobody() {
        let exchange = Exchange::default();
        let withdrawn = Claim::Spoiled(Spoiled::Withdrawn);
        exchange.withdraw(1);
        assert_eq!(exchange.claim(1, 1), withdrawn);
        assert!(!exchange.is_done(1));
        // In the middle: what was handed out is copied, and nothing more.
        assert_eq!(exchange.claim(2, 3), Claim::Chunk(0));
        assert_eq!(exchange.claim(2, 3), Claim::Chunk(1));
        exchange.withdraw(2);
        assert!(!exchange.finish(2, 3));
        assert_eq!(exchange.claim(2, 3), withdrawn);
        exchange.withdraw(2);
        // The count of a message that was given up is not another one's.
        assert_eq!(exchange.claim(3, 2), Claim::Chunk(0));
        assert!(!exchange.finish(3, 2));
        assert_eq!(exchange.claim(3, 2), Claim::Chunk(1));
        assert!(exchange.finish(3, 2));
        // What is done cannot be withdrawn.
        exchange.withdraw(3);
        assert!(exchange.is_done(3) && exchange.spoiled(3).is_none());
        // An end that is slow to see that does not take it for the next one, nor undoes the withdrawal of the next one.
        exchange.withdraw(4);
        assert_eq!(exchange.claim(3, 2), Claim::Theirs);
        exchange.done.store(2, Ordering::Relaxed);
        exchange.withdraw(3);
        assert_eq!(exchange.spoiled(4), Some(Spoiled::Withdrawn));
    }

    #[test]
    fn a_message_of_one_chunk_is_done_in_one_step() {
        let exchange = Exchange::default();
        assert_eq!(exchange.claim(1, 1), Claim::Chunk(0));
        assert_eq!(exchange.claim(1, 1), Claim::Theirs);
        assert!(exchange.finish(1, 1));
        assert!(exchange.is_done(1) && !exchange.is_done(2));
    }
}

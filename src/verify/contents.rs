//! The data of an operation, and the expected contents of a buffer after it.

use nccl::ReduceOp;

use super::{Numbers, Source};
use crate::element::Element;

/// The result that one rank expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Data of ranks, in consecutive blocks.
    Copied(Vec<Block>),
    /// The data of all ranks, reduced.
    Reduced(ReduceOp),
}

/// A part of the result; it may have 0 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The sender, and the offset in its buffer in bytes (a multiple of 8); `None` for bytes that no rank sends, and
    /// that must be left unchanged.
    pub from: Option<(usize, u64)>,
    /// The size of the block.
    pub bytes: u64,
}

/// The data of one rank in one repetition.
#[derive(Debug)]
pub struct Data {
    rank: usize,
    element: Element,
    repetition: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Each block with its offset, and the end of the last one.
    Copied(Vec<(u64, Block)>),
    Reduced(Numbers),
}

impl Data {
    /// The data that `rank`, one of `ranks`, sends and receives.
    #[must_use]
    pub fn new(
        contents: Contents,
        rank: usize,
        ranks: usize,
        element: Element,
        repetition: u64,
    ) -> Self {
        let kind = match contents {
            Contents::Reduced(op) => Kind::Reduced(Numbers::new(element, op, ranks, repetition)),
            Contents::Copied(blocks) => {
                let mut begin = 0;
                let blocks = blocks.into_iter().filter(|block| block.bytes > 0);
                let placed = blocks.map(|block| {
                    let at = begin;
                    begin += block.bytes;
                    (at, block)
                });
                Kind::Copied(placed.collect())
            }
        };
        Self {
            rank,
            element,
            repetition,
            kind,
        }
    }

    /// Writes the rank's data from byte `start` on, a multiple of 8.
    pub fn fill(&self, start: u64, bytes: &mut [u8]) {
        match &self.kind {
            Kind::Copied(_) => Source::new(self.repetition, self.rank).fill(start, bytes),
            Kind::Reduced(numbers) => {
                numbers.fill(self.rank, start / self.element.size as u64, bytes);
            }
        }
    }

    /// Returns how many of the received elements, from byte `start` on, are wrong. Everything behind the last block is
    /// wrong.
    #[must_use]
    pub fn count_wrong(&self, start: u64, bytes: &[u8]) -> u64 {
        match &self.kind {
            Kind::Copied(blocks) => self.count_wrong_copies(blocks, start, bytes),
            Kind::Reduced(numbers) => numbers.count_wrong(start / self.element.size as u64, bytes),
        }
    }

    fn count_wrong_copies(&self, blocks: &[(u64, Block)], start: u64, bytes: &[u8]) -> u64 {
        let size = self.element.size;
        let (mut wrong, mut at, mut rest) = (0, start, bytes);
        while !rest.is_empty() {
            let index = blocks.partition_point(|&(begin, _)| begin <= at);
            let Some(&(begin, block)) = index.checked_sub(1).map(|index| &blocks[index]) else {
                break;
            };
            let within = at - begin;
            let Some(left) = block.bytes.checked_sub(within).filter(|&left| left > 0) else {
                break;
            };
            let (here, more) = rest.split_at(rest.len().min(left as usize));
            wrong += match block.from {
                Some((rank, offset)) => {
                    Source::new(self.repetition, rank).count_wrong(offset + within, here, size)
                }
                None => {
                    let touched = |element: &&[u8]| element.iter().any(|&byte| byte != 0);
                    here.chunks(size).filter(touched).count() as u64
                }
            };
            (at, rest) = (at + here.len() as u64, more);
        }
        wrong + rest.len().div_ceil(size) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element;

    fn sent(rank: usize, bytes: usize) -> Vec<u8> {
        let data = Data::new(Contents::Copied(Vec::new()), rank, 3, element::FLOAT, 8);
        let mut sent = vec![0; bytes];
        data.fill(0, &mut sent);
        sent
    }

    #[test]
    fn blocks_are_looked_for_where_they_belong_piece_by_piece() {
        let block = |rank, offset, bytes| Block {
            from: Some((rank, offset)),
            bytes,
        };
        let untouched = Block {
            from: None,
            bytes: 32,
        };
        let blocks = vec![
            block(2, 16, 48),
            block(0, 0, 0),
            block(1, 64, 16),
            untouched,
        ];
        let data = Data::new(Contents::Copied(blocks), 0, 3, element::FLOAT, 8);
        let mut received = sent(2, 200)[16..64].to_vec();
        received.extend_from_slice(&sent(1, 200)[64..80]);
        received.extend_from_slice(&[0; 32]);
        for piece in [8, 16, 24, 96] {
            let wrong = |received: &[u8]| -> u64 {
                let pieces = received.chunks(piece).enumerate();
                pieces
                    .map(|(n, bytes)| data.count_wrong((n * piece) as u64, bytes))
                    .sum()
            };
            assert_eq!(wrong(&received), 0, "{piece}");
            for at in [0, 47, 48, 63, 64, 95] {
                let mut spoiled = received.clone();
                spoiled[at] ^= 0x80;
                assert_eq!(wrong(&spoiled), 1, "{piece}: {at}");
            }
            let mut longer = received.clone();
            longer.extend_from_slice(&[0; 8]);
            assert_eq!(wrong(&longer), 2, "nothing belongs there");
        }
    }
}

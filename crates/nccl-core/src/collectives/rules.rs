//! The length and root rules of all collectives, in one table.
//!
//! With `n` elements and `r` ranks:
//!
//! | operation | reads | writes | in place, in one buffer of |
//! |---|---|---|---|
//! | all-reduce | n | n | n |
//! | broadcast | n, at the root | n | n |
//! | reduce | n | n, at the root | n |
//! | all-gather | n | n·r | n·r; reads block `rank` |
//! | reduce-scatter | n·r | n | n·r; writes block `rank` |
//! | all-to-all | n·r | n·r | |
//! | gather | n | n·r, at the root | n·r at the root, which reads block `root`; n elsewhere |
//! | scatter | n·r, at the root | n | n·r at the root, which writes block `root`; n elsewhere |
//!
//! `n` is the count that the C functions take.

use crate::error::{Error, ErrorKind, Result};
use crate::op::Function;
use crate::operation::OperationKind;

/// The number of elements in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// n
    Block,
    /// n for each rank
    Blocks,
}

/// The buffer that only the root has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RootOnlyBuffer {
    None,
    Send,
    Receive,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub(crate) kind: OperationKind,
    pub(crate) function: Function,
    send: Extent,
    recv: Extent,
    root: RootOnlyBuffer,
}

macro_rules! rules {
    ($($name:ident = $send:ident, $recv:ident, $root:ident;)*) => {
        $(pub(crate) const $name: Rule = Rule {
            kind: kind::$name,
            function: function::$name,
            send: Extent::$send,
            recv: Extent::$recv,
            root: RootOnlyBuffer::$root,
        };)*
    };
}

/// The operation kinds, under the names of the rows.
mod kind {
    use crate::operation::OperationKind as Kind;
    pub(super) const ALL_REDUCE: Kind = Kind::AllReduce;
    pub(super) const BROADCAST: Kind = Kind::Broadcast;
    pub(super) const REDUCE: Kind = Kind::Reduce;
    pub(super) const ALL_GATHER: Kind = Kind::AllGather;
    pub(super) const REDUCE_SCATTER: Kind = Kind::ReduceScatter;
    pub(super) const ALL_TO_ALL: Kind = Kind::AllToAll;
    pub(super) const GATHER: Kind = Kind::Gather;
    pub(super) const SCATTER: Kind = Kind::Scatter;
}

mod function {
    use crate::op::Function;
    pub(super) const ALL_REDUCE: Function = Function::AllReduce;
    pub(super) const BROADCAST: Function = Function::Broadcast;
    pub(super) const REDUCE: Function = Function::Reduce;
    pub(super) const ALL_GATHER: Function = Function::AllGather;
    pub(super) const REDUCE_SCATTER: Function = Function::ReduceScatter;
    pub(super) const ALL_TO_ALL: Function = Function::AllToAll;
    pub(super) const GATHER: Function = Function::Gather;
    pub(super) const SCATTER: Function = Function::Scatter;
}

rules! {
    ALL_REDUCE = Block, Block, None;
    BROADCAST = Block, Block, Send;
    REDUCE = Block, Block, Receive;
    ALL_GATHER = Block, Blocks, None;
    REDUCE_SCATTER = Blocks, Block, None;
    ALL_TO_ALL = Blocks, Blocks, None;
    GATHER = Block, Blocks, Receive;
    SCATTER = Blocks, Block, Send;
}

/// The rank that calls an operation, and its root.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankAndRoot {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// `None` for an operation without a root.
    pub(crate) root: Option<usize>,
}

impl RankAndRoot {
    fn is_root(self) -> bool {
        self.root.is_none_or(|root| root == self.rank)
    }
}

/// Where an in-place operation reads and writes, in elements from the start of its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InPlace {
    pub(crate) count: usize,
    pub(crate) send: usize,
    pub(crate) recv: usize,
}

impl Rule {
    /// Whether this rank needs a buffer to read.
    pub(crate) fn reads(&self, rank_and_root: RankAndRoot) -> bool {
        self.root != RootOnlyBuffer::Send || rank_and_root.is_root()
    }

    /// Whether this rank needs a buffer to write.
    pub(crate) fn writes(&self, rank_and_root: RankAndRoot) -> bool {
        self.root != RootOnlyBuffer::Receive || rank_and_root.is_root()
    }

    /// Returns the root as the C function expects it.
    pub(crate) fn root(&self, rank_and_root: RankAndRoot) -> Result<i32> {
        match rank_and_root.root {
            None => Ok(0),
            // Fits: the number of ranks was checked when the communicator was made.
            Some(root) if root < rank_and_root.ranks => Ok(root as i32),
            Some(root) => Err(Error::new(ErrorKind::NoSuchRank {
                role: "root",
                rank: root,
                world_size: rank_and_root.ranks,
            })),
        }
    }

    /// Returns the number of elements, from the lengths of this rank's buffers.
    pub(crate) fn count(
        &self,
        rank_and_root: RankAndRoot,
        send: Option<usize>,
        recv: Option<usize>,
    ) -> Result<usize> {
        if self.reads(rank_and_root) && send.is_none() {
            return Err(missing(SEND));
        }
        if self.writes(rank_and_root) && recv.is_none() {
            return Err(missing(RECEIVE));
        }
        let send = send.filter(|_| self.reads(rank_and_root));
        let recv = recv.filter(|_| self.writes(rank_and_root));
        let count = match (send, self.send, recv, self.recv) {
            (Some(length), Extent::Block, _, _) => length,
            (_, _, Some(length), Extent::Block) => length,
            (Some(length), Extent::Blocks, _, _) => blocks(SEND, length, rank_and_root.ranks)?,
            (_, _, Some(length), Extent::Blocks) => blocks(RECEIVE, length, rank_and_root.ranks)?,
            (None, _, None, _) => 0,
        };
        check(SEND, send, self.send, count, rank_and_root.ranks)?;
        check(RECEIVE, recv, self.recv, count, rank_and_root.ranks)?;
        Ok(count)
    }

    /// Returns where an in-place operation reads and writes in its buffer of `length` elements.
    pub(crate) fn in_place(&self, rank_and_root: RankAndRoot, length: usize) -> Result<InPlace> {
        let with_blocks = match (self.send, self.recv, self.root) {
            (Extent::Block, Extent::Block, _) => None,
            (Extent::Block, Extent::Blocks, RootOnlyBuffer::None) => Some((rank_and_root.rank, 0)),
            (Extent::Blocks, Extent::Block, RootOnlyBuffer::None) => Some((0, rank_and_root.rank)),
            (Extent::Block, Extent::Blocks, _) if rank_and_root.is_root() => {
                Some((rank_and_root.rank, 0))
            }
            (Extent::Blocks, Extent::Block, _) if rank_and_root.is_root() => {
                Some((0, rank_and_root.rank))
            }
            _ => None,
        };
        match with_blocks {
            None => Ok(InPlace {
                count: length,
                send: 0,
                recv: 0,
            }),
            Some((send, recv)) => {
                let count = blocks("the buffer", length, rank_and_root.ranks)?;
                Ok(InPlace {
                    count,
                    send: send * count,
                    recv: recv * count,
                })
            }
        }
    }
}

const SEND: &str = "the send buffer";
const RECEIVE: &str = "the receive buffer";

#[cold]
fn missing(buffer: &'static str) -> Error {
    Error::new(ErrorKind::NoBuffer { buffer })
}

fn blocks(buffer: &'static str, given: usize, ranks: usize) -> Result<usize> {
    if given.is_multiple_of(ranks) {
        Ok(given / ranks)
    } else {
        Err(Error::new(ErrorKind::Length {
            buffer,
            given,
            needed: given.next_multiple_of(ranks),
            rule: "a multiple of the number of ranks",
        }))
    }
}

fn check(
    buffer: &'static str,
    given: Option<usize>,
    extent: Extent,
    count: usize,
    ranks: usize,
) -> Result<()> {
    let Some(given) = given else { return Ok(()) };
    let (needed, rule) = match extent {
        Extent::Block => (count, "as many as the other buffer has for each rank"),
        Extent::Blocks => (
            count.saturating_mul(ranks),
            "one block, as long as the other buffer's, for each rank",
        ),
    };
    if given == needed {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Length {
        buffer,
        given,
        needed,
        rule,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank_and_root(rank: usize, root: Option<usize>) -> RankAndRoot {
        RankAndRoot {
            rank,
            ranks: 4,
            root,
        }
    }

    #[test]
    fn the_count_is_what_the_c_function_counts() {
        let anywhere = rank_and_root(1, None);
        assert_eq!(ALL_REDUCE.count(anywhere, Some(5), Some(5)).unwrap(), 5);
        assert_eq!(ALL_GATHER.count(anywhere, Some(5), Some(20)).unwrap(), 5);
        assert_eq!(
            REDUCE_SCATTER.count(anywhere, Some(20), Some(5)).unwrap(),
            5
        );
        assert_eq!(ALL_TO_ALL.count(anywhere, Some(20), Some(20)).unwrap(), 5);
    }

    #[test]
    fn only_the_root_needs_the_buffer_that_only_it_uses() {
        let (root, other) = (rank_and_root(2, Some(2)), rank_and_root(1, Some(2)));
        assert_eq!(GATHER.count(other, Some(5), None).unwrap(), 5);
        assert_eq!(GATHER.count(root, Some(5), Some(20)).unwrap(), 5);
        assert!(GATHER.count(root, Some(5), None).is_err());
        assert_eq!(SCATTER.count(other, None, Some(5)).unwrap(), 5);
        assert!(SCATTER.count(root, None, Some(5)).is_err());
        assert_eq!(BROADCAST.count(other, None, Some(5)).unwrap(), 5);
        assert_eq!(REDUCE.count(other, Some(5), None).unwrap(), 5);
        // A buffer that this rank does not use may have any length.
        assert_eq!(REDUCE.count(other, Some(5), Some(1)).unwrap(), 5);
    }

    #[test]
    fn a_wrong_length_is_reported_with_the_right_one() {
        let error = ALL_GATHER
            .count(rank_and_root(0, None), Some(5), Some(19))
            .unwrap_err()
            .to_string();
        assert!(error.contains("19") && error.contains("20"), "{error}");
        let error = ALL_TO_ALL
            .count(rank_and_root(0, None), Some(21), Some(21))
            .unwrap_err()
            .to_string();
        assert!(error.contains("21") && error.contains("24"), "{error}");
        assert!(
            ALL_REDUCE
                .count(rank_and_root(0, None), Some(5), Some(6))
                .is_err()
        );
        assert!(
            SCATTER
                .count(rank_and_root(2, Some(2)), Some(20), Some(4))
                .is_err()
        );
    }

    #[test]
    fn in_place_the_own_block_is_read_or_written() {
        let at = |rule: Rule, rank_and_root, length| {
            let InPlace { count, send, recv } = rule.in_place(rank_and_root, length).unwrap();
            (count, send, recv)
        };
        assert_eq!(at(ALL_REDUCE, rank_and_root(3, None), 20), (20, 0, 0));
        assert_eq!(at(ALL_GATHER, rank_and_root(3, None), 20), (5, 15, 0));
        assert_eq!(at(REDUCE_SCATTER, rank_and_root(3, None), 20), (5, 0, 15));
        assert_eq!(at(GATHER, rank_and_root(2, Some(2)), 20), (5, 10, 0));
        assert_eq!(at(GATHER, rank_and_root(1, Some(2)), 5), (5, 0, 0));
        assert_eq!(at(SCATTER, rank_and_root(2, Some(2)), 20), (5, 0, 10));
        assert_eq!(at(SCATTER, rank_and_root(0, Some(2)), 5), (5, 0, 0));
        assert!(ALL_GATHER.in_place(rank_and_root(3, None), 21).is_err());
    }

    #[test]
    fn a_root_has_to_exist() {
        assert_eq!(BROADCAST.root(rank_and_root(0, Some(3))).unwrap(), 3);
        assert!(BROADCAST.root(rank_and_root(0, Some(4))).is_err());
    }
}

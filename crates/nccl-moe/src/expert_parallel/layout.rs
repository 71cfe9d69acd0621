//! The number of experts, their ranks, and the order of rows in buffers.

use crate::error::{Error, ErrorKind, Result};

/// The order of the rows that a rank receives, in its buffer. There are `capacity` rows for each pair of a source rank
/// and an expert of this rank.
///
/// ```
/// assert_eq!(nccl::moe::ExpertLayout::default(), nccl::moe::ExpertLayout::RankMajor);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// `[source rank][own expert][capacity]`: one message to and from each rank.
    #[default]
    RankMajor,
    /// `[own expert][source rank][capacity]`: all rows of an expert are contiguous, as a grouped matrix
    /// multiplication needs them. One message for each rank and expert.
    ExpertMajor,
}

/// How a dispatch sends the rows of tokens to other ranks. The result is the same, bit for bit.
///
/// With `n` ranks, [`Rows`](Self::Rows) sends `(n - 1) / n` times [`rows`](super::ExpertParallel::rows) rows from each
/// rank, and [`AllGather`](Self::AllGather) `(n - 1) * max_tokens`, filled or not. With 8 ranks, 256 experts, 128 tokens and a
/// capacity of 64, these are 14,336 and 896 rows.
///
/// ```
/// # fn example(comm: &nccl::Communicator) {
/// use nccl::moe::{DispatchWay, ExpertParallel};
///
/// let builder = ExpertParallel::builder(comm).with(|ep| ep.way = DispatchWay::AllGather);
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DispatchWay {
    /// Each rank sends the rows of each expert to its rank, filled or not: grouped `ncclSend` and `ncclRecv`. For many
    /// ranks, and a capacity near what the experts get.
    #[default]
    Rows,
    /// Each rank sends all of its tokens to all ranks (`ncclAllGather`), once, and these copy the rows of their experts from
    /// them. For few ranks, or many choices of a token.
    AllGather,
}

/// The sizes of an [`ExpertParallel`](super::ExpertParallel), checked. A place stands for one copy of an expert, or is
/// empty; the places of a rank are consecutive. Without a placement, expert `e` is at place `e`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) ranks: usize,
    pub(super) experts: usize,
    /// Number of places of each rank.
    pub(super) own: usize,
    pub(super) top_k: usize,
    /// Maximum number of tokens of this rank.
    pub(super) max_tokens: usize,
    /// Number of rows for each pair of a source rank and a place.
    pub(super) capacity: usize,
    /// Maximum number of bytes of all payloads of a token together.
    pub(super) max_row_bytes: usize,
    pub(super) layout: Layout,
    pub(super) way: DispatchWay,
}

/// Alignment of the rows of a second payload in the staging memory.
pub(super) const ALIGNMENT: usize = 256;

/// Maximum that fits into a kernel's 31-bit counters.
const MOST: usize = i32::MAX as usize;

impl Sizes {
    /// Returns the number of places of all ranks.
    pub(super) fn places(&self) -> usize {
        self.ranks * self.own
    }

    /// Returns the number of rows that are sent, and received.
    pub(super) fn rows(&self) -> usize {
        self.places() * self.capacity
    }

    /// Returns the length of the device's list of counts: the number of tokens that this rank sends to each place, how
    /// often it named an expert that does not exist, and the number that it receives from each rank for each own place.
    pub(super) fn counts(&self) -> usize {
        2 * self.places() + 1
    }

    /// Returns the index of the first received count.
    pub(super) fn received_counts(&self) -> usize {
        self.places() + 1
    }

    /// Returns the number of rows of the staging memory: those that are sent or, in a combine, received, and the tokens of
    /// all ranks, if these are gathered.
    fn staged_rows(&self) -> usize {
        match self.way {
            DispatchWay::Rows => self.rows(),
            DispatchWay::AllGather => self.rows().max(self.ranks * self.max_tokens),
        }
    }

    /// Returns the bytes of the staging memory: rows, and a gap before those of a second payload.
    pub(super) fn staging(&self) -> usize {
        self.staged_rows() * self.max_row_bytes + ALIGNMENT
    }

    /// Returns an error for sizes that cannot work.
    pub(super) fn check(&self) -> Result<()> {
        let refuse =
            |field, reason: String| Err(Error::new(ErrorKind::InvalidConfig { field, reason }));
        let given = [
            ("experts", self.experts),
            ("top_k", self.top_k),
            ("max_tokens", self.max_tokens),
            ("capacity", self.capacity),
            ("max_row_bytes", self.max_row_bytes),
        ];
        for (field, value) in given {
            if value == 0 {
                return refuse(field, String::from("it has to be given, and at least 1"));
            }
        }
        if self.top_k > self.experts {
            let Self { experts, top_k, .. } = self;
            return refuse("top_k", format!("{top_k} of {experts} experts"));
        }
        let entries = self.max_tokens.checked_mul(self.top_k);
        if entries.is_none_or(|entries| entries > MOST - 32) {
            return refuse(
                "max_tokens",
                format!("with top_k, there are more than {MOST} entries"),
            );
        }
        let gathered = self.ranks.checked_mul(self.max_tokens);
        if self.way == DispatchWay::AllGather && gathered.is_none_or(|tokens| tokens > MOST) {
            return refuse(
                "max_tokens",
                format!("all ranks together have more than {MOST} tokens"),
            );
        }
        let rows = self.places().checked_mul(self.capacity);
        // A counter of a kernel thread goes up to 32 rows beyond the end.
        if rows.is_none_or(|rows| rows > MOST - 32) {
            return refuse(
                "capacity",
                format!("with the experts, there are more than {MOST} rows"),
            );
        }
        let bytes = self.staged_rows().checked_mul(self.max_row_bytes);
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize - ALIGNMENT) {
            return refuse(
                "max_row_bytes",
                String::from("the rows are more than a device can address"),
            );
        }
        Ok(())
    }

    /// Returns the messages with each rank (one, or in an expert-major layout one for each own place). Each has the
    /// start of this rank's rows for the places there (in the order of the places), the start of that rank's rows for
    /// the places here (in the buffer of the layout), and the number of rows.
    pub(super) fn messages(self) -> impl Iterator<Item = Message> {
        let per_rank = self.own * self.capacity;
        let (parts, rows) = match self.layout {
            Layout::RankMajor => (1, per_rank),
            Layout::ExpertMajor => (self.own, self.capacity),
        };
        (0..self.ranks).flat_map(move |peer| {
            (0..parts).map(move |part| Message {
                peer,
                by_expert: peer * per_rank + part * rows,
                by_layout: match self.layout {
                    Layout::RankMajor => peer * per_rank,
                    Layout::ExpertMajor => (part * self.ranks + peer) * self.capacity,
                },
                rows,
            })
        })
    }
}

/// See [`Sizes::messages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) peer: usize,
    pub(super) by_expert: usize,
    pub(super) by_layout: usize,
    pub(super) rows: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(layout: Layout) -> Sizes {
        Sizes {
            ranks: 3,
            experts: 6,
            own: 2,
            top_k: 2,
            max_tokens: 4,
            capacity: 4,
            max_row_bytes: 8,
            layout,
            way: DispatchWay::Rows,
        }
    }

    #[test]
    fn every_row_is_in_one_message_on_either_side() {
        for layout in [Layout::RankMajor, Layout::ExpertMajor] {
            let sizes = sizes(layout);
            let (mut by_expert, mut by_layout) = (vec![0; sizes.rows()], vec![0; sizes.rows()]);
            for message in sizes.messages() {
                for row in 0..message.rows {
                    by_expert[message.by_expert + row] += 1;
                    by_layout[message.by_layout + row] += 1;
                    // The rows of an expert are sent to the rank of the expert.
                    let expert = (message.by_expert + row) / sizes.capacity;
                    assert_eq!(expert / sizes.own, message.peer);
                }
            }
            assert_eq!(
                (&by_expert, &by_layout),
                (&vec![1; 24], &vec![1; 24]),
                "{layout:?}"
            );
        }
    }

    #[test]
    fn numbers_that_cannot_work_are_refused_by_name() {
        assert!(sizes(Layout::RankMajor).check().is_ok());
        let refused = |change: fn(&mut Sizes)| {
            let mut sizes = sizes(Layout::RankMajor);
            change(&mut sizes);
            match sizes.check().map_err(|error| format!("{error:#}")) {
                Err(text) => text,
                Ok(()) => panic!("{sizes:?}"),
            }
        };
        assert!(refused(|sizes| sizes.top_k = 0).contains("`top_k`"));
        assert!(refused(|sizes| sizes.top_k = 7).contains("7 of 6"));
        assert!(refused(|sizes| sizes.max_tokens = 1 << 31).contains("`max_tokens`"));
        assert!(refused(|sizes| sizes.capacity = 1 << 31).contains("`capacity`"));
        let gathered = refused(|sizes| {
            (sizes.ranks, sizes.way) = (1 << 16, DispatchWay::AllGather);
            sizes.max_tokens = 1 << 20;
        });
        assert!(gathered.contains("`max_tokens`"), "{gathered}");
        assert!(refused(|sizes| sizes.max_row_bytes = usize::MAX).contains("`max_row_bytes`"));
    }
}

//! Numbers of tokens per expert, read by the host.

use super::layout::Sizes;
use crate::error::{Error, ErrorKind, Result};

/// How many tokens were routed to each expert; see [`Routing::counts`](super::Routing::counts).
///
/// ```
/// # fn example(routing: &nccl::moe::Routing) -> nccl::Result<()> {
/// let counts = routing.counts()?;
/// println!("sent to each expert: {:?}", counts.sent());
/// println!("received of rank 0 for the first expert here: {}", counts.received()[0]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// The device's list of counts.
    numbers: Vec<u32>,
    experts: usize,
}

impl Counts {
    /// Builds the counts from the device's list.
    ///
    /// # Errors
    /// An expert that does not exist, or that was full.
    pub(super) fn of(numbers: Vec<u32>, sizes: &Sizes, rank: usize) -> Result<Self> {
        let counts = Self {
            numbers,
            experts: sizes.experts,
        };
        let invalid = counts.numbers[sizes.experts];
        if invalid > 0 {
            return Err(Error::new(ErrorKind::NoSuchExpert {
                rank,
                entries: invalid as usize,
                experts: sizes.experts,
            }));
        }
        let full = |rank, expert, tokens: u32| {
            Err(Error::new(ErrorKind::ExpertCapacity {
                rank,
                expert,
                tokens: tokens as usize,
                capacity: sizes.capacity,
            }))
        };
        let too_many = |&(_, &tokens): &(usize, &u32)| tokens as usize > sizes.capacity;
        if let Some((expert, &tokens)) = counts.sent().iter().enumerate().find(too_many) {
            return full(rank, expert, tokens);
        }
        if let Some((at, &tokens)) = counts.received().iter().enumerate().find(too_many) {
            let (source, expert) = (at / sizes.own, rank * sizes.own + at % sizes.own);
            return full(source, expert, tokens);
        }
        Ok(counts)
    }

    /// Returns how many tokens this rank sent to each expert, in the order of the experts.
    ///
    /// ```
    /// # fn example(counts: &nccl::moe::Counts) {
    /// let busiest = counts.sent().iter().max();
    /// # }
    /// ```
    #[must_use]
    pub fn sent(&self) -> &[u32] {
        &self.numbers[..self.experts]
    }

    /// Returns how many tokens this rank received, as `[source rank][own expert]`.
    ///
    /// ```
    /// # fn example(counts: &nccl::moe::Counts) {
    /// let tokens: u32 = counts.received().iter().sum();
    /// # }
    /// ```
    #[must_use]
    pub fn received(&self) -> &[u32] {
        &self.numbers[self.experts + 1..]
    }
}

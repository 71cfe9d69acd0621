//! Numbers of tokens per expert, read by the host.

use super::layout::Sizes;
use crate::error::{Error, ErrorKind, Result};

/// How many tokens were routed to each expert; see [`Routing::counts`](super::Routing::counts).
///
/// ```
/// # fn example(routing: &nccl::moe::Routing) -> nccl::Result<()> {
/// let counts = routing.counts()?;
/// println!("sent to each expert: {:?}", counts.sent);
/// println!("received of rank 0 for the first expert here: {}", counts.received[0]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// How many tokens this rank sent to each expert, in the order of the experts.
    pub sent: Vec<u32>,
    /// How many tokens this rank received, as `[source rank][own expert]`.
    pub received: Vec<u32>,
}

impl Counts {
    /// Builds the counts from the device's list: those of the experts, the number of experts that do not exist, and those of the
    /// source ranks.
    ///
    /// # Errors
    /// An expert that does not exist, or that was full.
    pub(super) fn of(mut numbers: Vec<u32>, sizes: &Sizes, rank: usize) -> Result<Self> {
        let invalid = numbers[sizes.experts];
        let received = numbers.split_off(sizes.experts + 1);
        numbers.truncate(sizes.experts);
        let counts = Self {
            sent: numbers,
            received,
        };
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
        if let Some((expert, &tokens)) = counts.sent.iter().enumerate().find(too_many) {
            return full(rank, expert, tokens);
        }
        if let Some((at, &tokens)) = counts.received.iter().enumerate().find(too_many) {
            let (source, expert) = (at / sizes.own, rank * sizes.own + at % sizes.own);
            return full(source, expert, tokens);
        }
        Ok(counts)
    }
}

//! Numbers of tokens per expert, read by the host.

use super::layout::Sizes;
use super::placement::ExpertPlacement;
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
    /// How many tokens this rank sent to each expert, to all its copies together, in the order of the experts.
    pub sent: Vec<u32>,
    /// How many tokens this rank received, as `[source rank][own expert]`, with a placement `[source rank][own place]`.
    pub received: Vec<u32>,
}

impl Counts {
    /// Builds the counts from the device's list: those of the places, the number of experts that do not exist, and those of the
    /// source ranks.
    ///
    /// # Errors
    /// An expert that does not exist, or that was full.
    pub(super) fn of(
        mut numbers: Vec<u32>,
        sizes: &Sizes,
        placement: &ExpertPlacement,
        rank: usize,
    ) -> Result<Self> {
        let invalid = numbers[sizes.places()];
        let received = numbers.split_off(sizes.received_counts());
        // A place that received tokens has an expert.
        let expert_at = |place: usize| placement.expert_at(place / sizes.own, place % sizes.own);
        let sent = |expert| {
            placement
                .replicas(expert)
                .iter()
                .map(|place| numbers[*place])
        };
        let counts = Self {
            sent: (0..sizes.experts)
                .map(|expert| sent(expert).sum())
                .collect(),
            received,
        };
        if invalid > 0 {
            return Err(Error::new(ErrorKind::NoSuchExpert {
                rank,
                entries: invalid as usize,
                experts: sizes.experts,
            }));
        }
        let full = |rank, place, tokens: u32| {
            Err(Error::new(ErrorKind::ExpertCapacity {
                rank,
                expert: expert_at(place).unwrap_or(sizes.experts),
                tokens: tokens as usize,
                capacity: sizes.capacity,
            }))
        };
        let too_many = |&(_, &tokens): &(usize, &u32)| tokens as usize > sizes.capacity;
        let own = &numbers[..sizes.places()];
        if let Some((place, &tokens)) = own.iter().enumerate().find(too_many) {
            return full(rank, place, tokens);
        }
        if let Some((at, &tokens)) = counts.received.iter().enumerate().find(too_many) {
            let (source, place) = (at / sizes.own, rank * sizes.own + at % sizes.own);
            return full(source, place, tokens);
        }
        Ok(counts)
    }
}

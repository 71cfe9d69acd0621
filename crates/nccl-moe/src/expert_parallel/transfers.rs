//! The transfers between ranks when a placement changes.

use std::ops::Range;

use super::placement::{ExpertPlacement, refuse};
use crate::error::Result;

/// An expert that a rank needs at a place where it does not have it; see [`ExpertPlacement::transfers`].
///
/// ```
/// use nccl::moe::ExpertPlacement;
///
/// let before = ExpertPlacement::new(2, 1, &[Some(0), None])?;
/// let after = ExpertPlacement::new(2, 1, &[Some(0), Some(1)])?;
/// let transfer = before.transfers(&after)?[0];
/// assert_eq!((transfer.expert, transfer.from, transfer.to, transfer.place), (1, None, 1, 0));
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ExpertTransfer {
    /// The expert.
    pub expert: usize,
    /// A rank that has the expert: [`to`](Self::to) itself, if it has the expert at another place. `None` if no rank
    /// has it, and it has to be loaded.
    pub from: Option<usize>,
    /// The rank that needs the expert.
    pub to: usize,
    /// The place on that rank.
    pub place: usize,
}

/// A part of an expert on its way from one rank to another; see [`ExpertPlacement::transfer_rounds`].
///
/// ```
/// use nccl::moe::ExpertPlacement;
///
/// let before = ExpertPlacement::new(1, 1, &[Some(0), None])?;
/// let after = ExpertPlacement::new(1, 1, &[Some(0), Some(0)])?;
/// let mut rounds = before.transfer_rounds(&after, 1000, 600)?;
/// let part = &rounds.next().unwrap()[0];
/// assert_eq!((part.expert, part.from, part.to, part.elements.clone()), (0, 0, 1, 0..600));
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TransferPart {
    /// The expert.
    pub expert: usize,
    /// The rank that sends.
    pub from: usize,
    /// The rank that receives.
    pub to: usize,
    /// The range of the expert's elements.
    pub elements: Range<usize>,
}

impl ExpertPlacement {
    /// Returns the transfers that turn this placement into `to`, in the order of ranks and places. The source of an
    /// expert is the receiving rank itself if it has the expert; otherwise, of the ranks that have it, the one with the
    /// fewest transfers so far.
    ///
    /// Sources are in the state before all transfers: a place may be both a source and a destination.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::error::ErrorKind::InvalidConfig) if the two placements are of different experts or ranks.
    ///
    /// ```
    /// use nccl::moe::ExpertPlacement;
    ///
    /// let before = ExpertPlacement::blocks(4, 2)?.after(&[Some(0), None])?;
    /// let after = before.rebalanced(&[1; 4], 2, 1)?;
    /// let lost = before.transfers(&after)?.into_iter().filter(|transfer| transfer.from.is_none());
    /// assert_eq!(lost.map(|transfer| transfer.expert).collect::<Vec<_>>(), [2, 3]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn transfers(&self, to: &Self) -> Result<Vec<ExpertTransfer>> {
        if (self.experts(), self.ranks()) != (to.experts(), to.ranks()) {
            return refuse(
                "placement",
                format!("{self:?} cannot become {to:?} by transfers"),
            );
        }
        let mut asked = vec![0usize; self.ranks()];
        let mut transfers = Vec::new();
        for rank in 0..self.ranks() {
            for (place, expert) in to.held_by(rank) {
                if self.held_by(rank).any(|own| own == (place, expert)) {
                    continue;
                }
                let holders = || {
                    let places = self.replicas(expert).iter();
                    places.map(|at| at / self.places_per_rank())
                };
                let from = match holders().any(|holder| holder == rank) {
                    true => Some(rank),
                    false => holders().min_by_key(|holder| (asked[*holder], *holder)),
                };
                if let Some(from) = from {
                    asked[from] += 1;
                }
                transfers.push(ExpertTransfer {
                    expert,
                    from,
                    to: rank,
                    place,
                });
            }
        }
        Ok(transfers)
    }

    /// Splits the [`transfers`](Self::transfers) between ranks into rounds, so that weights can move while the experts
    /// serve, at a bounded cost: in a round, no rank sends or receives more than `most` elements. An expert has
    /// `length` elements. Transfers within a rank, and experts that no rank has, are left out.
    ///
    /// All ranks get the same rounds, and run each round together: for each [`TransferPart`], the rank `from` sends to
    /// the rank `to`, all in one [group](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/groups.html).
    /// All elements have arrived after the last round; until then, the experts serve at their old places.
    ///
    /// # Errors
    /// As [`transfers`](Self::transfers); [`InvalidConfig`](crate::error::ErrorKind::InvalidConfig) if `most` is 0.
    ///
    /// ```
    /// use nccl::moe::ExpertPlacement;
    ///
    /// // Rank 2 has come, and gets both experts.
    /// let before = ExpertPlacement::new(2, 2, &[Some(0), Some(1), Some(1), Some(0), None, None])?;
    /// let after = ExpertPlacement::new(2, 2, &[Some(0), Some(1), Some(1), Some(0), Some(0), Some(1)])?;
    /// // Each of the others sends one of them, 4 MiB at a time, and rank 2 receives 4 MiB at a time.
    /// let rounds = before.transfer_rounds(&after, 16 << 20, 4 << 20)?;
    /// assert_eq!(rounds.count(), 8);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn transfer_rounds(
        &self,
        to: &Self,
        length: usize,
        most: usize,
    ) -> Result<impl Iterator<Item = Vec<TransferPart>> + Clone + use<>> {
        if most == 0 {
            let reason = String::from("0 elements in each round: nothing would move");
            return refuse("most", reason);
        }
        let transfers = self.transfers(to)?.into_iter();
        let pending = transfers.filter_map(|transfer| {
            let ExpertTransfer {
                expert, from, to, ..
            } = transfer;
            let from = from.filter(|from| *from != to && length > 0)?;
            let elements = 0..length;
            Some(TransferPart {
                expert,
                from,
                to,
                elements,
            })
        });
        let mut pending: Vec<_> = pending.collect();
        let (mut sent, mut received) = (vec![0; self.ranks()], vec![0; self.ranks()]);
        Ok(std::iter::from_fn(move || {
            sent.fill(0);
            received.fill(0);
            let mut round = Vec::new();
            pending.retain_mut(|rest| {
                let room = most - usize::max(sent[rest.from], received[rest.to]);
                let count = rest.elements.len().min(room);
                if count > 0 {
                    let (first, next) = (rest.elements.start, rest.elements.start + count);
                    round.push(TransferPart {
                        elements: first..next,
                        ..rest.clone()
                    });
                    rest.elements.start = next;
                    sent[rest.from] += count;
                    received[rest.to] += count;
                }
                !rest.elements.is_empty()
            });
            (!round.is_empty()).then_some(round)
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn rounds_move_every_element_once_and_no_rank_does_more_than_it_may() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..2000 {
            let (ranks, experts) = (random.usize(1..=9), random.usize(1..=16));
            let copies = random.usize(1..=ranks.min(3));
            let per_rank = (experts * copies).div_ceil(ranks) + random.usize(0..=2);
            let mut loads = || {
                (0..experts)
                    .map(|_| random.u64(0..1000))
                    .collect::<Vec<_>>()
            };
            let before = ExpertPlacement::balanced(&loads(), ranks, per_rank, copies).unwrap();
            let after = before.rebalanced(&loads(), per_rank, copies).unwrap();
            let (length, most) = (random.usize(0..50), random.usize(1..40));
            let rounds = before.transfer_rounds(&after, length, most).unwrap();
            let mut arrived: HashMap<(usize, usize), Vec<bool>> = HashMap::new();
            let (mut all_sent, mut all_received) = (vec![0; ranks], vec![0; ranks]);
            let count = rounds.clone().count();
            for round in rounds {
                let (mut sent, mut received) = (vec![0; ranks], vec![0; ranks]);
                assert!(!round.is_empty());
                for part in round {
                    assert!(before.held_by(part.from).any(|(_, own)| own == part.expert));
                    sent[part.from] += part.elements.len();
                    received[part.to] += part.elements.len();
                    let there = arrived.entry((part.to, part.expert));
                    for element in &mut there.or_insert_with(|| vec![false; length])[part.elements]
                    {
                        assert!(!std::mem::replace(element, true), "twice");
                    }
                }
                assert!(sent.iter().chain(&received).all(|count| *count <= most));
                for rank in 0..ranks {
                    all_sent[rank] += sent[rank];
                    all_received[rank] += received[rank];
                }
            }
            let expected = before.transfers(&after).unwrap().into_iter();
            let expected = expected.filter(|one| one.from != Some(one.to) && length > 0);
            assert_eq!(arrived.len(), expected.count());
            assert!(arrived.values().flatten().all(|there| *there));
            // No more than twice as many as the rank that has most to do needs.
            let busiest = all_sent.iter().chain(&all_received).max().unwrap();
            assert!(count <= 2 * busiest.div_ceil(most), "{count} rounds");
        }
    }

    #[test]
    fn rounds_of_nothing_are_refused() {
        let placement = ExpertPlacement::blocks(2, 2).unwrap();
        let refused = placement.transfer_rounds(&placement, 8, 0).map(|_| ());
        let refused = refused.unwrap_err();
        assert!(matches!(
            refused.kind(),
            ErrorKind::InvalidConfig { field: "most", .. }
        ));
        assert_eq!(
            placement.transfer_rounds(&placement, 8, 1).unwrap().count(),
            0
        );
    }
}

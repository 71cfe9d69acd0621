//! The placement of the experts in a generation, and the next one.

use nccl::moe::ExpertPlacement;

/// The placement that the ranks of a generation derive from the experts that they have; the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    /// The placement when the generation begins to serve.
    pub(super) now: ExpertPlacement,
    /// The placement to move to after that, if copies are missing.
    pub(super) next: Option<ExpertPlacement>,
}

/// Returns the fewest copies of any expert.
pub(super) fn fewest(placement: &ExpertPlacement) -> usize {
    let all = 0..placement.experts();
    all.map(|expert| placement.replicas(expert).len())
        .min()
        .unwrap_or_default()
}

impl Plan {
    /// Plans for ranks with these experts (`held[rank][place]`), and `copies` copies of each expert if there are that many
    /// ranks. `loads` has how often each expert was chosen.
    pub(super) fn new(
        held: &[Vec<Option<usize>>],
        loads: &[u64],
        copies: usize,
    ) -> nccl::Result<Self> {
        let (experts, ranks) = (loads.len(), held.len());
        let copies = copies.min(ranks);
        let needed = (experts * copies).div_ceil(ranks);
        let longest = held.iter().map(Vec::len).max().unwrap_or_default();
        let places = needed.max(longest);
        let mut table = Vec::with_capacity(ranks * places);
        for own in held {
            table.extend(own.iter().copied());
            table.extend(std::iter::repeat_n(None, places - own.len()));
        }
        let now = ExpertPlacement::new(experts, places, &table)?;
        // A new rank gets some of the experts, and no rank has more places than necessary.
        let has_some = |rank| now.held_by(rank).next().is_some();
        let is_spread = (0..ranks).all(has_some);
        if fewest(&now) >= copies && is_spread && places == needed {
            return Ok(Self { now, next: None });
        }
        let next = now.rebalanced(loads, needed, copies)?;
        Ok(match now.missing().is_empty() {
            true => Self {
                now,
                next: Some(next),
            },
            // The ranks cannot serve without all experts, so the new placement takes effect at once.
            false => Self {
                now: next,
                next: None,
            },
        })
    }
}

/// The state of one rank, which it sends to the others.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Own {
    /// The launcher's number of the rank.
    pub(super) place: u64,
    /// The expert at each of the rank's places.
    pub(super) held: Vec<Option<usize>>,
    /// The non-empty slots of the rank's cache, each with its number of positions.
    pub(super) cached: Vec<(usize, usize)>,
    /// How often the rank's rows have chosen each expert.
    pub(super) loads: Vec<u64>,
}

impl Own {
    pub(super) fn encode(&self) -> Vec<u8> {
        let held = self.held.iter();
        let held = held.map(|held| held.map_or(u64::MAX, |expert| expert as u64));
        let cached = self.cached.iter();
        let cached = cached.flat_map(|(slot, positions)| [*slot as u64, *positions as u64]);
        let lengths = [self.held.len() as u64, self.cached.len() as u64];
        [self.place]
            .into_iter()
            .chain(lengths)
            .chain(held)
            .chain(cached)
            .chain(self.loads.iter().copied())
            .flat_map(u64::to_be_bytes)
            .collect()
    }

    /// Decodes the bytes of [`encode`](Self::encode).
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (words, []) = bytes.as_chunks::<8>() else {
            return None;
        };
        let mut words = words.iter().copied().map(u64::from_be_bytes);
        let place = words.next()?;
        let [places, slots] = [words.next()?, words.next()?].map(usize::try_from);
        let rest: Vec<_> = words.collect();
        let (held, rest) = rest.split_at_checked(places.ok()?)?;
        let (cached, loads) = rest.split_at_checked(slots.ok()?.checked_mul(2)?)?;
        let (cached, []) = cached.as_chunks::<2>() else {
            return None;
        };
        let number = |word: u64| usize::try_from(word).ok();
        let cached = cached.iter();
        let cached = cached.map(|[slot, positions]| Some((number(*slot)?, number(*positions)?)));
        let held = held.iter();
        let held = held.map(|word| usize::try_from(*word).ok().filter(|_| *word != u64::MAX));
        Some(Self {
            place,
            held: held.collect(),
            cached: cached.collect::<Option<_>>()?,
            loads: loads.to_vec(),
        })
    }
}

/// Returns the sum of the ranks' counts; new ranks have none.
pub(super) fn sum<'l>(experts: usize, all: impl Iterator<Item = &'l [u64]>) -> Vec<u64> {
    let mut sum = vec![0u64; experts];
    for loads in all {
        for (sum, load) in sum.iter_mut().zip(loads) {
            *sum = sum.saturating_add(*load);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_what_is_understood() {
        let own = Own {
            place: 3,
            held: vec![Some(0), None, Some(7)],
            cached: vec![(4, 900), (0, 1)],
            loads: vec![9, 0, u64::MAX],
        };
        assert_eq!(Own::decode(&own.encode()), Some(own.clone()));
        let new = Own {
            held: Vec::new(),
            cached: Vec::new(),
            loads: Vec::new(),
            ..own
        };
        assert_eq!(Own::decode(&new.encode()), Some(new));
        for bytes in [&[][..], &[1; 9], &[0; 8], &[1; 24], &[0xff; 40]] {
            assert_eq!(Own::decode(bytes), None, "{bytes:?}");
        }
        let counted = [&[1, 2][..], &[], &[u64::MAX, 3]];
        assert_eq!(sum(2, counted.into_iter()), [u64::MAX, 5]);
    }

    #[test]
    fn ranks_that_are_left_serve_with_what_they_have_and_give_each_other_what_lacks() {
        // At first no rank has an expert, and none was chosen.
        let first = Plan::new(&vec![Vec::new(); 8], &[0; 8], 2).unwrap();
        assert_eq!((fewest(&first.now), first.now.places_per_rank()), (2, 2));
        assert_eq!(first.next, None);
        for gone in 0..8 {
            let left = (0..8).filter(|rank| *rank != gone);
            let held: Vec<_> = left
                .map(|rank| {
                    (0..2)
                        .map(|place| first.now.expert_at(rank, place))
                        .collect()
                })
                .collect();
            let plan = Plan::new(&held, &[1; 8], 2).unwrap();
            assert_eq!(fewest(&plan.now), 1);
            let next = plan.next.clone().unwrap();
            assert_eq!((fewest(&next), next.places_per_rank()), (2, 3));
            // Every expert is available on some rank.
            let transfers = plan.now.transfers(&next).unwrap();
            assert!(transfers.iter().all(|transfer| transfer.from.is_some()));
            // Once the experts have moved, nothing is left to do.
            let held: Vec<Vec<_>> = (0..7)
                .map(|rank| (0..3).map(|place| next.expert_at(rank, place)).collect())
                .collect();
            assert_eq!(
                Plan::new(&held, &[1; 8], 2).unwrap(),
                Plan {
                    now: next,
                    next: None
                }
            );
        }
    }

    #[test]
    fn a_rank_that_comes_gets_experts_too() {
        let two = Plan::new(&vec![Vec::new(); 2], &[1; 8], 2).unwrap().now;
        let held = |rank| (0..8).map(|place| two.expert_at(rank, place)).collect();
        let plan = Plan::new(&[held(0), Vec::new(), held(1)], &[1; 8], 2).unwrap();
        assert_eq!(fewest(&plan.now), 2);
        let to = |plan: &Plan, rank| {
            let next = plan.next.as_ref().unwrap();
            let transfers = plan.now.transfers(next).unwrap().into_iter();
            transfers
                .filter(|one| one.to == rank && one.from != Some(rank))
                .count()
        };
        assert!(to(&plan, 1) > 0);
        assert_eq!(to(&plan, 0), 0);
        // There are more ranks than experts: the new rank gets a copy.
        let held: Vec<_> = (0..3)
            .map(|rank| vec![(rank < 2).then_some(rank)])
            .collect();
        let plan = Plan::new(&held, &[1; 2], 1).unwrap();
        assert_eq!(to(&plan, 2), 1);
        let next = plan.next.unwrap();
        let held: Vec<_> = (0..3).map(|rank| vec![next.expert_at(rank, 0)]).collect();
        assert_eq!(Plan::new(&held, &[1; 2], 1).unwrap().next, None);
    }

    #[test]
    fn an_expert_that_is_nowhere_is_there_before_anything_is_served() {
        let held = vec![vec![Some(0), Some(1)], vec![Some(2), None]];
        let plan = Plan::new(&held, &[1; 4], 1).unwrap();
        assert!(plan.now.missing().is_empty() && plan.next.is_none());
        // The present experts have stayed.
        assert_eq!(plan.now.expert_at(0, 0), Some(0));
        // A single rank has all experts, and there are no more copies than ranks.
        let plan = Plan::new(&[Vec::new()], &[1; 8], 2).unwrap();
        assert_eq!((fewest(&plan.now), plan.now.places_per_rank()), (1, 8));
    }
}

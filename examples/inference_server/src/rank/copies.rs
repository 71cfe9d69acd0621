//! Where the experts are in a generation, and where they are to be.

use nccl::moe::ExpertPlacement;

/// What the ranks of a generation make of the experts that they have; the same on all of them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    /// Where the experts are when the generation begins to serve.
    pub(super) now: ExpertPlacement,
    /// Where they are to be after that, if copies are missing.
    pub(super) next: Option<ExpertPlacement>,
}

/// The fewest copies of an expert.
pub(super) fn fewest(placement: &ExpertPlacement) -> usize {
    let all = 0..placement.experts();
    all.map(|expert| placement.replicas(expert).len())
        .min()
        .unwrap_or_default()
}

impl Plan {
    /// Plans for ranks of which each has these experts (`held[rank][place]`), with `copies` of each expert if there are so many ranks.
    pub(super) fn new(
        held: &[Vec<Option<usize>>],
        experts: usize,
        copies: usize,
    ) -> nccl::Result<Self> {
        let ranks = held.len();
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
        // A newcomer is to have some of the experts, and no rank more than is needed.
        let has_some = |rank| now.held_by(rank).next().is_some();
        let is_spread = (0..ranks).all(has_some);
        if fewest(&now) >= copies && is_spread && places == needed {
            return Ok(Self { now, next: None });
        }
        // Nothing is known of how often each is chosen: all weigh the same.
        let next = now.rebalanced(&vec![1; experts], needed, copies)?;
        Ok(match now.missing().is_empty() {
            true => Self {
                now,
                next: Some(next),
            },
            // Nothing can be served before.
            false => Self {
                now: next,
                next: None,
            },
        })
    }

    /// What `rank` has to have for the next placement and has not now.
    pub(super) fn lacks(&self, rank: usize) -> Vec<usize> {
        let has = |expert: usize| self.now.held_by(rank).any(|(_, own)| own == expert);
        let next = self.next.iter().flat_map(|next| next.held_by(rank));
        let mut lacks: Vec<_> = next
            .map(|(_, expert)| expert)
            .filter(|expert| !has(*expert))
            .collect();
        lacks.sort_unstable();
        lacks
    }
}

/// What a rank says of itself: its place among the launcher's, and the expert of each of its places.
pub(super) fn encode(place: u64, held: &[Option<usize>]) -> Vec<u8> {
    let held = held
        .iter()
        .map(|held| held.map_or(u64::MAX, |expert| expert as u64));
    [place]
        .into_iter()
        .chain(held)
        .flat_map(u64::to_be_bytes)
        .collect()
}

/// As [`encode`] made it.
pub(super) fn decode(bytes: &[u8]) -> Option<(u64, Vec<Option<usize>>)> {
    let (words, []) = bytes.as_chunks::<8>() else {
        return None;
    };
    let mut words = words.iter().copied().map(u64::from_be_bytes);
    let place = words.next()?;
    let held = words.map(|word| usize::try_from(word).ok().filter(|_| word != u64::MAX));
    Some((place, held.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_what_is_understood() {
        let held = vec![Some(0), None, Some(7)];
        assert_eq!(decode(&encode(3, &held)), Some((3, held)));
        assert_eq!(decode(&encode(0, &[])), Some((0, Vec::new())));
        assert_eq!(decode(&[1; 9]), None);
        assert_eq!(decode(&[]), None);
    }

    #[test]
    fn ranks_that_are_left_serve_with_what_they_have_and_read_what_lacks_meanwhile() {
        // At first no rank has an expert.
        let first = Plan::new(&vec![Vec::new(); 8], 8, 2).unwrap();
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
            let plan = Plan::new(&held, 8, 2).unwrap();
            assert_eq!(fewest(&plan.now), 1);
            let next = plan.next.clone().unwrap();
            assert_eq!((fewest(&next), next.places_per_rank()), (2, 3));
            // Of those that are not there, each is read by the rank that is to have it.
            let read: usize = (0..7).map(|rank| plan.lacks(rank).len()).sum();
            assert_eq!(
                read,
                plan.now
                    .transfers(&next)
                    .unwrap()
                    .iter()
                    .filter(|one| one.from != Some(one.to))
                    .count()
            );
            // Once they are there, nothing is left to do.
            let held: Vec<Vec<_>> = (0..7)
                .map(|rank| (0..3).map(|place| next.expert_at(rank, place)).collect())
                .collect();
            assert_eq!(
                Plan::new(&held, 8, 2).unwrap(),
                Plan {
                    now: next,
                    next: None
                }
            );
        }
    }

    #[test]
    fn a_rank_that_comes_gets_experts_too() {
        let two = Plan::new(&vec![Vec::new(); 2], 8, 2).unwrap().now;
        let held = |rank| (0..8).map(|place| two.expert_at(rank, place)).collect();
        let plan = Plan::new(&[held(0), Vec::new(), held(1)], 8, 2).unwrap();
        assert_eq!(fewest(&plan.now), 2);
        assert!(!plan.lacks(1).is_empty() && plan.lacks(0).is_empty());
        // More ranks than experts: it gets a copy.
        let held: Vec<_> = (0..3)
            .map(|rank| vec![(rank < 2).then_some(rank)])
            .collect();
        let plan = Plan::new(&held, 2, 1).unwrap();
        assert_eq!(plan.lacks(2).len(), 1);
        let next = plan.next.unwrap();
        let held: Vec<_> = (0..3).map(|rank| vec![next.expert_at(rank, 0)]).collect();
        assert_eq!(Plan::new(&held, 2, 1).unwrap().next, None);
    }

    #[test]
    fn an_expert_that_is_nowhere_is_there_before_anything_is_served() {
        let held = vec![vec![Some(0), Some(1)], vec![Some(2), None]];
        let plan = Plan::new(&held, 4, 1).unwrap();
        assert!(plan.now.missing().is_empty() && plan.next.is_none());
        // What was there has stayed.
        assert_eq!(plan.now.expert_at(0, 0), Some(0));
        // One rank has all of them, and no more copies than ranks.
        let plan = Plan::new(&[Vec::new()], 8, 2).unwrap();
        assert_eq!((fewest(&plan.now), plan.now.places_per_rank()), (1, 8));
    }
}

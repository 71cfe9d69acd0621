//! The assignment of slots to ranks.

use std::cmp::Reverse;

use crate::model::SlotOwner;

/// Distributes the slots evenly over the ranks. `cached[rank]` lists the slots in the rank's cache, each with its number of
/// positions. A slot stays on its rank if possible; a rank with too many slots loses those with the fewest positions. All ranks
/// compute the same assignment.
pub(super) fn deal(cached: &[Vec<(usize, usize)>], slots: usize) -> Vec<SlotOwner> {
    let ranks = cached.len();
    // If several ranks have a slot, the one with the most positions keeps it.
    let mut owners: Vec<Option<SlotOwner>> = vec![None; slots];
    for (rank, own) in cached.iter().enumerate() {
        for &(slot, positions) in own {
            if let Some(owner) = owners.get_mut(slot)
                && owner.is_none_or(|other| other.positions < positions)
            {
                *owner = Some(SlotOwner { rank, positions });
            }
        }
    }
    let count = |rank: usize| {
        let owners = owners.iter().flatten();
        owners.filter(|owner| owner.rank == rank).count()
    };
    let mut order: Vec<_> = (0..ranks).collect();
    order.sort_by_key(|rank| (Reverse(count(*rank)), *rank));
    let mut room = vec![slots / ranks; ranks];
    for rank in &order[..slots % ranks] {
        room[*rank] += 1;
    }
    let mut order: Vec<_> = (0..slots).collect();
    order.sort_by_key(|slot| (Reverse(owners[*slot].map(|owner| owner.positions)), *slot));
    for slot in order {
        match owners[slot] {
            Some(owner) if room[owner.rank] > 0 => room[owner.rank] -= 1,
            _ => owners[slot] = None,
        }
    }
    let mut counts = vec![0; ranks];
    for owner in owners.iter().flatten() {
        counts[owner.rank] += 1;
    }
    let owner = |owner: Option<SlotOwner>| {
        owner.unwrap_or_else(|| {
            let has_room = |rank: &usize| room[*rank] > 0;
            let fewest = (0..ranks).filter(has_room).min_by_key(|rank| counts[*rank]);
            let rank = fewest.unwrap_or_default();
            room[rank] -= 1;
            counts[rank] += 1;
            SlotOwner { rank, positions: 0 }
        })
    };
    owners.into_iter().map(owner).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(dealt: &[SlotOwner]) -> Vec<usize> {
        dealt.iter().map(|slot| slot.rank).collect()
    }

    #[test]
    fn slots_are_dealt_out_evenly_and_stay_where_they_are() {
        // Without caches, the ranks take turns.
        let none = vec![Vec::new(); 3];
        assert_eq!(ranks(&deal(&none, 8)), [0, 1, 2, 0, 1, 2, 0, 1]);
        // One of four ranks is gone; it had slots 1, 5 and 7.
        let cached = [vec![(0, 9), (4, 7)], vec![(2, 5), (6, 1)], vec![(3, 8)]];
        let dealt = deal(&cached, 8);
        let stay = [0, 2, 3, 4, 6].map(|slot| (dealt[slot].rank, dealt[slot].positions));
        assert_eq!(stay, [(0, 9), (1, 5), (2, 8), (0, 7), (1, 1)]);
        assert!([1, 5, 7].iter().all(|slot| dealt[*slot].positions == 0));
        // A new rank gets the slots with the fewest positions.
        let cached = [
            vec![(0, 9), (1, 3), (4, 7)],
            vec![(2, 5), (3, 4), (5, 6)],
            vec![],
        ];
        assert_eq!(ranks(&deal(&cached, 6)), [0, 2, 1, 2, 0, 1]);
    }

    #[test]
    fn whatever_ranks_say_the_slots_are_dealt_out_evenly() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..3000 {
            let (ranks, slots) = (random.usize(1..=9), random.usize(1..=20));
            let mut cached = vec![Vec::new(); ranks];
            for own in &mut cached {
                for _ in 0..random.usize(0..=slots) {
                    // Invalid entries as well: a slot that does not exist, or is listed twice.
                    own.push((random.usize(0..=slots), random.usize(1..50)));
                }
            }
            let dealt = deal(&cached, slots);
            assert_eq!(dealt.len(), slots);
            for rank in 0..ranks {
                let count = dealt.iter().filter(|slot| slot.rank == rank).count();
                let fair = slots / ranks..=slots.div_ceil(ranks);
                assert!(fair.contains(&count), "{dealt:?}");
            }
            for (slot, owner) in dealt.iter().enumerate() {
                let said = cached[owner.rank].contains(&(slot, owner.positions));
                assert!(owner.positions == 0 || said, "{dealt:?}");
            }
        }
    }
}

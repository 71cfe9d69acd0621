//! Which rank has the texts of which slot.

use std::cmp::Reverse;

use crate::model::SlotOwner;

/// Deals the slots out to ranks of which each has these in its cache, with so many positions (`cached[rank]`): to each rank as many, and one more to some of
/// them where that does not come out even. A slot stays where it is, as far as that allows; of a rank that has too many, those with
/// the fewest positions go. All ranks compute the same.
pub(super) fn deal(cached: &[Vec<(usize, usize)>], slots: usize) -> Vec<SlotOwner> {
    let ranks = cached.len();
    // Of two ranks that say that they have a slot, the one with more of it has it.
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
        // At first in turn.
        let none = vec![Vec::new(); 3];
        assert_eq!(ranks(&deal(&none, 8)), [0, 1, 2, 0, 1, 2, 0, 1]);
        // A rank of four is gone, which had slots 1, 5 and 7.
        let cached = [vec![(0, 9), (4, 7)], vec![(2, 5), (6, 1)], vec![(3, 8)]];
        let dealt = deal(&cached, 8);
        let stay = [0, 2, 3, 4, 6].map(|slot| (dealt[slot].rank, dealt[slot].positions));
        assert_eq!(stay, [(0, 9), (1, 5), (2, 8), (0, 7), (1, 1)]);
        assert!([1, 5, 7].iter().all(|slot| dealt[*slot].positions == 0));
        // A rank comes, and gets the slots of which least is there.
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
                    // Also what cannot be: a slot that does not exist, or is said twice.
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

//! The members of a generation.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::id::{Generation, MemberId, ProcessInfo};
use super::member_list;
use crate::slot::Slot;

/// The members of one generation, in the order of their ranks, and the witnesses that vote with them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "MembershipFields")]
pub struct Membership {
    /// The name of the generation.
    pub generation: Generation,
    /// By rank.
    #[serde(serialize_with = "member_list::serialize")]
    pub members: Vec<ProcessInfo>,
    /// The slot of each rank, which a member keeps for its life. No two are equal.
    slots: Vec<u32>,
    /// The number of slots that have been used, in this generation or an earlier one.
    slot_count: u32,
    /// Voters without a rank.
    #[serde(serialize_with = "member_list::serialize")]
    pub witnesses: Vec<ProcessInfo>,
    /// Ranks by member id, sorted.
    #[serde(skip_serializing)]
    index: Vec<(MemberId, u32)>,
    #[serde(skip_serializing)]
    tolerates_unreachable: bool,
}

#[derive(Deserialize)]
struct MembershipFields {
    generation: Generation,
    #[serde(deserialize_with = "member_list::deserialize")]
    members: Vec<ProcessInfo>,
    slots: Vec<u32>,
    slot_count: u32,
    #[serde(deserialize_with = "member_list::deserialize")]
    witnesses: Vec<ProcessInfo>,
}

impl TryFrom<MembershipFields> for Membership {
    type Error = &'static str;

    fn try_from(fields: MembershipFields) -> Result<Self, Self::Error> {
        let distinct: BTreeSet<_> = fields.slots.iter().collect();
        if fields.slots.len() != fields.members.len() || distinct.len() != fields.members.len() {
            return Err("not one slot for each member");
        }
        if distinct
            .last()
            .is_some_and(|last| **last >= fields.slot_count)
        {
            return Err("a slot beyond the number of slots");
        }
        let slots = (fields.slots, fields.slot_count);
        Ok(Self::in_slots(
            fields.generation,
            fields.members,
            slots,
            fields.witnesses,
        ))
    }
}

impl Membership {
    /// Makes the first membership, of members in the order of their ranks, which are their slots.
    #[must_use]
    pub fn new(
        generation: Generation,
        members: Vec<ProcessInfo>,
        witnesses: Vec<ProcessInfo>,
    ) -> Self {
        let count = members.len() as u32;
        Self::in_slots(
            generation,
            members,
            ((0..count).collect(), count),
            witnesses,
        )
    }

    /// Makes the membership that follows this one. Members of both keep their slots. A new one takes the slot with the
    /// number of the rank it was started as, if there is such a slot and it is free, and otherwise the lowest free one.
    #[must_use]
    pub fn successor(
        &self,
        generation: Generation,
        members: Vec<ProcessInfo>,
        witnesses: Vec<ProcessInfo>,
    ) -> Self {
        let kept = |process: &ProcessInfo| Some(self.slots[self.rank_of(process.id)?]);
        let mut slots: Vec<_> = members.iter().map(kept).collect();
        let mut taken: BTreeSet<u32> = slots.iter().flatten().copied().collect();
        for (process, slot) in members.iter().zip(&mut slots) {
            let number = process.id.slot;
            if slot.is_none() && number < self.slot_count && taken.insert(number) {
                *slot = Some(number);
            }
        }
        let mut lowest = 0;
        let mut free = || {
            while !taken.insert(lowest) {
                lowest += 1;
            }
            lowest
        };
        let slots = slots.into_iter();
        let slots: Vec<_> = slots.map(|slot| slot.unwrap_or_else(&mut free)).collect();
        let needed = slots.iter().max().map_or(0, |last| last + 1);
        let count = self.slot_count.max(needed);
        Self::in_slots(generation, members, (slots, count), witnesses)
    }

    fn in_slots(
        generation: Generation,
        members: Vec<ProcessInfo>,
        (slots, slot_count): (Vec<u32>, u32),
        witnesses: Vec<ProcessInfo>,
    ) -> Self {
        let ranks = members.iter().zip(0..);
        let mut index: Vec<_> = ranks.map(|(process, rank)| (process.id, rank)).collect();
        index.sort_unstable();
        let tolerates_unreachable = members.iter().all(|process| process.tolerates_unreachable);
        Self {
            generation,
            members,
            slots,
            slot_count,
            witnesses,
            index,
            tolerates_unreachable,
        }
    }

    /// Returns the slot of a rank.
    #[must_use]
    pub fn slot(&self, rank: usize) -> Option<Slot> {
        Some(Slot {
            number: *self.slots.get(rank)? as usize,
            incarnation: self.members[rank].id.incarnation,
        })
    }

    /// Returns the number of slots that have been used, in this generation or an earlier one.
    #[must_use]
    pub fn slot_count(&self) -> usize {
        self.slot_count as usize
    }

    /// Whether the members stay together while NCCL reaches all of them, which requires that all of them are configured
    /// to.
    #[must_use]
    pub fn tolerates_unreachable(&self) -> bool {
        self.tolerates_unreachable
    }

    /// Returns the rank of a member.
    #[must_use]
    pub fn rank_of(&self, id: MemberId) -> Option<usize> {
        let at = self.index.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(self.index[at].1 as usize)
    }

    /// Returns the information about a member.
    #[must_use]
    pub fn process(&self, id: MemberId) -> Option<&ProcessInfo> {
        match self.rank_of(id) {
            Some(rank) => self.members.get(rank),
            None => self.witnesses.iter().find(|process| process.id == id),
        }
    }

    /// Whether the process votes.
    #[must_use]
    pub fn votes(&self, id: MemberId) -> bool {
        self.process(id).is_some()
    }

    /// Returns all voters.
    pub fn voters(&self) -> impl Iterator<Item = &ProcessInfo> {
        self.members.iter().chain(&self.witnesses)
    }

    /// Returns the number of voters.
    #[must_use]
    pub fn electorate(&self) -> usize {
        self.members.len() + self.witnesses.len()
    }
}

/// A membership shared by all messages and machines that refer to it.
pub type SharedMembership = Arc<Membership>;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use nccl_base::wire;

    fn process(slot: u32, incarnation: u64) -> ProcessInfo {
        ProcessInfo {
            id: MemberId { slot, incarnation },
            host: String::from("h"),
            pid: 1,
            start_time: 0,
            kernel: 0,
            at: String::new(),
            launcher_rank: None,
            observed: false,
            tolerates_unreachable: false,
        }
    }

    fn generation(number: u64) -> Generation {
        let proposer = process(0, 1).id;
        Generation { number, proposer }
    }

    fn numbers(membership: &Membership) -> Vec<usize> {
        let ranks = 0..membership.members.len();
        ranks
            .map(|rank| membership.slot(rank).unwrap().number)
            .collect()
    }

    fn first(size: u32) -> Membership {
        let members = (0..size).map(|slot| process(slot, 1));
        Membership::new(generation(0), members.collect(), Vec::new())
    }

    fn next(before: &Membership, members: Vec<ProcessInfo>) -> Membership {
        let generation = generation(before.generation.number + 1);
        before.successor(generation, members, Vec::new())
    }

    #[test]
    fn who_stays_keeps_its_slot_and_who_comes_takes_a_free_one() {
        let first = first(6);
        assert_eq!(numbers(&first), [0, 1, 2, 3, 4, 5]);
        let some = [1, 3, 4].map(|slot| process(slot, 1));
        let second = next(&first, some.to_vec());
        assert_eq!((numbers(&second), second.slot_count()), (vec![1, 3, 4], 6));
        // Started as 5, whose slot is free; as 3, whose slot is not; and as a number that there never was.
        let new = [process(5, 2), process(3, 2), process(900, 2)];
        let third = next(&second, [&some[..], &new].concat());
        assert_eq!(
            (numbers(&third), third.slot_count()),
            (vec![1, 3, 4, 5, 0, 2], 6)
        );
        assert_eq!(third.slot(4).unwrap().incarnation, 2);
        assert_eq!(third.slot(6), None);
        // No slot is free any more.
        let fourth = next(
            &third,
            [third.members.clone(), vec![process(5, 3)]].concat(),
        );
        assert_eq!((numbers(&fourth)[6], fourth.slot_count()), (6, 7));
        // The number of slots counts free ones as well, also those behind all members.
        let fifth = next(&fourth, vec![process(1, 1)]);
        let sixth = next(&fifth, vec![process(1, 1), process(6, 4)]);
        assert_eq!((numbers(&sixth), sixth.slot_count()), (vec![1, 6], 7));
    }

    #[test]
    fn whatever_comes_and_goes_no_two_members_have_one_slot_and_none_changes() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..200 {
            let mut membership = first(random.u32(1..6));
            let mut all: BTreeMap<MemberId, usize> = BTreeMap::new();
            for incarnation in 2..20 {
                let kept = membership.members.iter().filter(|_| random.u8(..4) > 0);
                let mut members: Vec<_> = kept.cloned().collect();
                for new in 0..random.u64(0..3) {
                    members.push(process(random.u32(0..8), incarnation * 10 + new));
                }
                let before = membership;
                membership = next(&before, members);
                let slots = numbers(&membership);
                let distinct: BTreeSet<_> = slots.iter().collect();
                assert_eq!(distinct.len(), slots.len());
                let count = membership.slot_count();
                assert!(count >= before.slot_count() && slots.iter().all(|slot| *slot < count));
                // There is a new slot only where all others are taken.
                assert!(count == before.slot_count() || distinct.len() == count);
                for (process, slot) in membership.members.iter().zip(slots) {
                    assert_eq!(*all.entry(process.id).or_insert(slot), slot);
                }
                let decoded: Membership = wire::decode(&wire::encode(&membership)).unwrap();
                assert_eq!(decoded, membership);
            }
        }
    }

    #[test]
    fn a_membership_without_a_slot_for_each_member_is_not_decoded() {
        let broken: [fn(&mut Membership); 4] = [
            |membership| membership.slots[1] = 0,
            |membership| membership.slots.truncate(2),
            |membership| membership.slots.push(9),
            |membership| membership.slot_count = 2,
        ];
        for change in broken {
            let mut membership = first(3);
            change(&mut membership);
            let bytes = wire::encode(&membership);
            assert!(
                wire::decode::<Membership>(&bytes).is_err(),
                "{membership:?}"
            );
        }
    }
}

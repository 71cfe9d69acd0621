//! The first generation before it is active: which processes have joined it.

use std::collections::BTreeMap;

use super::id::{Generation, MemberId, Membership, Peer};
use super::message::Place;

/// See the module.
#[derive(Debug)]
pub(super) struct Forming {
    /// How many ranks it will have, and how many witnesses.
    size: u32,
    witnesses: u32,
    /// By slot. The ranks' are below `size`, those of the witnesses are not.
    joined: BTreeMap<u32, Peer>,
}

impl Forming {
    pub(super) fn new(me: &Peer, size: u32, witnesses: u32) -> Self {
        let joined = BTreeMap::from([(me.id.slot, me.clone())]);
        Self {
            size,
            witnesses,
            joined,
        }
    }

    pub(super) fn joined(&self, slot: u32) -> Option<&Peer> {
        self.joined.get(&slot)
    }

    /// All that have joined, with the process that forms it.
    pub(super) fn all(&self) -> impl Iterator<Item = MemberId> {
        self.joined.values().map(|peer| peer.id)
    }

    /// A process joins. Whether it is new, or nothing where it is not taken: its slot is another's, or there is no such slot.
    pub(super) fn join(&mut self, peer: Peer, seat: Place) -> Option<bool> {
        let slot = peer.id.slot;
        let known = self.joined.get(&slot);
        let is_place = match seat {
            Place::Rank => slot < self.size,
            Place::Witness => {
                let witnesses = self.joined.range(self.size..).count();
                slot >= self.size && (known.is_some() || witnesses < self.witnesses as usize)
            }
            Place::Joiner | Place::Absent => false,
        };
        if !is_place || known.is_some_and(|known| known.id != peer.id) {
            return None;
        }
        Some(self.joined.insert(slot, peer).is_none())
    }

    /// A process is gone that may have joined; then what was known of it.
    pub(super) fn fall(&mut self, id: MemberId) -> Option<Peer> {
        let known = self.joined.get(&id.slot).is_some_and(|peer| peer.id == id);
        known.then(|| self.joined.remove(&id.slot)).flatten()
    }

    /// The generation, as soon as all are there.
    pub(super) fn complete(&mut self, generation: Generation) -> Option<Membership> {
        if self.joined.len() < self.size as usize + self.witnesses as usize {
            return None;
        }
        let witnesses = self.joined.split_off(&self.size);
        let members = std::mem::take(&mut self.joined);
        let (members, witnesses) = (members.into_values(), witnesses.into_values());
        Some(Membership::new(
            generation,
            members.collect(),
            witnesses.collect(),
        ))
    }
}

//! The first generation before it is active: the processes that have joined it.

use std::collections::BTreeMap;

use super::id::{Generation, MemberId, ProcessInfo};
use super::membership::Membership;
use super::message::JoinRole;

/// The state of forming; see the module.
#[derive(Debug)]
pub(super) struct Forming {
    /// The number of ranks, and the number of witnesses.
    size: u32,
    witnesses: u32,
    /// By slot. The ranks' slots are below `size`, the witnesses' slots are not.
    joined: BTreeMap<u32, ProcessInfo>,
}

impl Forming {
    pub(super) fn new(me: &ProcessInfo, size: u32, witnesses: u32) -> Self {
        let joined = BTreeMap::from([(me.id.slot, me.clone())]);
        Self {
            size,
            witnesses,
            joined,
        }
    }

    pub(super) fn joined(&self, slot: u32) -> Option<&ProcessInfo> {
        self.joined.get(&slot)
    }

    /// Returns all processes that have joined, including the initial coordinator.
    pub(super) fn all(&self) -> impl Iterator<Item = MemberId> {
        self.joined.values().map(|process| process.id)
    }

    /// Adds a process. Returns whether it is new; `None` if it is refused because its slot is taken or does not exist.
    pub(super) fn join(&mut self, process: ProcessInfo, role: JoinRole) -> Option<bool> {
        let slot = process.id.slot;
        let known = self.joined.get(&slot);
        let is_slot = match role {
            JoinRole::Rank => slot < self.size,
            JoinRole::Witness => {
                let witnesses = self.joined.range(self.size..).count();
                slot >= self.size && (known.is_some() || witnesses < self.witnesses as usize)
            }
            JoinRole::Joiner | JoinRole::Absent => false,
        };
        if !is_slot || known.is_some_and(|known| known.id != process.id) {
            return None;
        }
        Some(self.joined.insert(slot, process).is_none())
    }

    /// Removes a process that may have joined; returns its information if it had joined.
    pub(super) fn remove(&mut self, id: MemberId) -> Option<ProcessInfo> {
        let known = self
            .joined
            .get(&id.slot)
            .is_some_and(|process| process.id == id);
        known.then(|| self.joined.remove(&id.slot)).flatten()
    }

    /// Returns the generation once all processes have joined.
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

//! The members of a generation.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::id::{Generation, MemberId, ProcessInfo};
use super::member_list;

/// The members of one generation, in the order of their ranks, and the witnesses that vote with them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "MembershipFields")]
pub struct Membership {
    /// The name of the generation.
    pub generation: Generation,
    /// By rank.
    #[serde(serialize_with = "member_list::serialize")]
    pub members: Vec<ProcessInfo>,
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
    #[serde(deserialize_with = "member_list::deserialize")]
    witnesses: Vec<ProcessInfo>,
}

impl From<MembershipFields> for Membership {
    fn from(parts: MembershipFields) -> Self {
        Self::new(parts.generation, parts.members, parts.witnesses)
    }
}

impl Membership {
    /// Makes a membership of members in the order of their ranks.
    #[must_use]
    pub fn new(
        generation: Generation,
        members: Vec<ProcessInfo>,
        witnesses: Vec<ProcessInfo>,
    ) -> Self {
        let ranks = members.iter().zip(0..);
        let mut index: Vec<_> = ranks.map(|(process, rank)| (process.id, rank)).collect();
        index.sort_unstable();
        let tolerates_unreachable = members.iter().all(|process| process.tolerates_unreachable);
        Self {
            generation,
            members,
            witnesses,
            index,
            tolerates_unreachable,
        }
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

//! Members, generations, terms.

use std::fmt;
use std::sync::Arc;

use nccl_base::wire::clean;
use serde::{Deserialize, Serialize};

use super::member_list;

/// A point on the clock of one process, in nanoseconds from its own origin. Times of different processes are never
/// compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// A time that is never reached.
    pub const NEVER: Self = Self(u64::MAX);

    /// Returns this time plus `nanos` nanoseconds.
    #[must_use]
    pub fn after(self, nanos: u64) -> Self {
        Self(self.0.saturating_add(nanos))
    }

    /// Returns the nanoseconds since `earlier`; 0 if `earlier` is later than this time.
    #[must_use]
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// One incarnation of one process in a job. A reused slot has a new incarnation, so that a frame of an ended process is
/// never attributed to its successor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MemberId {
    /// The place in the job, stable for the life of the process.
    pub slot: u32,
    /// A random number chosen by the process.
    pub incarnation: u64,
}

impl fmt::Debug for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{:x}", self.slot, self.incarnation)
    }
}

/// The name of one membership. Numbers increase by one; the proposer distinguishes two proposals with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Generation {
    /// Starts at the number configured for the job.
    pub number: u64,
    /// The member that proposed the generation, and is its first coordinator.
    pub proposer: MemberId,
}

/// A part of a generation in which one member coordinates. A later term has a higher round, or the same round and a
/// higher coordinator id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Term {
    /// Starts at 0, which is the round of the generation's proposer.
    pub round: u32,
    /// The coordinator.
    pub coordinator: MemberId,
}

impl Generation {
    /// Returns the term of the proposer.
    #[must_use]
    pub fn first_term(&self) -> Term {
        Term {
            round: 0,
            coordinator: self.proposer,
        }
    }
}

/// Information about a process of the job: a member, a joiner or an observer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessInfo {
    /// Its id.
    pub id: MemberId,
    /// The name of its host, for messages.
    #[serde(deserialize_with = "clean")]
    pub host: String,
    /// Its process id, in its own namespace.
    pub pid: u32,
    /// The start time of the process, in its kernel's units.
    pub start_time: u64,
    /// A checksum of the kernel and the namespace that are the scope of `pid`; 0 if not known.
    pub kernel: u64,
    /// The address at which the process listens.
    pub at: String,
    /// Its launcher rank, if any.
    pub launcher_rank: Option<u32>,
    /// Whether its launcher takes part as an observer, and will report how it ends.
    pub observed: bool,
    /// Whether the process stays with unreachable members while NCCL reaches them. Applies only if all members set it.
    pub tolerates_unreachable: bool,
}

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

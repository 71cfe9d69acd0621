//! The names of members, generations and terms.

use std::fmt;

use nccl_base::wire::clean;
use serde::{Deserialize, Serialize};

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
    /// The rank that the process was started as. Its slot in the job may have another number if it joined later
    /// ([`Membership::slot`](super::Membership::slot)).
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

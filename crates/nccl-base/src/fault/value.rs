//! A fault, as a value.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::cause::{FaultRole, RootCause, Waiting};
use super::operation::FaultOperation;
use crate::roster::Roster;

/// Why a communicator was ended, the same on all of its ranks.
///
/// [`culprit`](Self::culprit) is the rank that the fault began with, where that was found; [`host`](Self::host) and
/// [`pid`](Self::pid) are that rank's host and process. [`root`](Self::root) is the root cause as a value, and
/// [`cause`](Self::cause) the same in words. `docs/root-cause.md` describes how it is found.
///
/// Two faults are equal when they have the same cause, whatever else has become known beside it
/// ([`also`](Self::also), [`host_evidence`](Self::host_evidence)).
///
/// ```
/// # fn show(error: nccl::Error) {
/// if let Some((fault, rank)) = error.fault().and_then(|fault| Some((fault, fault.culprit()?))) {
///     eprintln!("look at rank {rank} ({}, pid {})", fault.host, fault.pid);
/// }
/// # }
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fault {
    /// The class of the fault.
    pub class: FaultClass,
    /// Whether the failure began with this fault, or the fault follows from another one that was not found.
    pub role: FaultRole,
    pub(super) communicator: String,
    #[serde(flatten)]
    pub(super) roster: Roster,
    #[serde(flatten)]
    pub(super) origin: Origin,
    /// The host of the [`culprit`](Self::culprit), or of the rank that [reported](Self::reported_by) the fault; empty
    /// where no rank is named.
    pub host: String,
    /// The process of the [`culprit`](Self::culprit), or of the rank that [reported](Self::reported_by) the fault; 0
    /// where no rank is named.
    pub pid: u32,
    /// The generation of the world that made the communicator (`World::generation`). If the fault names a rank that this
    /// communicator does not have, the generation in which that rank has its number. 0 in the first generation, and without a
    /// world.
    pub generation: u64,
    #[serde(flatten)]
    pub(super) operation: FaultOperation,
    /// The root cause, as a value.
    pub root: RootCause,
    /// What went wrong on the named rank.
    pub cause: String,
    /// The evidence: one sentence each, the weightiest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<String>,
    /// The operations in which the ranks waited meanwhile. Known once all ranks have ended their communicators, or
    /// reported their operations; ranks that did not report are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Waiting>,
    /// Evidence on the hosts: Xid messages, killed processes, threads that are stuck in the kernel; one sentence for
    /// each host with evidence. Known once the ranks have reported, or have ended their communicators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_evidence: Vec<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) hint: String,
    /// The timeout that passed, on the rank that ran out of time first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) timeout: Option<Duration>,
    /// Distinguishes faults with equal text, together with `announced_by`, the rank that reported first.
    #[serde(rename = "number")]
    pub(super) announcement_number: u64,
    #[serde(rename = "teller")]
    pub(super) announced_by: usize,
}

/// The rank that a fault names, and its role in the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Origin {
    /// The fault began with this rank of the communicator.
    Culprit(usize),
    /// The origin is not known; this rank of the communicator reported first.
    ReportedBy(usize),
    /// A rank that the communicator does not have: this communicator ended because another one did.
    Outside {
        world_rank: usize,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        launcher_rank: Option<usize>,
    },
    /// No single rank is at fault.
    NoRank {},
}

impl Origin {
    /// Returns the origin for a rank of the communicator.
    pub(super) fn new(rank: usize, role: FaultRole) -> Self {
        match role {
            FaultRole::Initiating => Self::Culprit(rank),
            FaultRole::Cascade | FaultRole::Teardown | FaultRole::Unknown => Self::ReportedBy(rank),
        }
    }
}

impl PartialEq for Fault {
    fn eq(&self, other: &Self) -> bool {
        let of = |fault: &Self| {
            (
                fault.class,
                fault.role,
                fault.origin,
                fault.pid,
                fault.generation,
                fault.announcement_number,
                fault.announced_by,
            )
        };
        of(self) == of(other)
            && self.texts() == other.texts()
            && self.root == other.root
            && self.evidence == other.evidence
    }
}

impl Eq for Fault {}

/// The class of a fault.
///
/// ```
/// # fn example(fault: &nccl::fault::Fault) {
/// if fault.class == nccl::fault::FaultClass::Gone {
///     eprintln!("its process has to be started again");
/// }
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FaultClass {
    /// NCCL or CUDA failed on a rank.
    Failed,
    /// An operation of a rank ran into its timeout.
    TimedOut,
    /// A rank's program ended the communicator, or its abort signal was given.
    Asked,
    /// A rank's process is gone, or reported that it fails.
    Gone,
    /// A rank's program has revoked the communicator, and may only shrink it (`Communicator::revoke`).
    Revoked,
    /// This rank cannot reach the others any more, and which side is at fault is not known.
    CutOff,
}

impl FaultClass {
    /// All classes; the index of each is its number.
    #[doc(hidden)]
    pub const ALL: [Self; 6] = [
        Self::Failed,
        Self::TimedOut,
        Self::Asked,
        Self::Gone,
        Self::Revoked,
        Self::CutOff,
    ];

    /// Returns the name used in events and metrics.
    #[doc(hidden)]
    pub fn name(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Asked => "asked",
            Self::Gone => "gone",
            Self::Revoked => "revoked",
            Self::CutOff => "cut_off",
        }
    }
}

impl Fault {
    /// Returns whether a program requested the end.
    #[doc(hidden)]
    pub fn is_on_purpose(&self) -> bool {
        matches!(self.class, FaultClass::Asked | FaultClass::Revoked)
    }

    /// Returns the timeout that passed, if one did.
    #[doc(hidden)]
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    #[doc(hidden)]
    pub fn communicator(&self) -> &str {
        &self.communicator
    }

    #[doc(hidden)]
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Returns the world rank and the launcher rank of the named rank, which may be a rank that only reported first.
    #[doc(hidden)]
    pub fn named_in_the_world(&self) -> (Option<usize>, Option<usize>) {
        match self.origin {
            Origin::Culprit(rank) | Origin::ReportedBy(rank) => (
                Some(self.roster.world_rank(rank)),
                self.roster.launcher_rank(rank),
            ),
            Origin::Outside {
                world_rank,
                launcher_rank,
            } if self.role == FaultRole::Initiating => (Some(world_rank), launcher_rank),
            // A rank outside of the communicator that only reported the fault says nothing about its origin.
            Origin::Outside { .. } | Origin::NoRank {} => (None, None),
        }
    }

    /// Returns the operation as values.
    #[doc(hidden)]
    pub fn operation_values(&self) -> &FaultOperation {
        &self.operation
    }

    /// Returns the rank of the communicator with which the fault began. `None` if that rank was not found
    /// ([`role`](Self::role) is not [`FaultRole::Initiating`]), if no single rank is at fault (for instance where ranks
    /// differ, and no side is the smallest), and if the fault began with a rank that this communicator does not have,
    /// and ended another communicator first; [`world_rank`](Self::world_rank) then names that rank.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, fault: &nccl::fault::Fault) {
    /// match fault.culprit() {
    ///     Some(rank) if rank == comm.rank() => println!("it began here"),
    ///     Some(rank) => println!("it began with rank {rank}"),
    ///     None => println!("what it began with was not found: {fault}"),
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn culprit(&self) -> Option<usize> {
        match self.origin {
            Origin::Culprit(rank) => Some(rank),
            _ => None,
        }
    }

    /// Returns the rank of the communicator that was the first to run out of time, or to observe a consequence of the
    /// cause, if the cause was not found; `None` otherwise, and if no rank of this communicator reported it. Nothing shows
    /// that this rank is to blame.
    ///
    /// ```
    /// # fn example(fault: &nccl::fault::Fault) {
    /// if let Some(rank) = fault.reported_by() {
    ///     println!("begin to look with the log of rank {rank}, and of those that it exchanges data with");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn reported_by(&self) -> Option<usize> {
        match self.origin {
            Origin::ReportedBy(rank) => Some(rank),
            _ => None,
        }
    }

    /// Returns the world rank with which the fault began: that of the [`culprit`](Self::culprit), or of a rank that this
    /// communicator does not have. The number is for the world of the [`generation`](Self::generation). `None` if no rank is
    /// known.
    ///
    /// ```
    /// # fn example(fault: &nccl::fault::Fault) {
    /// if let (Some(rank), Some(world_rank)) = (fault.culprit(), fault.world_rank()) {
    ///     println!("rank {rank} of its communicator, which is rank {world_rank} of the world");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn world_rank(&self) -> Option<usize> {
        match self.origin {
            Origin::Culprit(rank) => Some(self.roster.world_rank(rank)),
            Origin::Outside { world_rank, .. } if self.role == FaultRole::Initiating => {
                Some(world_rank)
            }
            _ => None,
        }
    }

    /// Returns the number under which `nccl-run`, torchrun, MPI or Slurm started that rank, if it differs from the
    /// [`world_rank`](Self::world_rank), as after a recovery; the launcher prefixes the rank's output lines with this
    /// number. `None` if both are the same, no launcher started the rank, or no rank is known.
    ///
    /// ```
    /// # fn example(fault: &nccl::fault::Fault) {
    /// if let Some(rank) = fault.launcher_rank().or(fault.world_rank()) {
    ///     println!("look at the lines that begin with [{rank}]");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn launcher_rank(&self) -> Option<usize> {
        match self.origin {
            Origin::Outside { launcher_rank, .. } => {
                launcher_rank.filter(|_| self.world_rank().is_some())
            }
            _ => self.roster.launcher_rank(self.culprit()?),
        }
    }

    /// Returns the operation of the named rank, if that rank was in one.
    ///
    /// ```
    /// # fn example(fault: &nccl::fault::Fault) {
    /// println!("in {}", fault.operation().unwrap_or("no operation"));
    /// # }
    /// ```
    #[must_use]
    pub fn operation(&self) -> Option<&str> {
        (!self.operation.text.is_empty()).then_some(&*self.operation.text)
    }

    /// Returns the remedy, if known.
    ///
    /// ```
    /// # fn example(fault: &nccl::fault::Fault) {
    /// println!("{}", fault.hint().unwrap_or("nothing is known to help"));
    /// # }
    /// ```
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        (!self.hint.is_empty()).then_some(&*self.hint)
    }

    /// Returns the named rank of the communicator, or else the rank that announced the fault.
    #[doc(hidden)]
    pub fn rank(&self) -> usize {
        match self.origin {
            Origin::Culprit(rank) | Origin::ReportedBy(rank) => rank,
            Origin::Outside { .. } | Origin::NoRank {} => self.announced_by,
        }
    }

    /// Returns whether both faults stem from the same announcement of one rank.
    #[doc(hidden)]
    pub fn is_of(&self, announced: &Self) -> bool {
        (self.announcement_number, self.announced_by)
            == (announced.announcement_number, announced.announced_by)
    }

    /// Returns the same fault, with the operations in which the ranks waited.
    #[doc(hidden)]
    pub fn with_also(&self, also: Vec<Waiting>) -> Self {
        Self {
            also,
            ..self.clone()
        }
    }

    /// Returns the same fault, with the evidence on the hosts.
    #[doc(hidden)]
    pub fn with_host_evidence(&self, host_evidence: Vec<String>) -> Self {
        Self {
            host_evidence,
            ..self.clone()
        }
    }

    /// Returns the fault of a communicator without other ranks, after the kernel's log of its host was read and shows nothing.
    #[doc(hidden)]
    pub fn with_clean_log_alone(&self) -> Self {
        let mut fault = self.clone();
        let is_unexplained =
            (fault.class, fault.role) == (FaultClass::TimedOut, FaultRole::Unknown);
        if is_unexplained && !matches!(fault.root, RootCause::StuckOutside { .. }) {
            fault.hint = ALONE_AND_CLEAN.to_owned();
        }
        fault
    }

    /// Returns this rank's own fault as the decided fault, if the state of the other ranks could not be collected.
    #[doc(hidden)]
    pub fn without_others(&self) -> Self {
        let mut fault = self.clone();
        if (fault.class, fault.role) == (FaultClass::TimedOut, FaultRole::Unknown) {
            fault.hint = NOT_COLLECTED.to_owned();
        }
        fault
    }

    /// Returns whether the fault itself shows its cause, so that no report of another rank is needed.
    #[doc(hidden)]
    pub fn is_certain(&self) -> bool {
        !matches!(self.class, FaultClass::TimedOut) && self.role == FaultRole::Initiating
    }

    pub(super) fn texts(&self) -> [&str; 5] {
        [
            &self.communicator,
            &self.host,
            &self.operation.text,
            &self.cause,
            &self.hint,
        ]
    }
}

impl std::error::Error for Fault {}

/// Hint for a communicator without other ranks to wait for.
#[doc(hidden)]
pub const ALONE: &str = "the communicator has no other rank, so that what is left is a device that hangs, a call that \
                                does not return, or an operation that takes longer than its timeout: look at nvidia-smi, and at \
                                the Xid messages in the kernel's log, which nccl-doctor reads";

/// The same hint, after the kernel's log was read.
const ALONE_AND_CLEAN: &str = "the communicator has no other rank, so that what is left is a device that hangs, a call that does not \
                               return, or an operation that takes longer than its timeout: the kernel's log has no Xid message \
                               since the process was started; look at nvidia-smi";

/// Hint where the state of the other ranks was not collected.
#[doc(hidden)]
pub const NOT_COLLECTED: &str = "what the other ranks were at could not be collected in time: look at what every rank printed \
                                        last, whether a process is stopped or starved, and at the network between the \
                                        hosts";

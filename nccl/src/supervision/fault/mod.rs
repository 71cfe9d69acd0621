//! Why a communicator was ended: the cause that all of its ranks return.
//!
//! - here, the value: where it began, and what it was;
//! - `diagnosis`: what was at the root, before it is known whose it is;
//! - `text`: how it reads; `wire`: how it travels.

mod diagnosis;
mod text;
mod wire;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub(crate) use self::diagnosis::Cause;
use super::cause::{FaultRole, RootCause, Waiting};
use super::roster::Roster;
use crate::error::ErrorKind;

/// Why a communicator was ended, the same on all of its ranks.
///
/// [`culprit`](Self::culprit) is the rank that it began with, where that was found; [`host`](Self::host) and
/// [`pid`](Self::pid) are its host and its process. [`root`](Self::root) is what it was, in values, and
/// [`cause`](Self::cause) the same in words. How it is found is in `docs/root-cause.md`.
///
/// Two are equal when they are of the same cause, whatever else has become known beside it
/// ([`also`](Self::also)).
///
/// ```
/// # fn show(error: nccl::Error) {
/// if let Some((fault, rank)) = error.fault().and_then(|fault| Some((fault, fault.culprit()?))) {
///     eprintln!("look at rank {rank} ({}, pid {})", fault.host(), fault.pid());
/// }
/// # }
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fault {
    class: FaultClass,
    role: FaultRole,
    communicator: String,
    #[serde(flatten)]
    roster: Roster,
    #[serde(flatten)]
    origin: Origin,
    host: String,
    pid: u32,
    epoch: u64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    operation: String,
    root: RootCause,
    cause: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    evidence: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    also: Vec<Waiting>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    hint: String,
    /// The limit that passed, of the rank that ran out of time first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    limit: Option<Duration>,
    /// Tells apart what reads the same, with the rank that told of it first.
    number: u64,
    teller: usize,
}

/// The rank of the communicator that a fault names, and what it has to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Origin {
    /// It began with this one.
    Culprit(usize),
    /// What it began with is not known; this one told of it first.
    ReportedBy(usize),
}

impl Origin {
    fn new(rank: usize, role: FaultRole) -> Self {
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
                fault.epoch,
                fault.number,
                fault.teller,
            )
        };
        of(self) == of(other)
            && self.texts() == other.texts()
            && self.root == other.root
            && self.evidence == other.evidence
    }
}

impl Eq for Fault {}

/// What kind of thing it was.
///
/// ```
/// # fn example(fault: &nccl::Fault) {
/// if fault.class() == nccl::FaultClass::Gone {
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
    /// An operation of a rank ran into its limit.
    TimedOut,
    /// A rank's program ended the communicator, or its abort signal was given.
    Asked,
    /// A rank's process is gone, or it said that it fails.
    Gone,
    /// A rank's program wants nothing more of it but to shrink it ([`Communicator::revoke`]).
    ///
    /// [`Communicator::revoke`]: crate::Communicator::revoke
    Revoked,
    /// This rank cannot reach the others any more, and which side is at fault is not known.
    CutOff,
}

impl FaultClass {
    /// All classes, each at its number.
    pub(crate) const ALL: [Self; 6] = [
        Self::Failed,
        Self::TimedOut,
        Self::Asked,
        Self::Gone,
        Self::Revoked,
        Self::CutOff,
    ];

    /// As events and metrics call it.
    pub(crate) fn name(self) -> &'static str {
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

/// Of which communicator, and where, a fault arose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'p> {
    pub(super) communicator: &'p str,
    pub(super) roster: &'p Roster,
    /// In the communicator.
    pub(super) rank: usize,
    pub(super) host: &'p str,
    pub(super) pid: u32,
    /// Of the world that made the communicator.
    pub(super) epoch: u64,
}

impl Fault {
    pub(super) fn new(cause: Cause, place: Place<'_>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            class: cause.class,
            role: cause.role,
            communicator: place.communicator.to_owned(),
            roster: place.roster.clone(),
            origin: Origin::new(place.rank, cause.role),
            host: place.host.to_owned(),
            pid: place.pid,
            epoch: place.epoch,
            operation: cause.operation,
            root: cause.root,
            cause: cause.text,
            evidence: cause.evidence,
            also: cause.also,
            hint: cause.hint,
            limit: cause.limit,
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            teller: place.rank,
        }
    }

    /// One that every rank makes by itself, from what all have heard: equal on all of them.
    pub(super) fn derived(cause: Cause, place: Place<'_>) -> Self {
        Self {
            number: 0,
            ..Self::new(cause, place)
        }
    }

    /// A fault of rank `rank` of `communicator`, on this host.
    pub(crate) fn here(
        cause: Cause,
        (communicator, roster): (&str, &Roster),
        rank: usize,
        epoch: u64,
    ) -> Self {
        let place = Place {
            communicator,
            roster,
            rank,
            host: &crate::host::name(),
            pid: std::process::id(),
            epoch,
        };
        Self::new(cause, place)
    }

    /// The kind of error with which the ranks return that saw nothing else.
    pub(crate) fn kind(&self) -> ErrorKind {
        match (self.class, self.limit) {
            (FaultClass::TimedOut, Some(limit)) => ErrorKind::TimedOut {
                what: match self.operation() {
                    Some(operation) => operation.to_owned(),
                    None => String::from("an operation of another rank"),
                },
                limit,
            },
            _ => ErrorKind::Aborted {
                reason: self.to_string(),
            },
        }
    }

    /// Whether a program wanted it so.
    pub(crate) fn is_on_purpose(&self) -> bool {
        matches!(self.class, FaultClass::Asked | FaultClass::Revoked)
    }

    /// The limit that passed, if one did.
    pub(super) fn limit(&self) -> Option<Duration> {
        self.limit
    }

    pub(crate) fn communicator(&self) -> &str {
        &self.communicator
    }

    pub(crate) fn roster(&self) -> &Roster {
        &self.roster
    }

    /// The name of the operation, and its number, where they are known.
    pub(crate) fn operation_and_sequence(&self) -> (Option<&str>, Option<u64>) {
        // As `Operation::what` writes it.
        let mut words = self.operation.split(' ');
        let name = words.next().filter(|name| !name.is_empty());
        let number = words.next().and_then(|word| word.strip_prefix('#'));
        (name, number.and_then(|number| number.parse().ok()))
    }

    /// What kind of thing it was.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("{:?}", fault.class());
    /// # }
    /// ```
    #[must_use]
    pub fn class(&self) -> FaultClass {
        self.class
    }

    /// The rank that it began with, in the communicator; `None` where that was not found
    /// ([`role`](Self::role) is not [`FaultRole::Initiating`]).
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, fault: &nccl::Fault) {
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
            Origin::ReportedBy(_) => None,
        }
    }

    /// The rank that was the first to run out of time, or to see what follows from the cause, in the communicator,
    /// where the cause was not found; `None` where [`culprit`](Self::culprit) is known. Nothing shows that this rank is
    /// to blame.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// if let Some(rank) = fault.reported_by() {
    ///     println!("begin to look with the log of rank {rank}, and of those that it exchanges data with");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn reported_by(&self) -> Option<usize> {
        match self.origin {
            Origin::Culprit(_) => None,
            Origin::ReportedBy(rank) => Some(rank),
        }
    }

    /// Which rank of the world the [`culprit`](Self::culprit) is: the world of the [`epoch`](Self::epoch) in which the
    /// communicator was made. `None` where there is no culprit.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// if let (Some(rank), Some(world_rank)) = (fault.culprit(), fault.world_rank()) {
    ///     println!("rank {rank} of its communicator, which is rank {world_rank} of the world");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn world_rank(&self) -> Option<usize> {
        self.culprit().map(|rank| self.roster.world_rank(rank))
    }

    /// Which rank `nccl-run`, torchrun, MPI or Slurm started the [`culprit`](Self::culprit) as, where that is not its
    /// [`world_rank`](Self::world_rank), as after a recovery; it is the number before the lines of its output. `None`
    /// where both are the same, no launcher started it, or there is no culprit.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// if let Some(rank) = fault.launcher_rank().or(fault.world_rank()) {
    ///     println!("look at the lines that begin with [{rank}]");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn launcher_rank(&self) -> Option<usize> {
        self.roster.launcher_rank(self.culprit()?)
    }

    /// The host of the [`culprit`](Self::culprit), or of the rank that [reported](Self::reported_by) it.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// if fault.culprit().is_some() {
    ///     println!("look on {}", fault.host());
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The process of the [`culprit`](Self::culprit), or of the rank that [reported](Self::reported_by) it.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// if fault.culprit().is_some() {
    ///     println!("look at process {}", fault.pid());
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The epoch of the world that made the communicator ([`World::epoch`](crate::World::epoch)); 0 in the
    /// first, and without a world.
    ///
    /// ```
    /// # fn example(world: &nccl::World, fault: &nccl::Fault) {
    /// if fault.epoch() < world.epoch() {
    ///     println!("the world has gone on since");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The operation of the rank that it names, if that was in one.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("in {}", fault.operation().unwrap_or("no operation"));
    /// # }
    /// ```
    #[must_use]
    pub fn operation(&self) -> Option<&str> {
        (!self.operation.is_empty()).then_some(&*self.operation)
    }

    /// What was at the root of it, in values.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// if let nccl::RootCause::CallFailed { nccl: Some(code), .. } = fault.root() {
    ///     println!("NCCL returned {code} on {}", fault.host());
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn root(&self) -> &RootCause {
        &self.root
    }

    /// Whether it began with this, or follows from something that was not found.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("{:?}", fault.role());
    /// # }
    /// ```
    #[must_use]
    pub fn role(&self) -> FaultRole {
        self.role
    }

    /// What shows it: one sentence each, the weightiest first.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// for line in fault.evidence() {
    ///     println!("  {line}");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn evidence(&self) -> &[String] {
        &self.evidence
    }

    /// Who waited for what meanwhile. Known once all ranks have ended their communicators, or said what they
    /// were at; of those that did not say, nothing is here.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// for waiting in fault.also() {
    ///     println!("{waiting}");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn also(&self) -> &[Waiting] {
        &self.also
    }

    /// What went wrong there.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("{}", fault.cause());
    /// # }
    /// ```
    #[must_use]
    pub fn cause(&self) -> &str {
        &self.cause
    }

    /// What to do about it, where that is known.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("{}", fault.hint().unwrap_or("nothing is known to help"));
    /// # }
    /// ```
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        (!self.hint.is_empty()).then_some(&*self.hint)
    }

    /// The rank that it names: its host, process and operation are those of this one.
    pub(super) fn rank(&self) -> usize {
        match self.origin {
            Origin::Culprit(rank) | Origin::ReportedBy(rank) => rank,
        }
    }

    /// Whether both began with what one rank told.
    pub(super) fn is_of(&self, told: &Self) -> bool {
        (self.number, self.teller) == (told.number, told.teller)
    }

    /// The same, with who waited.
    pub(super) fn with_also(&self, also: Vec<Waiting>) -> Self {
        Self {
            also,
            ..self.clone()
        }
    }

    /// Whether it says itself what began it, so that nobody else has to be heard.
    pub(super) fn is_certain(&self) -> bool {
        !matches!(self.class, FaultClass::TimedOut) && self.role == FaultRole::Initiating
    }

    /// What all ranks are told: another cause and another place for what the first that told began.
    pub(super) fn elected(&self, cause: Cause, place: Place<'_>) -> Self {
        Self {
            number: self.number,
            teller: self.teller,
            ..Self::new(cause, place)
        }
    }

    fn texts(&self) -> [&str; 5] {
        [
            &self.communicator,
            &self.host,
            &self.operation,
            &self.cause,
            &self.hint,
        ]
    }
}

impl std::error::Error for Fault {}

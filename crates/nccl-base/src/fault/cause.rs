//! Root causes of a fault, as values that a program can match on.
//!
//! The texts for readers are made from these values, or accompany them ([`Fault`](super::Fault)).

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::departure::{Exit, Signal};
use crate::roster::Roster;

/// The root cause of a [`Fault`](super::Fault).
///
/// ```
/// use nccl::fault::RootCause;
///
/// # fn show(fault: &nccl::fault::Fault) {
/// match &fault.root {
///     RootCause::Died { ending: Some(ending), .. } => println!("{} on {}: {ending}", fault.pid, fault.host),
///     RootCause::NeverEntered { operation, .. } => println!("rank {:?} missed {operation}", fault.culprit()),
///     other => println!("{other:?}"),
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum RootCause {
    /// The rank's process ended without a leave message, or with an exit status that is not 0.
    Died {
        /// How it ended, if that was reported by the process that started it, or by itself.
        ending: Option<Ending>,
        /// Whether the kernel ended it because memory was exhausted, as the process that started it reports.
        #[serde(default)]
        out_of_memory: bool,
    },
    /// The rank's program panicked, or reported that it fails (`World::fail`).
    ProgramFailed {
        /// The reported reason.
        reason: String,
    },
    /// A call into NCCL or CUDA failed on the rank before anything else did.
    CallFailed {
        /// The function, where that is known.
        call: Option<String>,
        /// NCCL's code (`ncclResult_t`), if NCCL failed.
        nccl: Option<u32>,
        /// CUDA's code (`CUresult`), if CUDA failed.
        cuda: Option<u32>,
        /// Whether the device had failed before the operation was issued: the cause is then an earlier kernel, and
        /// neither NCCL nor the operation.
        #[serde(default)]
        failed_before: bool,
    },
    /// Ranks entered operations that do not match, at the same position in their order.
    Mismatch {
        /// The field in which they differ.
        field: MismatchField,
        /// The number of the operation among those that all ranks call, from 1, if the ranks can count them alike.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sequence: Option<u64>,
        /// The ranks with each value; the value of the most ranks comes first.
        sides: Vec<MismatchSide>,
    },
    /// The rank has not entered an operation in which other ranks wait.
    NeverEntered {
        /// The operation.
        operation: String,
        /// The rank's last call on this communicator, and how long ago it was made.
        last: Option<PastEvent>,
        /// The phase of the rank's program (`World::phase`), and how long ago it began.
        phase: Option<PastEvent>,
    },
    /// A message has no counterpart.
    Unmatched {
        /// The sending rank.
        from: usize,
        /// The receiving rank.
        to: usize,
        /// How many messages `from` has sent to `to`.
        sent: u64,
        /// How many receives from `from` the rank `to` has issued.
        received: u64,
    },
    /// A rank sends another number of elements than the receiver expects.
    UnequalCounts {
        /// The sending rank.
        from: usize,
        /// The receiving rank.
        to: usize,
        /// Number of elements sent, with their type where that differs.
        sends: String,
        /// Number of elements that the receiver expects, in the same form.
        expects: String,
    },
    /// Ranks wait for each other in a circle: for instance, each sends to the next before it receives.
    Cycle {
        /// The ranks in order; the last sends to the first.
        ranks: Vec<usize>,
    },
    /// Two ranks called operations of two communicators in different orders.
    InverseOrder {
        /// The two ranks.
        ranks: [usize; 2],
        /// The communicators in the order of the first rank; the second rank used the reverse order.
        communicators: [String; 2],
    },
    /// The rank is inside a call into NCCL or CUDA that does not return.
    StuckInside {
        /// What is known of the call.
        operation: String,
    },
    /// The rank's operation waits behind work on its stream that does not belong to the communicator.
    StuckOutside {
        /// The operation.
        operation: String,
    },
    /// NCCL reports that the rank's device makes no progress with the operation, while the other ranks wait for it.
    SlowRank {
        /// The operation.
        operation: String,
    },
    /// NCCL reports on both ranks that the network between them transfers nothing, or too little.
    SlowNetwork {
        /// The sending rank.
        from: usize,
        /// The receiving rank.
        to: usize,
        /// Number of steps that have arrived, on the channel that is furthest behind.
        done: u32,
        /// Number of steps of the transfer.
        steps: u32,
        /// Whether data still arrives, too slowly.
        is_moving: bool,
    },
    /// A host cannot be reached any more.
    HostLost {
        /// The host's name.
        host: String,
        /// The ranks of the communicator at the host's address. Usually all of them are cut off together, but only the
        /// first is known to be.
        ranks: Vec<usize>,
    },
    /// A limit of the system or the device is reached.
    ResourceExhausted {
        /// The resource that is used up: `device memory`, `open files`, …
        resource: String,
    },
    /// Ranks do not answer, although nothing shows that they are gone: they are frozen, or starved of CPU time.
    NotAnswering {
        /// The ranks.
        ranks: Vec<usize>,
        /// The kernel's state of the first rank's process, if it could be read.
        state: Option<String>,
    },
    /// Some ranks cannot reach some others, and it is unknown which side is at fault.
    Partition {
        /// The ranks that the reporting rank cannot reach.
        from: Vec<usize>,
    },
    /// NCCL gave a warning that can be the cause.
    Warned {
        /// The text of the warning.
        warning: String,
    },
    /// The program requested the end.
    Asked,
    /// The fault is not explained; [`Fault::evidence`](super::Fault::evidence) has what was found.
    Unknown,
}

impl RootCause {
    /// Returns whether the sentence of this root cause continues directly after the name of a rank.
    #[doc(hidden)]
    pub fn names_a_rank(&self) -> bool {
        !matches!(
            self,
            Self::CallFailed { .. }
                | Self::ProgramFailed { .. }
                | Self::StuckOutside { .. }
                | Self::StuckInside { .. }
                | Self::ResourceExhausted { .. }
                | Self::Warned { .. }
                | Self::Asked
                | Self::Unknown
        )
    }
}

impl RootCause {
    /// Returns whether no rank is at fault: the network between ranks is, or the two smallest of the differing sides have
    /// equally many ranks.
    #[doc(hidden)]
    pub fn is_of_no_rank(&self) -> bool {
        let sides = match self {
            Self::Mismatch { sides, .. } => sides,
            Self::SlowNetwork { .. } => return true,
            _ => return false,
        };
        let mut smallest = sides.iter().rev().map(|side| side.ranks.len());
        smallest
            .next()
            .is_some_and(|last| smallest.next() == Some(last))
    }

    /// Returns whether the sentence of this root cause contains numbers of ranks.
    #[doc(hidden)]
    pub fn names_ranks(&self) -> bool {
        !matches!(
            self,
            Self::Died { .. }
                | Self::ProgramFailed { .. }
                | Self::CallFailed { .. }
                | Self::ResourceExhausted { .. }
                | Self::HostLost { .. }
                | Self::Partition { .. }
                | Self::Asked
        )
    }

    /// Returns the same root cause for another communicator; `place_of` maps its ranks to the ranks there.
    #[doc(hidden)]
    pub fn for_other_communicator(&self, place_of: impl Fn(usize) -> Option<usize>) -> Self {
        let some = |ranks: &[usize]| ranks.iter().filter_map(|rank| place_of(*rank)).collect();
        let all = |ranks: &[usize]| -> Option<Vec<usize>> {
            ranks.iter().map(|rank| place_of(*rank)).collect()
        };
        let mut other = self.clone();
        let is_known = match &mut other {
            Self::HostLost { ranks, .. }
            | Self::NotAnswering { ranks, .. }
            | Self::Partition { from: ranks } => {
                *ranks = some(ranks);
                true
            }
            Self::Cycle { ranks } => all(ranks).map(|all| *ranks = all).is_some(),
            Self::Mismatch { sides, .. } => sides
                .iter_mut()
                .all(|side| all(&side.ranks).map(|all| side.ranks = all).is_some()),
            Self::Unmatched { from, to, .. }
            | Self::UnequalCounts { from, to, .. }
            | Self::SlowNetwork { from, to, .. } => place_of(*from)
                .zip(place_of(*to))
                .map(|both| (*from, *to) = both)
                .is_some(),
            Self::InverseOrder { ranks, .. } => place_of(ranks[0])
                .zip(place_of(ranks[1]))
                .map(|(one, other)| *ranks = [one, other])
                .is_some(),
            _ => true,
        };
        match is_known {
            true => other,
            false => Self::Unknown,
        }
    }
}

/// The field in which ranks differ.
///
/// ```
/// let differs: nccl::fault::MismatchField = serde_json::from_str("\"data_type\"")?;
/// assert_eq!(differs, nccl::fault::MismatchField::DataType);
/// assert_eq!(differs.to_string(), "data type");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MismatchField {
    /// The operation.
    Operation,
    /// The number of elements.
    Count,
    /// The type of the elements.
    DataType,
    /// The operator of a reduction.
    Reduction,
    /// The root.
    Root,
    /// The launch mode in which NCCL is to be called (`LaunchMode`).
    LaunchMode,
}

impl fmt::Display for MismatchField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Operation => "operation",
            Self::Count => "count",
            Self::DataType => "data type",
            Self::Reduction => "reduction",
            Self::Root => "root",
            Self::LaunchMode => "launch mode",
        })
    }
}

/// The ranks with one value of a field in which ranks differ.
///
/// ```
/// # fn example(fault: &nccl::fault::Fault) {
/// if let nccl::fault::RootCause::Mismatch { field, sides, .. } = &fault.root {
///     for nccl::fault::MismatchSide { ranks, value, .. } in sides {
///         println!("{field} of ranks {ranks:?}: {value}");
///     }
/// }
/// # }
/// let side: nccl::fault::MismatchSide = serde_json::from_str(r#"{"ranks":[1],"value":"f16"}"#)?;
/// assert_eq!(side.value, "f16");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MismatchSide {
    /// Ranks in the communicator.
    pub ranks: Vec<usize>,
    /// Their value.
    pub value: String,
}

/// An earlier event or phase, and how long ago it began.
///
/// ```
/// let phase: nccl::fault::PastEvent = serde_json::from_str(r#"{"what":"loading","ago_ms":1500}"#)?;
/// assert_eq!(phase.to_string(), "loading, 1.5 s ago");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PastEvent {
    /// The event or phase.
    pub what: String,
    /// Time since it began; in milliseconds where it is serialized.
    #[serde(rename = "ago_ms", with = "millis")]
    pub ago: Duration,
}

impl MismatchSide {
    #[doc(hidden)]
    pub fn of(rank: usize, value: String) -> Self {
        Self {
            ranks: vec![rank],
            value,
        }
    }
}

impl PastEvent {
    #[doc(hidden)]
    pub fn new(what: String, ago: Duration) -> Self {
        Self { what, ago }
    }
}

mod millis {
    use std::time::Duration;

    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_millis)
    }
}

impl fmt::Display for PastEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {:.1} s ago", self.what, self.ago.as_secs_f64())
    }
}

/// How a process ended.
///
/// ```
/// let ending = nccl::fault::Ending::Code(3);
/// assert_eq!(serde_json::to_string(&ending)?, r#"{"code":3}"#);
/// # fn example(fault: &nccl::fault::Fault) {
/// if let nccl::fault::RootCause::Died { ending: Some(nccl::fault::Ending::Signal(9)), .. } = fault.root {
///     println!("process {} on {} was killed", fault.pid, fault.host);
/// }
/// # }
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Ending {
    /// It returned this exit code.
    Code(i32),
    /// The signal of this number ended it.
    Signal(i32),
}

impl Ending {
    /// Converts `exit`; `None` if the parent does not know the exit status.
    #[doc(hidden)]
    pub fn of(exit: Exit) -> Option<Self> {
        match exit {
            Exit::Code(code) => Some(Self::Code(code)),
            Exit::Signal { signal, .. } => Some(Self::Signal(signal.number())),
            Exit::Unknown => None,
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => write!(f, "was killed by {}", Signal::new(signal)),
        }
    }
}

/// The role of a fault among all reports about one failure.
///
/// ```
/// # fn example(fault: &nccl::fault::Fault) {
/// if fault.role == nccl::fault::FaultRole::Unknown {
///     println!("nothing explains it: {}", fault.evidence.join("; "));
/// }
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FaultRole {
    /// The failure began with this fault.
    Initiating,
    /// The fault follows from another one, which was not found.
    Cascade,
    /// The fault follows from the end of a communicator: NCCL reports it while the communicator ends, and it is not a
    /// cause.
    Teardown,
    /// Not known.
    Unknown,
}

impl FaultRole {
    /// Returns the name used in events and files.
    #[doc(hidden)]
    pub fn name(self) -> &'static str {
        match self {
            Self::Initiating => "initiating",
            Self::Cascade => "cascade",
            Self::Teardown => "teardown",
            Self::Unknown => "unknown",
        }
    }
}

/// Ranks that waited in the same operation when a communicator was ended.
///
/// ```
/// let waiting: nccl::fault::Waiting = serde_json::from_str(r#"{"ranks":[0,2],"operation":"all_reduce #7"}"#)?;
/// assert_eq!(waiting.to_string(), "ranks 0,2 were waiting in all_reduce #7");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Waiting {
    /// Ranks in the communicator.
    pub ranks: Vec<usize>,
    /// The operation in which these ranks waited.
    pub operation: String,
}

impl Waiting {
    /// Groups ranks by the operation in which they wait, ordered by the first rank of each group. Ranks that do not wait are
    /// left out.
    #[doc(hidden)]
    pub fn together<T: AsRef<str>>(states: impl Iterator<Item = (usize, T)>) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for (rank, standing) in states {
            let standing = standing.as_ref();
            if standing.is_empty() {
                continue;
            }
            match all.iter_mut().find(|one| one.operation == standing) {
                Some(one) => one.ranks.push(rank),
                None => all.push(Self {
                    ranks: vec![rank],
                    operation: standing.to_owned(),
                }),
            }
        }
        all
    }
}

impl Waiting {
    /// Returns the sentence, with the world and launcher ranks of its ranks.
    #[doc(hidden)]
    pub fn text_of(&self, roster: &Roster) -> String {
        let (ranks, operation) = (roster.who(&self.ranks), &self.operation);
        let was = if self.ranks.len() == 1 { "was" } else { "were" };
        format!("{ranks} {was} waiting in {operation}")
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text_of(&Roster::default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ending_of_a_process_follows_from_its_exit() {
        let signal = Signal::Segv;
        let exit = Exit::Signal {
            signal,
            core_dumped: true,
        };
        assert_eq!(Ending::of(exit), Some(Ending::Signal(signal.number())));
        assert_eq!(Ending::of(Exit::Code(3)), Some(Ending::Code(3)));
        assert_eq!(Ending::of(Exit::Unknown), None);
        assert_eq!(Ending::Signal(9).to_string(), "was killed by SIGKILL");
    }

    #[test]
    fn those_who_wait_are_listed_in_ranges() {
        let mut waiting = Waiting {
            ranks: vec![0, 1, 2, 5],
            operation: String::from("all_reduce #4"),
        };
        assert_eq!(
            waiting.to_string(),
            "ranks 0-2,5 were waiting in all_reduce #4"
        );
        waiting.ranks = vec![3];
        assert_eq!(waiting.to_string(), "rank 3 was waiting in all_reduce #4");
    }
}

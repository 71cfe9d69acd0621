//! The cause of the end of a communicator, as it travels between ranks and as it reads.

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::cause::{Ending, FaultRole, RootCause, Waiting, who};
use crate::debug_log::{self, FirstWarning};
use crate::error::{Error, ErrorKind};
use crate::rendezvous::Broken;

/// Why a communicator was ended, the same on all of its ranks.
///
/// [`rank`](Self::rank), [`host`](Self::host) and [`pid`](Self::pid) are where it began, [`root`](Self::root) is
/// what it was, in values, and [`cause`](Self::cause) the same in words. How it is found is in
/// `docs/root-cause.md`.
///
/// Two are equal when they are of the same cause, whatever else has become known beside it
/// ([`also`](Self::also)).
///
/// ```
/// # fn show(error: nccl::Error) {
/// if let Some(fault) = error.fault() {
///     eprintln!("look at rank {} ({}, pid {})", fault.rank(), fault.host(), fault.pid());
/// }
/// # }
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fault {
    class: FaultClass,
    role: FaultRole,
    communicator: String,
    rank: usize,
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
    /// Tells apart what reads the same, with the rank that told of it first.
    number: u64,
    teller: usize,
}

impl PartialEq for Fault {
    fn eq(&self, other: &Self) -> bool {
        let of = |fault: &Self| {
            (
                fault.class,
                fault.role,
                fault.rank,
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

/// A fault before it is known whose it is.
#[derive(Clone, Debug)]
pub(crate) struct Cause {
    pub(super) class: FaultClass,
    pub(super) role: FaultRole,
    pub(super) root: RootCause,
    pub(super) operation: String,
    pub(super) text: String,
    pub(super) evidence: Vec<String>,
    pub(super) also: Vec<Waiting>,
    pub(super) hint: String,
    /// When the operation was called that it is about, on this rank.
    pub(super) began: Option<Instant>,
}

/// How the word of a parent begins, and what stands before the last that the process said.
const WORD: &str = "its process ended: ";
const STDERR: &str = "; stderr ended with: ";

impl Cause {
    fn new(class: FaultClass, root: RootCause, text: String) -> Self {
        Self {
            class,
            role: FaultRole::Initiating,
            root,
            operation: String::new(),
            text,
            evidence: Vec::new(),
            also: Vec::new(),
            hint: String::new(),
            began: None,
        }
    }

    /// The rank's program wants it so.
    pub(crate) fn asked(reason: &str) -> Self {
        Self::new(FaultClass::Asked, RootCause::Asked, reason.to_owned())
    }

    /// The rank's program wants it to stop.
    pub(crate) fn revoked(reason: &str) -> Self {
        Self::new(FaultClass::Revoked, RootCause::Asked, reason.to_owned())
    }

    /// It said that it fails.
    pub(super) fn failed(chain: &str) -> Self {
        let ending = chain
            .starts_with("its process ended with exit status")
            .then(|| Ending::read(chain));
        let root = match ending.flatten() {
            Some(ending) => RootCause::Died {
                ending: Some(ending),
                out_of_memory: false,
            },
            None => RootCause::ProgramFailed {
                reason: chain.to_owned(),
            },
        };
        Self {
            evidence: vec![String::from("it said so itself before it left")],
            ..Self::gone(root, format!("failed: {chain}"))
        }
    }

    /// Its process is gone.
    pub(super) fn died(how: &str) -> Self {
        let (what, said) = match how.split_once(STDERR) {
            Some((what, said)) => (what, Some(said)),
            None => (how, None),
        };
        let told = what.strip_prefix(WORD);
        let out_of_memory = told.is_some_and(|told| told.contains("out of memory"));
        let root = RootCause::Died {
            ending: told.and_then(Ending::read),
            out_of_memory,
        };
        let text = match told {
            Some(told) => format!("died: {told}"),
            None => format!("is gone: {what}"),
        };
        let mut cause = Self::gone(root, text);
        cause.evidence.push(String::from(match told {
            Some(_) => "the process that started it told how it ended, and it had said no goodbye",
            None => {
                "the kernel told that its connection or its process ended; it had said no goodbye"
            }
        }));
        if let Some(said) = said {
            cause
                .evidence
                .push(format!("its stderr ended with: {said}"));
        }
        if out_of_memory {
            cause.hint = String::from(
                "give that rank's control group more memory, or let the program use less: the other ranks are \
                 its victims",
            );
        }
        cause
    }

    /// Its host does not answer any more: those ranks of the communicator live there.
    pub(super) fn host_lost(host: &str, ranks: Vec<usize>, how: &str) -> Self {
        let text = format!("is gone with its host {host}: {how}");
        let lost = who(&ranks);
        let root = RootCause::HostLost {
            host: host.to_owned(),
            ranks,
        };
        Self {
            evidence: vec![format!(
                "the kernel of {host} acknowledges nothing any more; {lost} of this communicator run there"
            )],
            hint: format!(
                "look whether {host} is up, and at the network between it and the others; a process that only \
                 died would have closed its connection"
            ),
            ..Self::gone(root, text)
        }
    }

    fn gone(root: RootCause, text: String) -> Self {
        Self {
            hint: String::from(
                "the other ranks are its victims: look at what that process said last, and whether \
                 the system or its launcher killed it",
            ),
            ..Self::new(FaultClass::Gone, root, text)
        }
    }

    pub(crate) fn cut_off(why: &str, from: &[usize]) -> Self {
        let root = RootCause::Partition {
            from: from.to_vec(),
        };
        Self {
            role: FaultRole::Unknown,
            hint: String::from(
                "look at the network between this host and theirs; where more than half of the ranks can \
                 reach each other, those have gone on without this side",
            ),
            ..Self::new(FaultClass::CutOff, root, why.to_owned())
        }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Adds what NCCL said of it: `words` at the call, and the first warning in its file.
    fn hear_nccl(&mut self, words: Option<&FirstWarning>, first: Option<&FirstWarning>) {
        if self.class != FaultClass::Failed || self.role != FaultRole::Initiating {
            return;
        }
        if let Some(first) = first {
            let line = format!("NCCL's first warning there: {}", first.text);
            self.evidence.push(line);
        }
        // What came first, unless it says nothing of a cause.
        let known = first.filter(|first| first.check.is_some()).or(words);
        let Some(known) = known else { return };
        if let Some(resource) = known.resource() {
            self.root = RootCause::ResourceExhausted {
                resource: resource.to_owned(),
            };
        }
        if let RootCause::CallFailed { failed_before, .. } = &mut self.root
            && known.is_of_an_earlier_kernel()
        {
            *failed_before = true;
            self.evidence.insert(
                0,
                String::from(
                    "the device had failed before this operation was launched: a kernel that ran earlier did, and NCCL \
                     is the first to notice",
                ),
            );
        }
        if let Some(fix) = known.fix() {
            self.hint = fix.to_owned();
        }
    }

    /// The same, with the first warning in NCCL's file, where that may say more.
    pub(super) fn with_words_of_nccl(mut self) -> Self {
        if self.class == FaultClass::Failed {
            self.hear_nccl(None, debug_log::first_warning_soon().as_ref());
        }
        self
    }
}

impl From<&Error> for Cause {
    fn from(error: &Error) -> Self {
        let operation = error
            .operation()
            .map(|operation| operation.what().to_string())
            .unwrap_or_default();
        let (class, role, root) = match error.kind() {
            // A call that should have come back, whatever the others do.
            ErrorKind::TimedOut { what, .. } if is_stuck(what) => {
                let operation = what.trim_end_matches(',').to_owned();
                let root = RootCause::StuckInside { operation };
                (FaultClass::TimedOut, FaultRole::Initiating, root)
            }
            // Whoever waits is not who makes it wait.
            ErrorKind::TimedOut { .. } => {
                (FaultClass::TimedOut, FaultRole::Unknown, RootCause::Unknown)
            }
            ErrorKind::Queued { .. } => {
                let operation = operation.clone();
                let root = RootCause::StuckOutside { operation };
                (FaultClass::TimedOut, FaultRole::Initiating, root)
            }
            ErrorKind::Aborted { .. } => {
                (FaultClass::Asked, FaultRole::Initiating, RootCause::Asked)
            }
            ErrorKind::Nccl(failure) => {
                let root = RootCause::CallFailed {
                    call: Some(failure.call().to_owned()),
                    nccl: Some(failure.code()),
                    cuda: None,
                    failed_before: false,
                };
                // Its peer, or the way to it, was there first.
                let role = match failure.is_remote() {
                    true => FaultRole::Cascade,
                    false => FaultRole::Initiating,
                };
                (FaultClass::Failed, role, root)
            }
            ErrorKind::Cuda { error, .. } if error.0 as u32 == OUT_OF_MEMORY => {
                let resource = String::from("device memory");
                let root = RootCause::ResourceExhausted { resource };
                (FaultClass::Failed, FaultRole::Initiating, root)
            }
            ErrorKind::Cuda { error, .. } => {
                let root = RootCause::CallFailed {
                    call: None,
                    nccl: None,
                    cuda: Some(error.0 as u32),
                    failed_before: false,
                };
                (FaultClass::Failed, FaultRole::Initiating, root)
            }
            kind => {
                let root = RootCause::ProgramFailed {
                    reason: kind.to_string(),
                };
                (FaultClass::Failed, FaultRole::Initiating, root)
            }
        };
        let mut cause = Self {
            role,
            operation,
            hint: error.hint().unwrap_or_default().to_owned(),
            began: error
                .operation()
                .and_then(|operation| Instant::now().checked_sub(operation.elapsed())),
            ..Self::new(
                class,
                root,
                match error.kind() {
                    ErrorKind::Aborted { reason } => reason.clone(),
                    kind => kind.to_string(),
                },
            )
        };
        if let ErrorKind::Nccl(failure) = error.kind() {
            cause.hear_nccl(FirstWarning::read(failure.last_error()).as_ref(), None);
        }
        cause
    }
}

/// CUDA's code for it.
const OUT_OF_MEMORY: u32 = 2;

/// Whether what ran out of time was not a wait for others: a call that does not wait for them, and has not come back.
/// Whoever polls ends that by itself at the limit, so that what the watchdog finds under way after that is inside.
fn is_stuck(what: &str) -> bool {
    what.contains("has not come back")
        || what.starts_with("the call into NCCL, under way for")
        || what.starts_with("the launch of the replay, under way for")
        || what.starts_with("a call of NCCL's or CUDA's")
}

/// Of which communicator, and where, a fault arose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'p> {
    pub(super) communicator: &'p str,
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
            rank: place.rank,
            host: place.host.to_owned(),
            pid: place.pid,
            epoch: place.epoch,
            operation: cause.operation,
            root: cause.root,
            cause: cause.text,
            evidence: cause.evidence,
            also: cause.also,
            hint: cause.hint,
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            teller: place.rank,
        }
    }

    /// A fault of rank `rank` of `communicator`, on this host.
    pub(crate) fn here(cause: Cause, communicator: &str, rank: usize, epoch: u64) -> Self {
        let place = Place {
            communicator,
            rank,
            host: &crate::host::name(),
            pid: std::process::id(),
            epoch,
        };
        Self::new(cause, place)
    }

    pub(crate) fn communicator(&self) -> &str {
        &self.communicator
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

    /// The rank that it began with, in the communicator.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, fault: &nccl::Fault) {
    /// if fault.rank() == comm.rank() {
    ///     println!("it began here");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// That rank's host.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("look on {}", fault.host());
    /// # }
    /// ```
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// That rank's process.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// println!("look at process {}", fault.pid());
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

    /// The operation of that rank, if it was in one.
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
    ///     println!("NCCL returned {code} on rank {}", fault.rank());
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

    /// All of it, as a person reads it: cause, evidence, who waited, and what to do, a line for each that is
    /// known. The same bytes on every rank.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// eprintln!("{}", fault.explain());
    /// # }
    /// ```
    #[must_use]
    pub fn explain(&self) -> String {
        let mut text = format!("  root cause: {self}");
        if !self.evidence.is_empty() {
            text.push_str("\n  evidence:   ");
            text.push_str(&self.evidence.join("; "));
        }
        if !self.also.is_empty() {
            let also: Vec<_> = self.also.iter().map(ToString::to_string).collect();
            text.push_str("\n  also:       ");
            text.push_str(&also.join("; "));
        }
        if !self.hint.is_empty() {
            text.push_str("\n  hint:       ");
            text.push_str(&self.hint);
        }
        text
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

    pub(super) fn encode(&self, members: &[usize]) -> Vec<u8> {
        let mut fault = self.clone();
        fault.evidence.truncate(MOST);
        fault.also.truncate(MOST);
        let texts = [
            &mut fault.communicator,
            &mut fault.host,
            &mut fault.operation,
            &mut fault.cause,
            &mut fault.hint,
        ];
        for text in texts.into_iter().chain(&mut fault.evidence) {
            cut(text);
        }
        // Of plain values, which can all be written.
        serde_json::to_vec(&Told {
            members: Cow::Borrowed(members),
            fault,
        })
        .unwrap_or_default()
    }

    /// The fault, and the ranks of its communicator in the world.
    pub(super) fn decode(bytes: &[u8]) -> Result<(Self, Vec<usize>), Broken> {
        let told: Told<'_> =
            serde_json::from_slice(bytes).map_err(|_| Broken("a fault that cannot be read"))?;
        Ok((told.fault, told.members.into_owned()))
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

/// As it is told.
#[derive(Serialize, Deserialize)]
struct Told<'m> {
    members: Cow<'m, [usize]>,
    fault: Fault,
}

/// The longest text that is sent, in bytes, and the most lines.
const LONGEST: usize = 4096;
const MOST: usize = 16;

fn cut(text: &mut String) {
    let mut end = LONGEST.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} ({}, pid {}", self.rank, self.host, self.pid)?;
        if self.epoch > 0 {
            write!(f, ", epoch {}", self.epoch)?;
        }
        f.write_str(")")?;
        match self.class {
            FaultClass::Gone => write!(f, " {}", self.cause),
            FaultClass::Revoked => write!(f, " revoked it: {}", self.cause),
            FaultClass::CutOff => write!(f, " is {}", self.cause),
            FaultClass::Asked if self.operation.is_empty() => {
                write!(f, " ended it: {}", self.cause)
            }
            _ if self.root.is_told_of_a_rank() => write!(f, " {}", self.cause),
            _ if self.operation.is_empty() => write!(f, ": {}", self.cause),
            _ => write!(f, " in {}: {}", self.operation, self.cause),
        }
    }
}

impl std::error::Error for Fault {}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(cause: Cause) -> Fault {
        Fault::new(
            cause,
            Place {
                communicator: "model/tp",
                rank: 2,
                host: "node-b",
                pid: 977,
                epoch: 0,
            },
        )
    }

    #[test]
    fn a_fault_names_rank_host_process_operation_and_cause() {
        let gone = fault(Cause::died("it died"));
        assert_eq!(
            gone.to_string(),
            "rank 2 (node-b, pid 977) is gone: it died"
        );
        let later = Fault {
            epoch: 3,
            ..gone.clone()
        };
        assert_eq!(
            later.to_string(),
            "rank 2 (node-b, pid 977, epoch 3) is gone: it died"
        );
        let asked = fault(Cause::asked("enough"));
        assert_eq!(
            asked.to_string(),
            "rank 2 (node-b, pid 977) ended it: enough"
        );
        let late = Cause {
            class: FaultClass::TimedOut,
            role: FaultRole::Unknown,
            root: RootCause::Unknown,
            operation: String::from("all_reduce #3"),
            text: String::from("it did not finish within 2s"),
            ..Cause::asked("")
        };
        let late = fault(late);
        assert_eq!(late.operation_and_sequence(), (Some("all_reduce"), Some(3)));
        assert_eq!(gone.operation_and_sequence(), (None, None));
        assert_eq!(
            late.to_string(),
            "rank 2 (node-b, pid 977) in all_reduce #3: it did not finish within 2s"
        );
        assert!(!late.is_certain() && gone.is_certain() && asked.is_certain());
    }

    #[test]
    fn what_a_parent_tells_is_the_cause_and_what_the_process_said_last_is_evidence() {
        let told = "its process ended: killed by SIGKILL (out of memory: 1 process); stderr ended with: layer 7";
        let died = fault(Cause::died(told));
        let died = died.with_also(vec![Waiting {
            ranks: vec![0, 1, 3],
            operation: String::from("all_to_all #42"),
        }]);
        let root = RootCause::Died {
            ending: Some(Ending::Signal(9)),
            out_of_memory: true,
        };
        assert_eq!(*died.root(), root);
        let text = died.explain();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(
            lines[0],
            "  root cause: rank 2 (node-b, pid 977) died: killed by SIGKILL (out of memory: 1 process)"
        );
        assert!(lines[1].starts_with("  evidence:   ") && lines[1].ends_with("with: layer 7"));
        assert_eq!(
            lines[2],
            "  also:       ranks 0-1,3 were waiting in all_to_all #42"
        );
        assert!(lines[3].starts_with("  hint:       give that rank's control group"));
    }

    #[test]
    fn a_rank_that_fails_or_exits_is_told_apart_from_one_that_dies() {
        let exits = Cause::failed("its process ended with exit status 7");
        let root = RootCause::Died {
            ending: Some(Ending::Code(7)),
            out_of_memory: false,
        };
        assert_eq!(exits.root, root);
        let fails = Cause::failed("no such file: model.bin");
        assert!(matches!(fails.root, RootCause::ProgramFailed { .. }));
    }

    #[test]
    fn what_nccl_said_tells_what_there_is_no_more_of_and_that_a_kernel_failed_before() {
        use nccl_sys::ncclResult_t;
        let failed = |said: &str| {
            let failure = crate::error::NcclFailure::new(
                "ncclAllReduce",
                ncclResult_t::ncclUnhandledCudaError,
                String::from("unhandled cuda error"),
                said.to_owned(),
            );
            Cause::from(&Error::new(failure))
        };
        let full = failed("Error: failed to extend /dev/shm/nccl-1: No space left on device (28)");
        assert!(
            matches!(full.root, RootCause::ResourceExhausted { .. }),
            "{full:?}"
        );
        assert!(full.hint.contains("shm-size"), "{full:?}");
        let earlier = failed("Cuda failure 700 'an illegal memory access was encountered'");
        let RootCause::CallFailed {
            nccl,
            failed_before,
            ..
        } = earlier.root
        else {
            panic!("{earlier:?}");
        };
        assert_eq!((nccl, failed_before), (Some(1), true));
        assert!(
            earlier.evidence[0].contains("had failed before"),
            "{:?}",
            earlier.evidence
        );
        let noise = failed("[Service thread] Accept failed Resource temporarily unavailable");
        assert!(matches!(
            noise.root,
            RootCause::CallFailed {
                failed_before: false,
                ..
            }
        ));
        assert!(noise.evidence.is_empty());
    }

    #[test]
    fn a_fault_comes_through_whole_or_not_at_all() {
        let fault = fault(Cause::died("its process ended: exit code 3"));
        let bytes = fault.encode(&[4, 7]);
        let (come, members) = Fault::decode(&bytes).unwrap();
        assert_eq!((&come, &members[..]), (&fault, &[4, 7][..]));
        assert_eq!(come.explain(), fault.explain());
        for end in 0..bytes.len() {
            assert!(Fault::decode(&bytes[..end]).is_err(), "{end}");
        }
    }

    #[test]
    fn a_long_cause_is_cut_at_a_character() {
        let long = fault(Cause::asked(&"ä".repeat(LONGEST)));
        let (cut, _) = Fault::decode(&long.encode(&[])).unwrap();
        assert_eq!(cut.cause, "ä".repeat(LONGEST / 2));
    }
}

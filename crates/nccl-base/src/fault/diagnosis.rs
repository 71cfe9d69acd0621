//! What was at the root of a failure, as far as the rank that met it can tell: from an error of its own, from what
//! NCCL said, and from how another rank's process or host ended.

use std::time::{Duration, Instant};

use nccl_sys as sys;

use super::ALONE;
use super::cause::{Ending, FaultRole, RootCause, Waiting};
use super::operation::FaultOperation;
use super::roster::Roster;
use super::{Fault, FaultClass};
use crate::departure::{Failure, How, Lost, Silence};
use crate::error::{Error, ErrorKind, Mark, NcclFailure};
use crate::warning::{Class, FirstWarning};

/// A fault before it is known whose it is.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct Cause {
    pub class: FaultClass,
    pub role: FaultRole,
    pub root: RootCause,
    pub operation: FaultOperation,
    pub text: String,
    pub evidence: Vec<String>,
    pub also: Vec<Waiting>,
    pub hint: String,
    /// The limit that passed, if one did.
    pub limit: Option<Duration>,
    /// When the operation was called that it is about, on this rank.
    pub began: Option<Instant>,
    /// The fault of another communicator, with which this one ends.
    pub told: Option<Box<Fault>>,
}

impl Cause {
    fn new(class: FaultClass, root: RootCause, text: String) -> Self {
        Self {
            class,
            role: FaultRole::Initiating,
            root,
            operation: FaultOperation::default(),
            text,
            evidence: Vec::new(),
            also: Vec::new(),
            hint: String::new(),
            limit: None,
            began: None,
            told: None,
        }
    }

    /// One that is known whole.
    #[doc(hidden)]
    pub fn of(class: FaultClass, role: FaultRole, root: RootCause, text: String) -> Self {
        Self {
            role,
            ..Self::new(class, root, text)
        }
    }

    /// The rank's program wants it so.
    #[doc(hidden)]
    pub fn asked(reason: &str) -> Self {
        Self::new(FaultClass::Asked, RootCause::Asked, reason.to_owned())
    }

    /// Another communicator ended because of `fault`, and this one ends with it.
    fn told(fault: &Fault) -> Self {
        let of = fault.roster().named(fault.communicator());
        Self {
            role: fault.role(),
            told: Some(Box::new(fault.clone())),
            ..Self::new(
                fault.class(),
                fault.root().clone(),
                format!("{of} ended: {fault}"),
            )
        }
    }

    /// The programs of all ranks want it so.
    #[doc(hidden)]
    pub fn asked_of_all(reason: &str) -> Self {
        Self {
            role: FaultRole::Cascade,
            ..Self::asked(reason)
        }
    }

    /// The rank's program wants it to stop.
    #[doc(hidden)]
    pub fn revoked(reason: &str) -> Self {
        Self::new(FaultClass::Revoked, RootCause::Asked, reason.to_owned())
    }

    /// It said that it fails.
    #[doc(hidden)]
    pub fn failed(why: &Failure) -> Self {
        let root = match why {
            Failure::Exits(status) => RootCause::Died {
                ending: Some(Ending::Code(*status)),
                out_of_memory: false,
            },
            Failure::Said(chain) => RootCause::ProgramFailed {
                reason: chain.clone(),
            },
        };
        Self {
            evidence: vec![String::from("it said so itself before it left")],
            ..Self::gone(root, format!("failed: {why}"))
        }
    }

    /// Its process is gone.
    #[doc(hidden)]
    pub fn died(lost: &Lost) -> Self {
        let end = match &lost.how {
            How::Ended(end) => Some(end),
            _ => None,
        };
        let out_of_memory = end.is_some_and(|end| end.is_out_of_memory());
        let root = RootCause::Died {
            ending: end.and_then(|end| Ending::of(end.exit()?)),
            out_of_memory,
        };
        let text = match end {
            Some(end) => format!("died: {}", end.told),
            None => format!("is gone: {}", lost.how),
        };
        let mut cause = Self::gone(root, text);
        cause.evidence.push(String::from(match end {
            Some(_) => "the process that started it told how it ended, and it had said no goodbye",
            None => {
                "the kernel told that its connection or its process ended; it had said no goodbye"
            }
        }));
        cause.evidence.extend(heartbeat(lost));
        if let Some(said) = end.and_then(|end| end.stderr.as_ref()) {
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

    /// Its host does not answer any more: those ranks of the communicator live there. With packets that come through
    /// one way only, the host itself is up.
    #[doc(hidden)]
    pub fn host_lost(host: &str, ranks: Vec<usize>, roster: &Roster, gone: &Lost) -> Self {
        let (how, heartbeat) = (&gone.how, heartbeat(gone));
        let lost = roster.who(&ranks);
        let root = RootCause::HostLost {
            host: host.to_owned(),
            ranks,
        };
        if gone.silence().is_some_and(Silence::is_one_way) {
            let text = format!("cannot be reached on its host {host}: {how}");
            let mut evidence = vec![
                format!(
                    "what is sent to {host} is not acknowledged there, while what {host} sends comes through; \
                         {lost} of this communicator run there"
                ),
                String::from(
                    "its process lived when it was heard last, and is told that it is cut off",
                ),
            ];
            evidence.extend(heartbeat);
            return Self {
                evidence,
                hint: format!(
                    "look at firewalls and routes between {host} and the others: packets come through one way only"
                ),
                ..Self::gone(root, text)
            };
        }
        let text = format!("is gone with its host {host}: {how}");
        Self {
            evidence: std::iter::once(format!(
                "the kernel of {host} acknowledges nothing any more; {lost} of this communicator run there"
            ))
            .chain(heartbeat)
            .collect(),
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

    /// It cannot reach the ranks `from` any more; `why` calls them by their numbers in the world.
    #[doc(hidden)]
    pub fn cut_off(why: &str, from: &[usize], roster: &Roster) -> Self {
        let root = RootCause::Partition {
            from: from.to_vec(),
        };
        let here = roster.world_ranks().map(|_| {
            let who = roster.who(from);
            format!("of this communicator, {who} cannot be reached from here")
        });
        Self {
            role: FaultRole::Unknown,
            evidence: here.into_iter().collect(),
            hint: String::from(
                "look at the network between this host and theirs; where more than half of the ranks can \
                 reach each other, those have gone on without this side",
            ),
            ..Self::new(FaultClass::CutOff, root, why.to_owned())
        }
    }

    /// A call of CUDA's said that its context failed for good; `before` an operation was handed to NCCL, or behind some.
    #[doc(hidden)]
    pub fn of_lost_context(error: &Error, before: bool, evidence: &str, hint: &str) -> Self {
        let mut cause = Self::from(error);
        if let RootCause::CallFailed { failed_before, .. } = &mut cause.root {
            *failed_before = before;
        }
        cause.evidence.push(evidence.to_owned());
        cause.hint = hint.to_owned();
        cause
    }

    /// The same of a communicator that has no other rank: none can be waited for.
    #[doc(hidden)]
    pub fn of_one_rank(mut self) -> Self {
        if self.class == FaultClass::TimedOut
            && !matches!(self.root, RootCause::StuckOutside { .. })
        {
            self.hint = ALONE.to_owned();
        }
        self
    }

    /// The same for another communicator: what was called on the first says nothing of this one.
    #[doc(hidden)]
    pub fn elsewhere(&self) -> Self {
        Self {
            operation: FaultOperation::default(),
            began: None,
            ..self.clone()
        }
    }

    #[doc(hidden)]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Adds what NCCL said of it: `words` at the call, and the first warning in its file.
    #[doc(hidden)]
    pub fn hear_nccl(&mut self, words: Option<&FirstWarning>, first: Option<&FirstWarning>) {
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
}

impl From<&Error> for Cause {
    fn from(error: &Error) -> Self {
        if let Some(fault) = error.fault() {
            return Self::told(fault);
        }
        let operation = error
            .operation()
            .map(FaultOperation::from)
            .unwrap_or_default();
        let (class, role, root) = match error.kind() {
            // A call that should have come back, whatever the others do.
            ErrorKind::TimedOut { what, .. } if error.is(Mark::Inside) => {
                let operation = what.trim_end_matches(',').to_owned();
                let root = RootCause::StuckInside { operation };
                (FaultClass::TimedOut, FaultRole::Initiating, root)
            }
            // Whoever waits is not who makes it wait.
            ErrorKind::TimedOut { .. } => {
                (FaultClass::TimedOut, FaultRole::Unknown, RootCause::Unknown)
            }
            ErrorKind::Queued { .. } => {
                let operation = operation.text.clone();
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
                (FaultClass::Failed, role_of(failure), root)
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
            _ if error.is(Mark::NoThread) => {
                let resource = String::from("threads or processes");
                let root = RootCause::ResourceExhausted { resource };
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
            limit: match *error.kind() {
                ErrorKind::TimedOut { limit, .. } | ErrorKind::Queued { limit, .. } => Some(limit),
                _ => None,
            },
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

/// What a failed call is among all that goes wrong, by its code and by what NCCL said last.
fn role_of(failure: &NcclFailure) -> FaultRole {
    // Its peer, or the way to it, was there first.
    if failure.is_remote() {
        return FaultRole::Cascade;
    }
    // NCCL says one of these where a connection or a thread of its own was cut off as well; any other code is about
    // this rank's own call or device.
    let of_either = [
        sys::ncclResult_t::ncclSystemError,
        sys::ncclResult_t::ncclInternalError,
    ];
    if !of_either.iter().any(|code| failure.is(*code)) {
        return FaultRole::Initiating;
    }
    match Class::of(failure.last_error()) {
        Class::Consequence => FaultRole::Cascade,
        Class::Noise => FaultRole::Teardown,
        Class::Cause | Class::Unknown => FaultRole::Initiating,
    }
}

/// What its last heartbeat told of a rank that is gone.
fn heartbeat(lost: &Lost) -> Option<String> {
    lost.last_call.as_ref().map(ToString::to_string)
}

/// CUDA's code for it.
const OUT_OF_MEMORY: u32 = 2;

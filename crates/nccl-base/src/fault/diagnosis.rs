//! The root cause of a failure, as far as the rank that detected the failure can determine it: from NCCL's reports, and
//! from how another rank's process or host ended. `error/cause.rs` derives the root cause from an error.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::cause::{Ending, FaultRole, RootCause, Waiting};
use super::operation::FaultOperation;
use super::value::{ALONE, Fault, FaultClass, Origin};
use crate::departure::{Failure, LossKind, Lost, UnreachableHost};
use crate::roster::Roster;
use crate::warning::FirstWarning;

/// A cause that is not assigned to a rank yet.
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
    /// The timeout that passed, if one did.
    pub timeout: Option<Duration>,
    /// When this rank called the operation that the cause is about.
    pub began: Option<Instant>,
    /// The fault of another communicator, with which this one ends.
    pub origin_fault: Option<Box<Fault>>,
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
            timeout: None,
            began: None,
            origin_fault: None,
        }
    }

    /// Builds a cause from its class, role, root and text.
    #[doc(hidden)]
    pub fn of(class: FaultClass, role: FaultRole, root: RootCause, text: String) -> Self {
        Self {
            role,
            ..Self::new(class, root, text)
        }
    }

    /// Builds the cause for an end that the rank's program requested.
    #[doc(hidden)]
    pub fn asked(reason: &str) -> Self {
        Self::new(FaultClass::Asked, RootCause::Asked, reason.to_owned())
    }

    /// Builds the cause for the end of another communicator because of `fault`; this communicator ends with it.
    pub(crate) fn of_origin_fault(fault: &Fault) -> Self {
        let of = fault.roster().named(fault.communicator());
        Self {
            role: fault.role,
            origin_fault: Some(Box::new(fault.clone())),
            ..Self::new(
                fault.class,
                fault.root.clone(),
                format!("{of} ended: {fault}"),
            )
        }
    }

    /// Builds the cause for an end that the programs of all ranks requested.
    #[doc(hidden)]
    pub fn asked_of_all(reason: &str) -> Self {
        Self {
            role: FaultRole::Cascade,
            ..Self::asked(reason)
        }
    }

    /// Builds the cause for a revoke by the rank's program.
    #[doc(hidden)]
    pub fn revoked(reason: &str) -> Self {
        Self::new(FaultClass::Revoked, RootCause::Asked, reason.to_owned())
    }

    /// Builds the cause for a rank that reported that it fails.
    #[doc(hidden)]
    pub fn failed(why: &Failure) -> Self {
        let root = match why {
            Failure::Exits(status) => RootCause::Died {
                ending: Some(Ending::Code(*status)),
                out_of_memory: false,
            },
            Failure::Error(chain) => RootCause::ProgramFailed {
                reason: chain.clone(),
            },
        };
        Self {
            evidence: vec![String::from("it said so itself before it left")],
            ..Self::gone(root, format!("failed: {why}"))
        }
    }

    /// Builds the cause for a rank whose process is gone.
    #[doc(hidden)]
    pub fn died(lost: &Lost) -> Self {
        let end = match &lost.how {
            LossKind::Ended(end) => Some(end),
            _ => None,
        };
        let out_of_memory = end.is_some_and(|end| end.is_out_of_memory());
        let root = RootCause::Died {
            ending: end.and_then(|end| Ending::of(end.exit()?)),
            out_of_memory,
        };
        let text = match end {
            Some(end) => format!("died: {}", end.report),
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

    /// Builds the cause for a rank whose host does not answer any more; `ranks` of the communicator live there. If
    /// packets pass in one direction only, or the host refuses connections, the host itself is up.
    #[doc(hidden)]
    pub fn host_lost(host: &str, ranks: Vec<usize>, roster: &Roster, gone: &Lost) -> Self {
        let (how, heartbeat) = (&gone.how, heartbeat(gone));
        let lost = roster.who(&ranks);
        let root = RootCause::HostLost {
            host: host.to_owned(),
            ranks,
        };
        if gone
            .unreachable_host()
            .is_some_and(UnreachableHost::is_one_way)
        {
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
        if gone.is_refused() {
            let text = format!("cannot be reached on its host {host}: {how}");
            let unseen = format!(
                "{host} need not be down; no launcher and no rank of its kernel has seen the process of {lost} end"
            );
            return Self {
                evidence: std::iter::once(unseen).chain(heartbeat).collect(),
                hint: format!(
                    "look whether the process of {lost} lives on {host}: if it does, a firewall or proxy ends connections \
                     to it; started by nccl-run, its end and the reason would be known"
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

    /// Builds the cause for a rank that cannot reach the ranks `from` any more; `why` refers to them by their world
    /// ranks.
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

    /// Adapts the cause to a communicator of a single rank, which cannot wait for another one.
    #[doc(hidden)]
    pub fn of_one_rank(mut self) -> Self {
        if self.class == FaultClass::TimedOut
            && !matches!(self.root, RootCause::StuckOutside { .. })
        {
            self.hint = ALONE.to_owned();
        }
        self
    }

    /// Returns the cause for another communicator, without the operation, which was called on the first communicator.
    #[doc(hidden)]
    pub fn for_other_communicator(&self) -> Self {
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

    /// Adds what NCCL reported: `words` at the call, and the first warning in its file.
    #[doc(hidden)]
    pub fn add_nccl_warnings(
        &mut self,
        words: Option<&FirstWarning>,
        first: Option<&FirstWarning>,
    ) {
        if self.class != FaultClass::Failed || self.role != FaultRole::Initiating {
            return;
        }
        if let Some(first) = first {
            let line = format!("NCCL's first warning there: {}", first.text);
            self.evidence.push(line);
        }
        // Prefers the first warning, unless the table of warnings does not know it.
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
                    "the device had failed before this operation was launched: an earlier kernel failed, and NCCL \
                     is the first to notice",
                ),
            );
        }
        if let Some(fix) = known.fix() {
            self.hint = fix.to_owned();
        }
    }
}

/// Returns what the last heartbeat of a lost rank reported.
fn heartbeat(lost: &Lost) -> Option<String> {
    lost.last_call.as_ref().map(ToString::to_string)
}

/// The communicator, rank and process on which a fault arose.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct FaultSite<'p> {
    pub communicator: &'p str,
    pub roster: &'p Roster,
    /// The rank in the communicator.
    pub rank: usize,
    pub host: &'p str,
    pub pid: u32,
    /// The generation of the world that made the communicator.
    pub generation: u64,
}

impl Origin {
    /// Returns the origin of a fault that was found on rank `rank`.
    fn of(cause: &Cause, rank: usize) -> Self {
        let is_of_all = (cause.class, cause.role) == (FaultClass::Asked, FaultRole::Cascade);
        match is_of_all || cause.root.is_of_no_rank() {
            true => Self::NoRank {},
            false => Self::new(rank, cause.role),
        }
    }
}

impl Fault {
    #[doc(hidden)]
    pub fn new(cause: Cause, site: FaultSite<'_>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let origin = Origin::of(&cause, site.rank);
        let (host, pid) = match origin {
            Origin::NoRank {} => ("", 0),
            _ => (site.host, site.pid),
        };
        Self {
            class: cause.class,
            role: cause.role,
            communicator: site.communicator.to_owned(),
            roster: site.roster.clone(),
            origin,
            host: host.to_owned(),
            pid,
            generation: site.generation,
            operation: cause.operation,
            root: cause.root,
            cause: cause.text,
            evidence: cause.evidence,
            also: cause.also,
            host_evidence: Vec::new(),
            hint: cause.hint,
            timeout: cause.timeout,
            announcement_number: NEXT.fetch_add(1, Ordering::Relaxed),
            announced_by: site.rank,
        }
    }

    /// Builds a fault that every rank derives independently from data that all have received; it is equal on all of
    /// them.
    #[doc(hidden)]
    pub fn derived(cause: Cause, site: FaultSite<'_>) -> Self {
        Self {
            announcement_number: 0,
            ..Self::new(cause, site)
        }
    }

    /// Builds a fault of rank `rank` of `communicator`, on this host; `place_of` maps ranks of the world to its ranks.
    #[doc(hidden)]
    pub fn here(
        mut cause: Cause,
        (communicator, roster): (&str, &Roster),
        rank: usize,
        generation: u64,
        place_of: impl Fn(usize) -> Option<usize>,
    ) -> Self {
        let origin_fault = cause.origin_fault.take();
        let site = FaultSite {
            communicator,
            roster,
            rank,
            host: &crate::host::name(),
            pid: std::process::id(),
            generation,
        };
        match origin_fault {
            Some(origin_fault) => origin_fault.passed_on(cause, site, place_of),
            None => Self::new(cause, site),
        }
    }

    /// Returns this fault, of another communicator, as a fault of the communicator at `site`, which ends with that one.
    fn passed_on(
        &self,
        cause: Cause,
        site: FaultSite<'_>,
        place_of: impl Fn(usize) -> Option<usize>,
    ) -> Self {
        // Worlds of other generations number their ranks differently.
        let place_of =
            |world_rank| place_of(world_rank).filter(|_| self.generation == site.generation);
        let here = self.roster.named(&self.communicator);
        let of = |rank: usize| place_of(self.roster.world_rank(rank));
        let origin = match self.origin {
            Origin::Culprit(rank) | Origin::ReportedBy(rank) => match of(rank) {
                Some(rank) => Origin::new(rank, self.role),
                None => Origin::Outside {
                    world_rank: self.roster.world_rank(rank),
                    launcher_rank: self.roster.launcher_rank(rank),
                },
            },
            Origin::Outside { world_rank, .. } => match place_of(world_rank) {
                Some(rank) => Origin::new(rank, self.role),
                None => self.origin,
            },
            Origin::NoRank {} => self.origin,
        };
        let (class, text) = match self.class {
            FaultClass::Asked => (self.class, format!("to end {here}: {}", self.cause)),
            FaultClass::Revoked => (
                FaultClass::Asked,
                format!("to revoke {here}: {}", self.cause),
            ),
            // The text contains numbers of ranks of the other communicator.
            _ if self.root.names_ranks() => (self.class, format!("on {here}: {}", self.cause)),
            _ => (self.class, self.cause.clone()),
        };
        let mut evidence = vec![format!(
            "it ended {here}, and {} ended this one with it",
            site.roster.who(&[site.rank])
        )];
        if !self.evidence.is_empty() {
            evidence.push(format!("on {here}: {}", self.evidence.join("; ")));
        }
        Self {
            class,
            root: self.root.for_other_communicator(of),
            cause: text,
            evidence,
            host_evidence: self.host_evidence.clone(),
            hint: self.hint.clone(),
            timeout: self.timeout,
            origin,
            host: self.host.clone(),
            pid: self.pid,
            generation: match origin {
                Origin::Outside { .. } => self.generation,
                _ => site.generation,
            },
            ..Self::new(cause, site)
        }
    }

    /// Replaces the cause and the site by the decided ones, which all ranks report.
    #[doc(hidden)]
    pub fn with_decided_cause(&self, cause: Cause, site: FaultSite<'_>) -> Self {
        Self {
            announcement_number: self.announcement_number,
            announced_by: self.announced_by,
            ..Self::new(cause, site)
        }
    }
}

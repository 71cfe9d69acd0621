//! The facts of a communicator on trial, and the form of a finding.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nccl_base::fault::cause::{FaultRole, RootCause};
use nccl_base::fault::{Fault, FaultOperation, Roster};
use nccl_core::recorder::{RecordedOperation, RecordedReduction};

use super::super::report::{Entered, Report};
use crate::operation::OperationKind;

/// What is known of a communicator on trial. Ranks are those of the communicator.
pub(in crate::supervision) struct Case<'c> {
    /// The program's name of the communicator; `key` is the same on all ranks.
    pub(in crate::supervision) name: &'c str,
    pub(in crate::supervision) key: &'c str,
    pub(in crate::supervision) roster: &'c Roster,
    /// Host names, by rank.
    pub(in crate::supervision) hosts: &'c [String],
    /// Timeouts, and failures that follow from another fault, in the order in which all ranks heard them; not empty.
    pub(in crate::supervision) symptoms: &'c [Fault],
    pub(in crate::supervision) reports: &'c BTreeMap<usize, Report>,
    /// See [`done_somewhere`].
    pub(in crate::supervision) done: &'c Done,
    /// Ranks that left the world in order.
    pub(in crate::supervision) left: &'c BTreeSet<usize>,
    /// Ranks that did not answer and stand still: with the kernel's words for it, or `None` where heartbeats are missing.
    pub(in crate::supervision) still: &'c BTreeMap<usize, Option<String>>,
    /// Time within which all reports were made.
    pub(in crate::supervision) slack: Duration,
}

/// A cause before it becomes the verdict.
pub(super) struct Finding {
    pub(super) rank: usize,
    pub(super) role: FaultRole,
    pub(super) root: RootCause,
    pub(super) text: String,
    /// Set where the finding is not about the operation of the first symptom.
    pub(super) operation: Option<FaultOperation>,
    pub(super) evidence: Vec<String>,
    pub(super) hint: String,
}

/// The calls of all ranks that are done on some rank, by place.
#[derive(Default)]
pub(in crate::supervision) struct Done(BTreeMap<u64, BTreeSet<What>>);

/// The part of a call that all ranks have alike.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct What {
    kind: String,
    /// `None` where the recorder has lost a part of the call.
    shapes: Option<Vec<Shape>>,
}

impl What {
    fn of(call: &Entered) -> Self {
        Self {
            kind: call.kind.clone(),
            shapes: (call.missing == 0).then(|| shapes(call)),
        }
    }

    fn fits(&self, other: &Self) -> bool {
        let are_known = self.shapes.is_some() && other.shapes.is_some();
        self.kind == other.kind && (!are_known || self.shapes == other.shapes)
    }
}

/// Collects the calls that are done on some rank.
pub(in crate::supervision) fn done_somewhere(reports: &BTreeMap<usize, Report>) -> Done {
    let mut done = Done::default();
    let calls = reports.values().flat_map(|report| &report.calls);
    for call in calls.filter(|call| !call.is_pending()) {
        if let Some(place) = call.place {
            done.0.entry(place).or_default().insert(What::of(call));
        }
    }
    done
}

impl Case<'_> {
    /// Returns whether a call is not done, as far as the ranks know. An operation in which all ranks need each other and that
    /// is done on one rank is done on all that entered the same one, even where no thread has looked yet. A rank that entered
    /// another operation can be through, with a wrong result, while the others wait for ever.
    pub(super) fn is_open(&self, call: &Entered) -> bool {
        let is_done = |place| {
            let done = self.done.0.get(&place);
            done.is_some_and(|done| done.iter().any(|done| done.fits(&What::of(call))))
        };
        call.is_pending() && !(call.is_symmetric() && call.place.is_some_and(is_done))
    }

    /// Returns the first call of a rank that is not done.
    pub(super) fn front<'r>(&self, report: &'r Report) -> Option<&'r Entered> {
        report.calls.iter().find(|call| self.is_open(call))
    }

    /// Returns the place of the stalled operation: the first that is entered and not done.
    pub(super) fn place(&self) -> Option<u64> {
        let fronts = self.reports.values().filter_map(|report| {
            let open = |call: &&Entered| call.place.is_some() && self.is_open(call);
            report.calls.iter().find(open)?.place
        });
        fronts.min()
    }

    /// Returns the ranks that neither answered nor left.
    pub(super) fn silent(&self) -> Vec<usize> {
        let ranks = 0..self.hosts.len();
        ranks
            .filter(|rank| !self.reports.contains_key(rank) && !self.left.contains(rank))
            .collect()
    }

    /// Returns the name of the communicator, with its ranks of the world.
    pub(super) fn named(&self) -> String {
        self.roster.named(self.name)
    }

    /// Returns what the first rank that ran out of time reported.
    pub(super) fn complaint(&self) -> String {
        let first = &self.symptoms[0];
        let who = self.roster.who(&[first.rank()]);
        format!("{who} waited: {}", first.cause)
    }
}

/// The fields of an operation that have to be equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Shape {
    pub(super) operation: String,
    pub(super) count: Option<u64>,
    pub(super) data_type: Option<String>,
    pub(super) reduction: Option<String>,
    pub(super) root: Option<usize>,
}

impl Shape {
    fn of(kind: &str, one: &RecordedOperation) -> Self {
        Self {
            operation: kind.to_owned(),
            count: Some(one.count),
            data_type: Some(one.data_type.to_string()),
            reduction: one.reduction.map(|reduction| match reduction {
                RecordedReduction::Op(op) => op.to_string(),
                _ => String::from("one that the program made"),
            }),
            root: one.root,
        }
    }

    fn only_operation(kind: &str) -> Self {
        Self {
            operation: kind.to_owned(),
            count: None,
            data_type: None,
            reduction: None,
            root: None,
        }
    }
}

/// Returns the operations of a call that all ranks enter, in order; only its kind where operations are missing.
pub(super) fn shapes(call: &Entered) -> Vec<Shape> {
    let is_message =
        |one: &&RecordedOperation| matches!(one.kind, OperationKind::Send | OperationKind::Recv);
    let shapes: Vec<_> = call
        .operations
        .iter()
        .filter(|one| !is_message(one))
        .map(|one| Shape::of(&one.kind.to_string(), one))
        .collect();
    match shapes.is_empty() || call.missing > 0 {
        true => vec![Shape::only_operation(&call.kind)],
        false => shapes,
    }
}

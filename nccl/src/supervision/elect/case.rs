//! What is known of a communicator on trial, and what is found in it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nccl_base::fault::cause::{FaultRole, RootCause};
use nccl_base::fault::{Fault, FaultOperation, Roster};
use nccl_core::recorder::{RecordedOperation, RecordedReduction};

use super::super::report::{Entered, Report};
use crate::operation::OperationKind;

/// What is known of a communicator on trial. Ranks are its own.
pub(in crate::supervision) struct Case<'c> {
    /// What the program calls the communicator, and what all ranks do.
    pub(in crate::supervision) name: &'c str,
    pub(in crate::supervision) key: &'c str,
    pub(in crate::supervision) roster: &'c Roster,
    /// By rank.
    pub(in crate::supervision) hosts: &'c [String],
    /// Who ran out of time, or saw what follows from something, in the order in which all heard it; not empty.
    pub(in crate::supervision) symptoms: &'c [Fault],
    pub(in crate::supervision) reports: &'c BTreeMap<usize, Report>,
    /// See [`done_somewhere`].
    pub(in crate::supervision) done: &'c Done,
    /// Who left the world in order.
    pub(in crate::supervision) left: &'c BTreeSet<usize>,
    /// Of who did not answer, who stands still: as the kernel says, in its words, or as its heartbeats do not come.
    pub(in crate::supervision) still: &'c BTreeMap<usize, Option<String>>,
    /// Within how long all reports were made.
    pub(in crate::supervision) slack: Duration,
}

/// A cause before it is told as one.
pub(super) struct Finding {
    pub(super) rank: usize,
    pub(super) role: FaultRole,
    pub(super) root: RootCause,
    pub(super) text: String,
    /// Where it is not about the operation of which the first told.
    pub(super) operation: Option<FaultOperation>,
    pub(super) evidence: Vec<String>,
    pub(super) hint: String,
}

/// The calls of all ranks that are done on some rank: their places, and what was done there.
#[derive(Default)]
pub(in crate::supervision) struct Done(BTreeMap<u64, BTreeSet<What>>);

/// A call, as far as all ranks have it alike.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct What {
    kind: String,
    /// `None` where the recorder has lost a part of it.
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

/// See [`Done`].
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
    /// Whether a call is not done, as far as the ranks know. An operation in which all ranks need each other and that is
    /// done on one rank is done on all that entered the same one, even where no thread has looked yet. A rank that
    /// entered another one can be through, with a wrong result, while the others wait for ever.
    pub(super) fn is_open(&self, call: &Entered) -> bool {
        let is_done = |place| {
            let done = self.done.0.get(&place);
            done.is_some_and(|done| done.iter().any(|done| done.fits(&What::of(call))))
        };
        call.is_pending() && !(call.is_symmetric() && call.place.is_some_and(is_done))
    }

    /// The first call of a rank that is not done.
    pub(super) fn front<'r>(&self, report: &'r Report) -> Option<&'r Entered> {
        report.calls.iter().find(|call| self.is_open(call))
    }

    /// The place of the operation that stands still: the first that is entered and not done anywhere.
    pub(super) fn place(&self) -> Option<u64> {
        let fronts = self.reports.values().filter_map(|report| {
            let open = |call: &&Entered| call.place.is_some() && self.is_open(call);
            report.calls.iter().find(open)?.place
        });
        fronts.min()
    }

    /// Who did not answer, and has not left.
    pub(super) fn silent(&self) -> Vec<usize> {
        let ranks = 0..self.hosts.len();
        ranks
            .filter(|rank| !self.reports.contains_key(rank) && !self.left.contains(rank))
            .collect()
    }

    /// The name of the communicator, with its ranks of the world.
    pub(super) fn named(&self) -> String {
        self.roster.named(self.name)
    }

    /// What the first rank told that ran out of time.
    pub(super) fn complaint(&self) -> String {
        let first = &self.symptoms[0];
        let who = self.roster.who(&[first.rank()]);
        format!("{who} waited: {}", first.cause())
    }
}

/// What an operation is, in the fields that all ranks have to have alike.
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

/// The operations of a call to which all ranks come, in order.
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

//! The facts of a communicator under diagnosis, and the form of a finding.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nccl_base::fault::cause::{FaultRole, RootCause};
use nccl_base::fault::{Fault, FaultOperation, Roster};
use nccl_core::recorder::{RecordedOperation, RecordedReduction};

use super::super::rank_report::{EnteredCall, RankReport};

/// What is known of a communicator under diagnosis. Ranks are those of the communicator.
pub(in crate::supervision) struct DiagnosisInput<'c> {
    /// The program's name of the communicator; `key` is the same on all ranks.
    pub(in crate::supervision) name: &'c str,
    pub(in crate::supervision) key: &'c str,
    pub(in crate::supervision) roster: &'c Roster,
    /// Host names, by rank.
    pub(in crate::supervision) hosts: &'c [String],
    /// Timeouts, and failures that follow from another fault, in the order in which all ranks received them; not empty.
    pub(in crate::supervision) symptoms: &'c [Fault],
    pub(in crate::supervision) reports: &'c BTreeMap<usize, RankReport>,
    /// See [`completed_calls`].
    pub(in crate::supervision) done: &'c CompletedCalls,
    /// Ranks that left the world in order.
    pub(in crate::supervision) departed_in_order: &'c BTreeSet<usize>,
    /// Ranks that did not answer and are suspended: with the state according to the kernel, or `None` where heartbeats are
    /// missing.
    pub(in crate::supervision) suspended: &'c BTreeMap<usize, Option<String>>,
    /// Time within which all reports were made.
    pub(in crate::supervision) slack: Duration,
}

/// A cause before it becomes the decided fault.
pub(super) struct Candidate {
    pub(super) rank: usize,
    pub(super) role: FaultRole,
    pub(super) root: RootCause,
    pub(super) text: String,
    /// Set where the finding is not about the operation of the first symptom.
    pub(super) operation: Option<FaultOperation>,
    pub(super) evidence: Vec<String>,
    pub(super) hint: String,
}

/// The collectives that are done on some rank, by their index.
#[derive(Default)]
pub(in crate::supervision) struct CompletedCalls(BTreeMap<u64, BTreeSet<CallSignature>>);

/// The part of a call that is equal on all ranks.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct CallSignature {
    kind: String,
    /// `None` where the recorder has lost a part of the call.
    signatures: Option<Vec<OperationSignature>>,
}

impl CallSignature {
    fn of(call: &EnteredCall) -> Self {
        Self {
            kind: call.kind.clone(),
            signatures: (call.omitted_operations == 0).then(|| signatures(call)),
        }
    }

    fn fits(&self, other: &Self) -> bool {
        let are_known = self.signatures.is_some() && other.signatures.is_some();
        self.kind == other.kind && (!are_known || self.signatures == other.signatures)
    }
}

/// Collects the calls that are done on some rank.
pub(in crate::supervision) fn completed_calls(
    reports: &BTreeMap<usize, RankReport>,
) -> CompletedCalls {
    let mut done = CompletedCalls::default();
    let calls = reports.values().flat_map(|report| &report.calls);
    for call in calls.filter(|call| !call.is_pending()) {
        if let Some(collective_index) = call.collective_index {
            done.0
                .entry(collective_index)
                .or_default()
                .insert(CallSignature::of(call));
        }
    }
    done
}

impl DiagnosisInput<'_> {
    /// Returns whether a call is not done, as far as the ranks know. An operation in which all ranks need each other
    /// and that is done on one rank is done on all ranks that entered the same operation, even if no thread there has
    /// queried it yet. A rank that entered another operation can have completed it, with a wrong result, while the
    /// others wait for ever.
    pub(super) fn is_open(&self, call: &EnteredCall) -> bool {
        let is_done = |collective_index| {
            let done = self.done.0.get(&collective_index);
            done.is_some_and(|done| done.iter().any(|done| done.fits(&CallSignature::of(call))))
        };
        call.is_pending() && !(call.is_symmetric() && call.collective_index.is_some_and(is_done))
    }

    /// Returns the first call of a rank that is not done.
    pub(super) fn front<'r>(&self, report: &'r RankReport) -> Option<&'r EnteredCall> {
        report.calls.iter().find(|call| self.is_open(call))
    }

    /// Returns the index of the stalled collective: the first that is entered and not done.
    pub(super) fn stalled_collective(&self) -> Option<u64> {
        let fronts = self.reports.values().filter_map(|report| {
            let open = |call: &&EnteredCall| call.collective_index.is_some() && self.is_open(call);
            report.calls.iter().find(open)?.collective_index
        });
        fronts.min()
    }

    /// Returns the ranks that neither answered nor left.
    pub(super) fn silent(&self) -> Vec<usize> {
        let ranks = 0..self.hosts.len();
        ranks
            .filter(|rank| {
                !self.reports.contains_key(rank) && !self.departed_in_order.contains(rank)
            })
            .collect()
    }

    /// Returns the name of the communicator, with its ranks of the world.
    pub(super) fn named(&self) -> String {
        self.roster.named(self.name)
    }

    /// Returns the text of the first symptom.
    pub(super) fn symptom_text(&self) -> String {
        let first = &self.symptoms[0];
        let who = self.roster.who(&[first.rank()]);
        format!("{who} waited: {}", first.cause)
    }
}

/// The fields of an operation that have to be equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct OperationSignature {
    pub(super) operation: String,
    pub(super) count: Option<u64>,
    pub(super) data_type: Option<String>,
    pub(super) reduction: Option<String>,
    pub(super) root: Option<usize>,
}

impl OperationSignature {
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
pub(super) fn signatures(call: &EnteredCall) -> Vec<OperationSignature> {
    let signatures: Vec<_> = call
        .operations
        .iter()
        .filter(|one| !one.kind.is_pairwise())
        .map(|one| OperationSignature::of(&one.kind.to_string(), one))
        .collect();
    match signatures.is_empty() || call.omitted_operations > 0 {
        true => vec![OperationSignature::only_operation(&call.kind)],
        false => signatures,
    }
}

//! Comparison of the collectives that ranks entered with the same index.

use std::collections::{BTreeMap, BTreeSet};

use super::input::{Candidate, DiagnosisInput, OperationSignature, signatures};
use crate::supervision::rank_report::EnteredCall;
use nccl_base::fault::cause::{FaultRole, MismatchField, MismatchSide, RootCause};

/// Finds the first collective, from the stalled one on, in which the calls of the ranks do not match.
pub(super) fn mismatch(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let first = input.stalled_collective()?;
    let calls = input.reports.values().flat_map(|report| &report.calls);
    let collectives: BTreeSet<u64> = calls.filter_map(|call| call.collective_index).collect();
    collectives
        .range(first..)
        .find_map(|collective_index| mismatch_at(input, *collective_index))
}

fn mismatch_at(input: &DiagnosisInput<'_>, collective_index: u64) -> Option<Candidate> {
    let entered: BTreeMap<usize, &EnteredCall> = input
        .reports
        .values()
        .filter_map(|report| Some((report.rank, report.collective(collective_index)?)))
        .collect();
    // A capture and its replay are compared elsewhere, and a replay is whatever was captured.
    let signatures: BTreeMap<usize, Vec<OperationSignature>> = entered
        .iter()
        .map(|(rank, call)| (*rank, signatures(call)))
        .collect();
    let shortest = signatures.values().map(Vec::len).min()?;
    (0..shortest).find_map(|at| {
        let one: BTreeMap<usize, &OperationSignature> = signatures
            .iter()
            .map(|(rank, all)| (*rank, &all[at]))
            .collect();
        let (field, sides) = sides(&one)?;
        Some(candidate(input, collective_index, field, sides))
    })
}

/// Returns the first field in which the ranks differ, and the ranks with each value: the largest side first.
pub(super) fn sides(
    signatures: &BTreeMap<usize, &OperationSignature>,
) -> Option<(MismatchField, Vec<MismatchSide>)> {
    let fields = [
        MismatchField::Operation,
        MismatchField::Root,
        MismatchField::DataType,
        MismatchField::Count,
        MismatchField::Reduction,
    ];
    fields.into_iter().find_map(|field| {
        let mut sides: Vec<MismatchSide> = Vec::new();
        for (rank, shape) in signatures {
            // A field that is unknown on one rank is not compared.
            let value = match field {
                MismatchField::Operation => shape.operation.clone(),
                MismatchField::Root => shape.root?.to_string(),
                MismatchField::DataType => shape.data_type.clone()?,
                MismatchField::Count => shape.count?.to_string(),
                MismatchField::Reduction => shape.reduction.clone()?,
                // The other fields belong to a communicator, and not to an operation.
                _ => return None,
            };
            match sides.iter_mut().find(|side| side.value == value) {
                Some(side) => side.ranks.push(*rank),
                None => sides.push(MismatchSide::of(*rank, value)),
            }
        }
        sides.sort_by_key(|side| (std::cmp::Reverse(side.ranks.len()), side.ranks[0]));
        (sides.len() > 1).then_some((field, sides))
    })
}

fn candidate(
    input: &DiagnosisInput<'_>,
    collective_index: u64,
    field: MismatchField,
    sides: Vec<MismatchSide>,
) -> Candidate {
    let rank = sides[sides.len() - 1].ranks[0];
    let list: Vec<_> = sides
        .iter()
        .map(|side| {
            format!(
                "{} {}",
                input.roster.who(&side.ranks),
                side_text(field, side)
            )
        })
        .collect();
    let list = list.join(", ");
    let root = RootCause::Mismatch {
        field,
        sequence: Some(collective_index),
        sides,
    };
    let mut evidence = vec![format!(
        "at the operation of all ranks #{collective_index}: {list}"
    )];
    let differ = match root.is_of_no_rank() {
        true => {
            evidence.push(String::from(
                "equally many ranks have each value, so that either may be the intended one",
            ));
            match field {
                MismatchField::Operation => {
                    format!("ranks differ in operation #{collective_index}")
                }
                field => format!("ranks differ in the {field} of operation #{collective_index}"),
            }
        }
        false => format!("differs from the others in the {field} of operation #{collective_index}"),
    };
    Candidate {
        rank,
        operation: None,
        role: FaultRole::Initiating,
        text: format!("{differ}: {list}; {}", input.symptom_text()),
        root,
        evidence,
        hint: String::from(
            "all ranks have to call the same operations with the same count, type, reduction and root, in the same \
             order; NCCL_RUN_CHECK=1 finds it before anything is launched",
        ),
    }
}

fn side_text(field: MismatchField, side: &MismatchSide) -> String {
    let (verb, value) = (
        if side.ranks.len() == 1 { "has" } else { "have" },
        &side.value,
    );
    match field {
        MismatchField::Operation => format!("entered {value}"),
        field => format!("{verb} {field} {value}"),
    }
}

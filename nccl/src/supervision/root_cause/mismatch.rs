//! Comparison of what ranks entered at the same place.

use std::collections::{BTreeMap, BTreeSet};

use super::input::{Candidate, DiagnosisInput, OperationSignature, signatures};
use crate::supervision::rank_report::EnteredCall;
use nccl_base::fault::cause::{Differs, FaultRole, RootCause, Side};

/// Finds the first place, from the stalled one on, at which what ranks entered does not match.
pub(super) fn mismatch(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let first = input.place()?;
    let calls = input.reports.values().flat_map(|report| &report.calls);
    let places: BTreeSet<u64> = calls.filter_map(|call| call.place).collect();
    places
        .range(first..)
        .find_map(|place| mismatch_at(input, *place))
}

fn mismatch_at(input: &DiagnosisInput<'_>, place: u64) -> Option<Candidate> {
    let entered: BTreeMap<usize, &EnteredCall> = input
        .reports
        .values()
        .filter_map(|report| Some((report.rank, report.at(place)?)))
        .collect();
    // A capture and its replay are compared elsewhere, and a replay is whatever was captured.
    let signatures: BTreeMap<usize, Vec<OperationSignature>> = entered
        .iter()
        .map(|(rank, call)| (*rank, signatures(call)))
        .collect();
    let longest = signatures.values().map(Vec::len).min()?;
    (0..longest).find_map(|at| {
        let one: BTreeMap<usize, &OperationSignature> = signatures
            .iter()
            .map(|(rank, all)| (*rank, &all[at]))
            .collect();
        let (field, sides) = sides(&one)?;
        Some(candidate(input, place, field, sides))
    })
}

/// Returns the first field in which the ranks differ, and the ranks with each value: the largest side first.
pub(super) fn sides(
    signatures: &BTreeMap<usize, &OperationSignature>,
) -> Option<(Differs, Vec<Side>)> {
    let fields = [
        Differs::Operation,
        Differs::Root,
        Differs::DataType,
        Differs::Count,
        Differs::Reduction,
    ];
    fields.into_iter().find_map(|field| {
        let mut sides: Vec<Side> = Vec::new();
        for (rank, shape) in signatures {
            // A field that is unknown on one rank is not compared.
            let value = match field {
                Differs::Operation => shape.operation.clone(),
                Differs::Root => shape.root?.to_string(),
                Differs::DataType => shape.data_type.clone()?,
                Differs::Count => shape.count?.to_string(),
                Differs::Reduction => shape.reduction.clone()?,
                // The other fields belong to a communicator, and not to an operation.
                _ => return None,
            };
            match sides.iter_mut().find(|side| side.value == value) {
                Some(side) => side.ranks.push(*rank),
                None => sides.push(Side::of(*rank, value)),
            }
        }
        sides.sort_by_key(|side| (std::cmp::Reverse(side.ranks.len()), side.ranks[0]));
        (sides.len() > 1).then_some((field, sides))
    })
}

fn candidate(
    input: &DiagnosisInput<'_>,
    place: u64,
    field: Differs,
    sides: Vec<Side>,
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
        sequence: Some(place),
        sides,
    };
    let mut evidence = vec![format!("at the operation of all ranks #{place}: {list}")];
    let differ = match root.is_tied() {
        true => {
            evidence.push(String::from(
                "as many ranks have the one as the other, so that either may be what was meant",
            ));
            match field {
                Differs::Operation => format!("ranks differ in operation #{place}"),
                field => format!("ranks differ in the {field} of operation #{place}"),
            }
        }
        false => format!("differs from the others in the {field} of operation #{place}"),
    };
    Candidate {
        rank,
        operation: None,
        role: FaultRole::Initiating,
        text: format!("{differ}: {list}; {}", input.complaint()),
        root,
        evidence,
        hint: String::from(
            "all ranks have to call the same operations with the same count, type, reduction and root, in the same \
             order; NCCL_RUN_CHECK=1 finds it before anything is launched",
        ),
    }
}

fn side_text(field: Differs, side: &Side) -> String {
    let (verb, value) = (
        if side.ranks.len() == 1 { "has" } else { "have" },
        &side.value,
    );
    match field {
        Differs::Operation => format!("entered {value}"),
        field => format!("{verb} {field} {value}"),
    }
}

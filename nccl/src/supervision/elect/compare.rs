//! Comparison of what ranks entered at the same place.

use std::collections::{BTreeMap, BTreeSet};

use super::case::{Case, Finding, Shape, shapes};
use crate::supervision::report::Entered;
use nccl_base::fault::cause::{Differs, FaultRole, RootCause, Side};

/// Finds the first place, from the stalled one on, at which what ranks entered does not match.
pub(super) fn mismatch(case: &Case<'_>) -> Option<Finding> {
    let first = case.place()?;
    let calls = case.reports.values().flat_map(|report| &report.calls);
    let places: BTreeSet<u64> = calls.filter_map(|call| call.place).collect();
    places.range(first..).find_map(|place| at(case, *place))
}

fn at(case: &Case<'_>, place: u64) -> Option<Finding> {
    let entered: BTreeMap<usize, &Entered> = case
        .reports
        .values()
        .filter_map(|report| Some((report.rank, report.at(place)?)))
        .collect();
    // A capture and its replay are compared elsewhere, and a replay is whatever was captured.
    let shapes: BTreeMap<usize, Vec<Shape>> = entered
        .iter()
        .map(|(rank, call)| (*rank, shapes(call)))
        .collect();
    let longest = shapes.values().map(Vec::len).min()?;
    (0..longest).find_map(|at| {
        let one: BTreeMap<usize, &Shape> =
            shapes.iter().map(|(rank, all)| (*rank, &all[at])).collect();
        let (field, sides) = sides(&one)?;
        Some(finding(case, place, field, sides))
    })
}

/// Returns the first field in which the ranks differ, and the ranks with each value: the largest side first.
pub(super) fn sides(shapes: &BTreeMap<usize, &Shape>) -> Option<(Differs, Vec<Side>)> {
    let fields = [
        Differs::Operation,
        Differs::Root,
        Differs::DataType,
        Differs::Count,
        Differs::Reduction,
    ];
    fields.into_iter().find_map(|field| {
        let mut sides: Vec<Side> = Vec::new();
        for (rank, shape) in shapes {
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

fn finding(case: &Case<'_>, place: u64, field: Differs, sides: Vec<Side>) -> Finding {
    let rank = sides[sides.len() - 1].ranks[0];
    let list: Vec<_> = sides
        .iter()
        .map(|side| format!("{} {}", case.roster.who(&side.ranks), said(field, side)))
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
    Finding {
        rank,
        operation: None,
        role: FaultRole::Initiating,
        text: format!("{differ}: {list}; {}", case.complaint()),
        root,
        evidence,
        hint: String::from(
            "all ranks have to call the same operations with the same count, type, reduction and root, in the same \
             order; NCCL_RUN_CHECK=1 finds it before anything is launched",
        ),
    }
}

fn said(field: Differs, side: &Side) -> String {
    let (verb, value) = (
        if side.ranks.len() == 1 { "has" } else { "have" },
        &side.value,
    );
    match field {
        Differs::Operation => format!("entered {value}"),
        field => format!("{verb} {field} {value}"),
    }
}

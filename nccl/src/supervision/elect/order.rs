//! Two ranks that called two communicators in different orders.

use super::{Case, Finding};
use crate::supervision::cause::{FaultRole, RootCause};
use crate::supervision::report::{Elsewhere, Report};

/// One waits here and has not come there, where another waits that has not come here; or both have come to both, each
/// to the other one first.
pub(super) fn inverse(case: &Case<'_>) -> Option<Finding> {
    let here = case.place()?;
    for one in case.reports.values() {
        for other in case.reports.values().filter(|other| other.rank != one.rank) {
            // `one` called this communicator, `other` the second.
            for there in other
                .elsewhere
                .iter()
                .filter(|there| there.waiting.is_some())
            {
                let Some(ones) = one.elsewhere.iter().find(|ones| ones.key == there.key) else {
                    continue;
                };
                if is_inverse(here, one, other, ones, there) {
                    return Some(finding(case, one, other, &there.name));
                }
            }
        }
    }
    None
}

fn is_inverse(
    here: u64,
    one: &Report,
    other: &Report,
    ones: &Elsewhere,
    there: &Elsewhere,
) -> bool {
    let Some(call) = one.at(here).filter(|call| call.is_pending()) else {
        return false;
    };
    let Some((place, others_age)) = there.waiting else {
        return false;
    };
    let one_is_not_there = ones.entered.is_some_and(|entered| entered < place);
    let other_is_not_here = other.entered.is_some_and(|entered| entered < here);
    if one_is_not_there && other_is_not_here {
        return true;
    }
    // Both wait in both, and the device of each runs the other one first.
    match (
        ones.waiting,
        other.at(here).filter(|call| call.is_pending()),
    ) {
        (Some((ones_place, ones_age)), Some(others_call)) => {
            ones_place == place && call.age_ms > ones_age && others_call.age_ms < others_age
        }
        _ => false,
    }
}

fn finding(case: &Case<'_>, one: &Report, other: &Report, there: &str) -> Finding {
    let (here, a, b) = (case.name, one.rank, other.rank);
    Finding {
        rank: a.min(b),
        role: FaultRole::Initiating,
        root: RootCause::InverseOrder {
            ranks: [a, b],
            communicators: [here.to_owned(), there.to_owned()],
        },
        text: format!(
            "and rank {} called two communicators in different orders: rank {a} {here:?} before {there:?}, rank {b} \
             {there:?} before {here:?}; {}",
            a.max(b),
            case.complaint()
        ),
        evidence: vec![format!(
            "rank {a} waits on {here:?}, rank {b} on {there:?}, each for the other"
        )],
        hint: String::from(
            "call operations of several communicators in the same order on all ranks, or in one nccl::group",
        ),
    }
}

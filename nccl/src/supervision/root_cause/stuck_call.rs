//! Calls that do not return.

use super::super::rank_report::{EnteredCall, EnteredCallState};
use super::host;
use super::input::{Candidate, DiagnosisInput};
use nccl_base::fault::cause::{FaultRole, RootCause};

/// Finds a rank that reported a call that does not return. A call in which NCCL connects ranks does not count: it waits
/// for others.
pub(super) fn reported(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let symptom = input
        .symptoms
        .iter()
        .find(|fault| matches!(fault.root, RootCause::StuckInside { .. }))?;
    Some(Candidate {
        rank: symptom.rank(),
        operation: None,
        role: FaultRole::Initiating,
        root: symptom.root.clone(),
        text: symptom.cause.to_owned(),
        evidence: vec![String::from(
            "a call waits for other ranks only where NCCL connects them, and in this one it connects none",
        )],
        hint: hint(input, symptom.rank()),
    })
}

/// Finds the one rank that is still inside the call of the stalled operation, when another rank has returned from it: a call
/// that needs the other ranks would keep them inside as well.
pub(super) fn inferred(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let collective_index = input.stalled_collective()?;
    let calls = input.reports.values();
    let calls =
        calls.filter_map(|report| Some((report.rank, report.collective(collective_index)?)));
    let calls: Vec<_> = calls.collect();
    let has_returned = |call: &EnteredCall| {
        matches!(
            call.state,
            EnteredCallState::Pending | EnteredCallState::Queued
        )
    };
    let waited = calls.iter().filter(|(_, call)| has_returned(call));
    let waited = waited.map(|(_, call)| call.age_ms).max()?;
    let mut inside = calls
        .iter()
        .filter(|(_, call)| call.state == EnteredCallState::Issuing);
    let (Some((rank, call)), None) = (inside.next(), inside.next()) else {
        return None;
    };
    // A call that a rank has just entered is about to return.
    if 2 * call.age_ms < waited {
        return None;
    }
    let name = call.name();
    let seconds = call.age_ms as f64 / 1e3;
    Some(Candidate {
        rank: *rank,
        operation: None,
        role: FaultRole::Initiating,
        text: format!(
            "has been inside the call of {name} for {seconds:.1} s; {}",
            input.symptom_text()
        ),
        root: RootCause::StuckInside { operation: name },
        evidence: vec![String::from(
            "the other ranks that reported have returned from this call and wait for this rank on their streams",
        )],
        hint: hint(input, *rank),
    })
}

/// Returns where else to look: `hosts` has the thread's place in the kernel, as far as reading it was permitted.
fn hint(input: &DiagnosisInput<'_>, rank: usize) -> String {
    let own = input
        .reports
        .get(&rank)
        .and_then(|report| report.host.as_ref());
    let thread = match own.is_some_and(|own| !own.threads.is_empty()) {
        true => {
            "`hosts` has where the threads of that rank are in the kernel, and a stack trace of the process where they \
                 are in the program"
        }
        false => "look where that thread is (a stack trace of the process)",
    };
    let rest = host::look_at(input, Some(rank), "and at what else holds the driver there");
    format!("{thread}; {rest}")
}

//! Ranks that do not answer.

use super::input::{Candidate, DiagnosisInput};
use nccl_base::fault::cause::{FaultRole, RootCause};
use nccl_base::fault::{Cause, FaultClass};

/// Finds ranks that did not answer, at least one of which is known to be suspended.
pub(super) fn suspended(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let silent = input.silent();
    let rank = silent
        .iter()
        .find(|rank| input.suspended.contains_key(rank))?;
    Some(unresponsive(input, *rank, &silent))
}

/// Finds ranks that did not answer, where nothing else explains the stall.
pub(super) fn not_answering(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let silent = input.silent();
    Some(unresponsive(input, *silent.first()?, &silent))
}

/// Builds the finding on the `silent` ranks, of which `rank` is the one to name.
fn unresponsive(input: &DiagnosisInput<'_>, rank: usize, silent: &[usize]) -> Candidate {
    let mut silent = silent.to_vec();
    // `rank` is named; the others are listed behind it.
    silent.sort_by_key(|other| (*other != rank, *other));
    let state = input.suspended.get(&rank).cloned().flatten();
    let host = &input.hosts[rank];
    let is_host = silent.len() > 1
        && silent.iter().all(|other| input.hosts[*other] == *host)
        && input.hosts.iter().any(|other| other != host);
    let mut evidence = vec![format!(
        "{} of {} ranks said how they stand, {} did not in time",
        input.reports.len(),
        input.hosts.len(),
        list_ranks(input, &silent)
    )];
    if is_host {
        evidence.push(format!("all of them run on {host}"));
    }
    let others = if silent.len() > 1 {
        format!(" (as do {})", list_ranks(input, &silent[1..]))
    } else {
        String::new()
    };
    let state_text = state_text(state.as_deref());
    Candidate {
        rank,
        operation: None,
        role: FaultRole::Initiating,
        root: RootCause::NotAnswering {
            ranks: silent,
            state,
        },
        text: format!(
            "does not answer{others}{state_text}; {}",
            input.symptom_text()
        ),
        evidence,
        hint: String::from(LOOK_AT_IT),
    }
}

fn list_ranks(input: &DiagnosisInput<'_>, ranks: &[usize]) -> String {
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    input.roster.who(&ranks)
}

const LOOK_AT_IT: &str = "look at that process (a debugger, SIGSTOP, a full control group, swapping), or at the network \
                          to its host";

fn state_text(state: Option<&str>) -> String {
    match state {
        Some(state) => format!(": {state}"),
        None => String::from(
            "; nothing shows that its process has ended: it may be stopped, frozen or without CPU time",
        ),
    }
}

/// Returns the cause where no reports could be collected, because the coordinator, rank `rank` of the communicator, does not
/// answer.
pub(in crate::supervision) fn silent_coordinator(rank: usize, state: Option<String>) -> Cause {
    let text = format!("does not answer{}", state_text(state.as_deref()));
    Cause {
        class: FaultClass::TimedOut,
        root: RootCause::NotAnswering {
            ranks: vec![rank],
            state,
        },
        text,
        evidence: vec![String::from(
            "it coordinates: what the others told when they ran out of time did not come back, and its heartbeats did \
             not come, so that nobody could be asked how the ranks stand",
        )],
        hint: String::from(LOOK_AT_IT),
        ..Cause::asked("")
    }
}

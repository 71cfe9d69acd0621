//! Determines the root cause for a communicator under diagnosis: a pure function of the ranks' reports.
//!
//! A rank whose operation timed out reports only that it waited. So each rank reports what it has entered, and what it waits
//! in, and this module combines the reports. Certain causes come first:
//!
//! 1. what ranks entered does not match ([`mismatch`]);
//! 2. a rank reported that a call into NCCL or CUDA does not return there ([`stuck_call`]);
//! 3. ranks do not answer, and are known to be suspended ([`unresponsive`]);
//! 4. a message has another length than was expected ([`messages`]);
//! 5. ranks wait for each other in a cycle, over one or several communicators ([`wait_graph`]);
//! 6. ranks have not entered the operation in which others wait: the rank that is furthest behind;
//! 7. ranks do not answer, and nothing shows why: they may be late themselves;
//! 8. one rank has not returned from the call of the stalled operation ([`stuck_call`]); or its operation waits behind other
//!    work; or a message has no counterpart;
//! 9. what NCCL reported on both ends shows a network that does not carry the operation, or a device that does not go on with
//!    it ([`inside_nccl`]);
//! 10. NCCL warned of something that can be a cause;
//! 11. none of these: what the ranks reported, with what is known.
//!
//! Ties are decided by rank number. The order in which reports arrive plays no part; the order of the timeouts is the
//! coordinator's, the same for all.

mod host;
mod input;
mod inside_nccl;
mod late_arrivals;
mod messages;
mod mismatch;
mod stuck_call;
#[cfg(test)]
mod tests;
mod unresponsive;
mod wait_graph;

pub(super) use self::host::{EvidencePart, SeenByRank, sentences};
use self::input::Candidate;
pub(super) use self::input::{DiagnosisInput, completed_calls};
pub(super) use self::unresponsive::silent_coordinator;
use super::rank_report::{EnteredCallState, RankReport};
use nccl_base::fault::cause::{RootCause, Waiting};
use nccl_base::fault::{Cause, Fault, FaultClass};
use nccl_base::fault::{FaultRole, PastEvent};

/// The rank at the root, and the cause.
#[derive(Debug)]
pub(super) struct Diagnosis {
    pub(super) rank: usize,
    pub(super) cause: Cause,
}

/// Finds the root cause; see the module.
pub(super) fn find_root_cause(input: &DiagnosisInput<'_>) -> Diagnosis {
    let candidate = mismatch::mismatch(input)
        .or_else(|| stuck_call::reported(input))
        .or_else(|| unresponsive::suspended(input))
        .or_else(|| messages::length_mismatch(input))
        .or_else(|| wait_graph::cycle(input))
        .or_else(|| never_entered(input))
        .or_else(|| unresponsive::not_answering(input))
        .or_else(|| stuck_call::inferred(input))
        .or_else(|| queued_behind_other_work(input))
        .or_else(|| messages::unmatched(input))
        .or_else(|| inside_nccl::slow_network(input))
        .or_else(|| inside_nccl::slow_rank(input))
        .or_else(|| nccl_warning(input))
        .unwrap_or_else(|| unexplained(input));
    let first = most_informative_symptom(input);
    let is_of_no_rank = candidate.root.is_of_no_rank();
    let pending_calls = input.reports.values().filter_map(|report| {
        let front = input.front(report)?;
        let is_named = report.rank == candidate.rank && !is_of_no_rank;
        (!is_named).then(|| (report.rank, front.name()))
    });
    let mut evidence = candidate.evidence;
    evidence.extend(late_arrivals::usual_straggler(input));
    evidence.extend(inside_nccl::sentences(input));
    let ras = input
        .reports
        .values()
        .find_map(|report| report.ras.as_ref());
    evidence.extend(ras.map(|ras| ras.text(input.roster)));
    evidence.extend(nccl_warning_text(input, &candidate.root));
    Diagnosis {
        rank: candidate.rank,
        cause: Cause {
            class: class(input, &candidate.root),
            role: candidate.role,
            root: candidate.root,
            operation: candidate
                .operation
                .unwrap_or_else(|| first.operation_values().clone()),
            text: candidate.text,
            evidence,
            also: Waiting::together(pending_calls),
            hint: candidate.hint,
            timeout: input.symptoms.iter().find_map(Fault::timeout),
            began: None,
            origin_fault: None,
        },
    }
}

/// Finds a rank that has not entered the operation in which others wait: preferably one that does not wait itself, and of those
/// the one that is furthest behind.
fn never_entered(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let collective_index = input.stalled_collective()?;
    let waiting = input.reports.values().find_map(|report| {
        let call = report.collective(collective_index)?;
        call.is_pending().then(|| call.name())
    })?;
    let behind = |rank: &usize| match input.reports.get(rank) {
        Some(report) if report.exists => {
            report.entered.filter(|entered| *entered < collective_index)
        }
        Some(_) => Some(0),
        None => input.departed_in_order.contains(rank).then_some(0),
    };
    let absent: Vec<(u64, usize)> = (0..input.hosts.len())
        .filter_map(|rank| Some((behind(&rank)?, rank)))
        .collect();
    // A rank that waits elsewhere waits for another rank.
    let is_elsewhere = |rank: usize| {
        let report = input.reports.get(&rank);
        report.is_some_and(|report| {
            report
                .elsewhere
                .iter()
                .any(|other| !other.pending_calls.is_empty())
                || input.front(report).is_some()
        })
    };
    let &(_, rank) = absent
        .iter()
        .min_by_key(|(entered, rank)| (is_elsewhere(*rank), *entered, *rank))?;
    let report = input.reports.get(&rank);
    let last = report.and_then(RankReport::last);
    let phase = report.and_then(|report| report.phase.clone());
    let mut evidence = Vec::new();
    match &last {
        Some(last) => evidence.push(format!(
            "its last operation on {} was {last}",
            input.named()
        )),
        None if input.departed_in_order.contains(&rank) => {
            evidence.push(String::from(
                "it has left the world, and enters no further operation",
            ));
        }
        None if report.is_some_and(|report| !report.exists) => {
            evidence.push(format!(
                "it does not have communicator {} (not made yet, or already ended)",
                input.named()
            ));
        }
        None => evidence.push(format!("it has called nothing on {}", input.named())),
    }
    if let Some(PastEvent { what, ago, .. }) = &phase {
        let ago = ago.as_secs_f64();
        evidence.push(format!("its program is in phase {what:?} for {ago:.1} s"));
    }
    let elsewhere = report.into_iter().flat_map(|report| &report.elsewhere);
    let there = elsewhere.filter_map(|other| Some((other.pending_calls.first()?, other)));
    for (call, other) in there.take(2) {
        let named = other.roster.named(&other.name);
        evidence.push(format!("it waits in {} on {named} meanwhile", call.name()));
    }
    if let Some(call) = report.and_then(|report| input.front(report)) {
        evidence.push(format!("it waits in {} meanwhile", call.name()));
    }
    let others: Vec<usize> = absent.iter().map(|(_, rank)| *rank).collect();
    let others: Vec<usize> = others.into_iter().filter(|other| *other != rank).collect();
    if !others.is_empty() {
        let have = if others.len() == 1 { "has" } else { "have" };
        evidence.push(format!(
            "{} {have} not entered it either",
            input.roster.who(&others)
        ));
    }
    Some(Candidate {
        rank,
        operation: None,
        role: FaultRole::Initiating,
        text: format!("has not entered {waiting}; {}", input.symptom_text()),
        root: RootCause::NeverEntered {
            operation: waiting,
            last,
            phase,
        },
        evidence,
        hint: String::from(
            "look at what that rank's program does instead: all ranks have to call the same operations in the same \
             order",
        ),
    })
}

/// Finds a rank on which other work is in front of the operation, where all ranks have entered it.
fn queued_behind_other_work(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let queued = input.reports.values().find_map(|report| {
        let call = input.front(report)?;
        (call.state == EnteredCallState::Queued).then(|| (report.rank, call.name()))
    });
    let reported = || {
        let symptom = input
            .symptoms
            .iter()
            .find(|fault| matches!(fault.root, RootCause::StuckOutside { .. }))?;
        Some((
            symptom.rank(),
            symptom.operation().unwrap_or("the operation").to_owned(),
        ))
    };
    let (rank, operation) = queued.or_else(reported)?;
    let own = input.symptoms.iter().find(|fault| fault.rank() == rank);
    let text = match own {
        Some(own) => own.cause.to_owned(),
        None => format!(
            "{operation} is queued behind work on its stream that is not this communicator's; {}",
            input.symptom_text()
        ),
    };
    Some(Candidate {
        rank,
        operation: None,
        role: FaultRole::Initiating,
        root: RootCause::StuckOutside { operation },
        text,
        evidence: vec![String::from(
            "all other ranks have entered it, and nothing is in front of theirs that is known",
        )],
        hint: String::from(
            "look at what the program put on that stream before the operation, and at what that waits for; where it \
             may take so long, set a longer `Timeouts::queue`",
        ),
    })
}

/// Finds the first rank with an NCCL warning that can be a cause.
fn nccl_warning(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let known = input.reports.values().find_map(|report| {
        let warning = report.warning.as_ref()?;
        warning.check.as_ref()?;
        Some((report.rank, warning))
    });
    let (rank, warning) = known?;
    let text = &warning.text;
    let root = match warning.resource() {
        Some(resource) => RootCause::ResourceExhausted {
            resource: resource.to_owned(),
        },
        None => RootCause::Warned {
            warning: text.clone(),
        },
    };
    Some(Candidate {
        rank,
        operation: None,
        role: FaultRole::Initiating,
        text: format!("NCCL warned there: {text}; {}", input.symptom_text()),
        root,
        evidence: vec![String::from(
            "it is the first warning in NCCL's file there, and nothing else explains that the ranks wait",
        )],
        hint: warning.fix().unwrap_or_default().to_owned(),
    })
}

/// Returns NCCL's first warning, where it is not the cause itself.
fn nccl_warning_text(input: &DiagnosisInput<'_>, root: &RootCause) -> Option<String> {
    if matches!(
        root,
        RootCause::Warned { .. } | RootCause::ResourceExhausted { .. }
    ) {
        return None;
    }
    let mut warnings = input.reports.values().filter_map(|report| {
        let warning = report.warning.as_ref()?;
        Some((warning.check.is_none(), report.rank, &warning.text))
    });
    let first = warnings.by_ref().min()?;
    let (_, rank, text) = first;
    let who = input.roster.who(&[rank]);
    Some(format!("NCCL's first warning on {who}: {text}"))
}

/// Returns the class of the fault: if ranks wait, a timeout if an operation of any rank timed out, even if other ranks
/// saw a failure that followed.
fn class(input: &DiagnosisInput<'_>, root: &RootCause) -> FaultClass {
    let waited = matches!(
        root,
        RootCause::NeverEntered { .. }
            | RootCause::NotAnswering { .. }
            | RootCause::StuckInside { .. }
            | RootCause::StuckOutside { .. }
            | RootCause::SlowRank { .. }
            | RootCause::SlowNetwork { .. }
    );
    let mut classes = input.symptoms.iter().map(|fault| fault.class);
    match waited && classes.any(|class| class == FaultClass::TimedOut) {
        true => FaultClass::TimedOut,
        false => most_informative_symptom(input).class,
    }
}

/// Returns the most informative symptom: a failure that follows from another fault comes before a timeout, and what
/// NCCL reports while it ends comes last. Between equals, the first.
fn most_informative_symptom<'c>(input: &DiagnosisInput<'c>) -> &'c Fault {
    let best = input
        .symptoms
        .iter()
        .min_by_key(|symptom| match symptom.role {
            FaultRole::Initiating => 0,
            FaultRole::Cascade => 1,
            FaultRole::Unknown => 2,
            _ => 3,
        });
    best.unwrap_or(&input.symptoms[0])
}

fn unexplained(input: &DiagnosisInput<'_>) -> Candidate {
    let first = most_informative_symptom(input);
    let mut evidence = vec![format!(
        "all {} ranks that are left answer, none of their processes is gone, and nothing differs among what they \
         entered last",
        input.reports.len()
    )];
    if input.symptoms.len() > 1 {
        let ranks: Vec<_> = input.symptoms.iter().map(Fault::rank).collect();
        evidence.push(format!(
            "ran out of time, or saw a failure, in this order: {}",
            ranks
                .iter()
                .map(|rank| input.roster.who(&[*rank]))
                .collect::<Vec<_>>()
                .join(", ")
        ));
    }
    Candidate {
        rank: first.rank(),
        operation: None,
        role: match first.class {
            FaultClass::TimedOut => FaultRole::Unknown,
            _ => first.role,
        },
        root: first.root.clone(),
        text: first.cause.to_owned(),
        evidence,
        hint: match (first.class, first.role) {
            (FaultClass::TimedOut, _) => {
                format!(
                    "{ALL_WAIT}: {}",
                    host::look_at(input, None, DEVICES_AND_NETWORK)
                )
            }
            (_, FaultRole::Cascade) => {
                format!("{ALL_ANSWER}; {}", host::look_at(input, None, NETWORK))
            }
            _ => first.hint().unwrap_or_default().to_owned(),
        },
    }
}

/// Hint where all ranks answer, and none has missed a call or differs.
const ALL_WAIT: &str = "no rank is known to have missed a call, so that what is left is a device that hangs, a link \
                        between devices or hosts that has stopped, or an operation that takes longer than its limit";

const DEVICES_AND_NETWORK: &str =
    "at nvidia-smi, and at the network's error counters on the hosts of all ranks";

/// Hint where NCCL reports that something on another rank came first, and all ranks answer.
const ALL_ANSWER: &str = "no rank is known to have failed first, so that what is left is a link between devices or hosts, \
                          or a connection that NCCL gave up: look at the first warning in NCCL's log of every rank \
                          (NCCL_DEBUG=WARN)";

const NETWORK: &str = "and at the network's error counters on the hosts of all ranks";

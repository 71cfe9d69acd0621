//! From a rank whose operation timed out to a decided fault: collects the reports of the ranks, and determines the root
//! cause.
//!
//! ```text
//! ranks whose operation timed out       the first of them, in the common order     every rank
//!   announce that (symptom/KEY) ──────▶   becomes the collector
//!                                                                    ◀──────────── sends its report to the collector
//!                                         all have reported, or the timeout has passed:
//!                                         decides, and announces the fault ──────▶ the first is the decided fault
//! ```
//!
//! So the decided fault is written as always: it is the first fault that all ranks receive. A cause that is certain by
//! itself (a process that died, or a call that failed) is announced at once and ends the collection. When the collector
//! dies, its death is the decided fault; when it does not answer, each of the others announces its own symptom after
//! [`DIAGNOSIS_TIMEOUT`]. Reports go to the collector alone: the traffic grows with the number of ranks, not with its
//! square.
//!
//! When the coordinator does not answer, no rank receives anything. Each rank detects that by itself: its own
//! announcement does not arrive, and the coordinator's heartbeats are missing. Then the silent coordinator is the
//! decided fault, with a text that is the same on all ranks, whatever the call in which each of them waits. Each rank
//! also announces this fault, so that the coordinator, if it continues, and ranks that did not wait receive the same
//! one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pending_diagnoses::{FAULT_TOPIC, HEARTBEAT_TIMEOUT, PendingDiagnosis, SYMPTOM_TOPIC};
use super::root_cause::{self, DiagnosisInput, SeenByRank, find_root_cause, sentences};
use super::supervisor::ControlPlaneSupervisor;
use crate::events;
use crate::peers::Supervisor as _;
use nccl_base::departure::Departure;
use nccl_base::fault::{Cause, Fault, FaultSite, RootCause};
use nccl_control::ProcessState;
use nccl_control::{RankProcess, RankSession};

/// How long the other ranks may take to report if all missing ranks are known to be suspended, and otherwise
/// (`REPORT_TIMEOUT`): a busy machine may delay a report.
const REPORT_WINDOW: Duration = Duration::from_millis(500);
const REPORT_TIMEOUT: Duration = Duration::from_millis(1500);

/// After this time without a decided fault, a rank announces its own symptom as the fault.
const DIAGNOSIS_TIMEOUT: Duration = Duration::from_secs(3);

/// Announces that an operation of this rank timed out, and ensures that there will be a decided fault.
pub(super) fn open(supervisor: &Arc<ControlPlaneSupervisor>, own: &Arc<Fault>) {
    let (session, members) = supervisor.session();
    let begun = Instant::now();
    session.announce(
        &format!("{SYMPTOM_TOPIC}{}", supervisor.key()),
        &own.encode(members),
    );
    let (theirs, fault) = (Arc::clone(supervisor), Arc::clone(own));
    let spawned = std::thread::Builder::new()
        .name(String::from("nccl-diagnose"))
        .spawn(move || await_decided_fault(&theirs, &fault, begun));
    if let Err(error) = spawned {
        events::no_thread("to find a cause", &error);
        announce(supervisor, &own.without_others());
    }
}

fn announce(supervisor: &ControlPlaneSupervisor, fault: &Fault) {
    let (session, members) = supervisor.session();
    session.announce(
        &format!("{FAULT_TOPIC}{}", supervisor.key()),
        &fault.encode(members),
    );
}

/// Waits for the decided fault on a rank that has announced a symptom. The collector diagnoses meanwhile. After a
/// timeout, this rank announces that the coordinator is silent, or its own symptom.
fn await_decided_fault(supervisor: &ControlPlaneSupervisor, own: &Fault, begun: Instant) {
    let (session, pending_diagnoses) = (supervisor.session().0, supervisor.pending_diagnoses());
    let start = Instant::now();
    let mut is_decided = false;
    let mut all = pending_diagnoses.all.lock();
    while supervisor.fault().is_none() && !session.is_closed() {
        let now = Instant::now();
        let announcement_arrived = all.iter().any(|(key, _)| key == supervisor.key());
        let waited = now.duration_since(start);
        if waited >= DIAGNOSIS_TIMEOUT || (waited >= HEARTBEAT_TIMEOUT && !announcement_arrived) {
            drop(all);
            let silent = (!announcement_arrived)
                .then(|| silent_coordinator(supervisor, own))
                .flatten();
            if silent.is_some() || waited >= DIAGNOSIS_TIMEOUT {
                let alone = || own.without_others();
                announce(supervisor, silent.as_ref().unwrap_or(&alone()));
                return silent
                    .into_iter()
                    .for_each(|fault| supervisor.fail_derived(fault));
            }
            all = pending_diagnoses.all.lock();
        }
        let pending = all.iter().find(|(key, _)| key == supervisor.key());
        if let Some((_, pending)) = pending
            && !is_decided
            && pending.collector == session.rank()
        {
            let left_ranks = departed_in_order(session, &pending.members);
            let missing = pending.missing(&left_ranks);
            let waited = pending.opened.elapsed();
            let members = pending.members.clone();
            // Checked without the lock: the thread that reads the connections must not wait for it.
            let check_complete = || {
                let all_suspended =
                    || suspended_ranks(session, &members, &missing).len() == missing.len();
                missing.is_empty()
                    || waited >= REPORT_TIMEOUT
                    || (waited >= REPORT_WINDOW && all_suspended())
            };
            drop(all);
            let is_complete = check_complete();
            all = pending_diagnoses.all.lock();
            let pending = all.iter().find(|(key, _)| key == supervisor.key());
            if let (true, Some((_, pending))) = (is_complete, pending) {
                is_decided = true;
                let pending = pending.clone();
                drop(all);
                // All reports were made within this time.
                let slack = begun.elapsed();
                let fault = diagnose(supervisor, &pending, &left_ranks, slack);
                announce(supervisor, &fault);
                all = pending_diagnoses.all.lock();
                continue;
            }
        }
        // Some events that end the loop do not notify.
        pending_diagnoses
            .changed
            .wait_for(&mut all, Duration::from_millis(5));
    }
}

/// Returns the ranks of the communicator that have left in order, and so will not report.
fn departed_in_order(session: &RankSession, members: &[usize]) -> BTreeSet<usize> {
    let departures = session.departures().into_iter();
    let left_ranks = departures.filter(|(_, departure)| *departure == Departure::Left);
    left_ranks
        .filter_map(|(rank, _)| members.iter().position(|member| *member == rank))
        .collect()
}

/// Returns the fault of a coordinator that does not answer, as far as this rank knows; the fault of this rank's own timeout is
/// `seen`. `None` if the coordinator is not a rank of the communicator.
fn silent_coordinator(supervisor: &ControlPlaneSupervisor, seen: &Fault) -> Option<Fault> {
    let (session, members) = supervisor.session();
    let coordinator = session.coordinator();
    let ages = session.heartbeat_ages();
    let age = ages.into_iter().find(|(rank, _)| *rank == coordinator);
    let is_silent = age.is_none_or(|(_, age)| age >= HEARTBEAT_TIMEOUT);
    let rank = members.iter().position(|member| *member == coordinator)?;
    if !is_silent || coordinator == session.rank() || session.is_closed() {
        return None;
    }
    let (host, pid) = host_and_pid(session, members, rank);
    // All ranks must name the same state. So the state is named only if all ranks run on this host, and only if it is
    // stopped: other states come and go.
    let processes = session.members();
    let processes = processes.get().map_or(&[][..], |processes| processes);
    let all_beside = members
        .iter()
        .all(|member| processes.get(*member).is_some_and(RankProcess::is_here));
    let own = processes.get(coordinator).filter(|_| all_beside);
    let state = own.and_then(RankProcess::suspended_state);
    let state = state.filter(ProcessState::is_stopped);
    let state = state.map(|state| state.to_string());
    let site = FaultSite {
        communicator: supervisor.name(),
        roster: supervisor.roster(),
        rank,
        host: &host,
        pid,
        generation: session.job().1,
    };
    let cause = Cause {
        timeout: seen.timeout(),
        ..root_cause::silent_coordinator(rank, state)
    };
    Some(Fault::derived(cause, site))
}

/// Returns the host and the process id of rank `rank` of the communicator with these members.
fn host_and_pid(session: &RankSession, members: &[usize], rank: usize) -> (String, u32) {
    let processes = session.members();
    let known = processes.get().zip(members.get(rank));
    let known = known.and_then(|(processes, member)| processes.get(*member));
    known.map_or_else(
        || (String::from("unknown host"), 0),
        |member| (member.host.clone(), member.pid),
    )
}

/// Returns which of these ranks are suspended, with the kernel's state of the process where known. A process that
/// sleeps or runs is not suspended: its report may only be late.
fn suspended_ranks(
    session: &RankSession,
    members: &[usize],
    ranks: &[usize],
) -> BTreeMap<usize, Option<String>> {
    let suspects = session.suspects();
    let processes = session.members();
    let processes = processes.get();
    let suspended = ranks.iter().filter_map(|&rank| {
        let member = *members.get(rank)?;
        let suspect = suspects.iter().find(|suspect| suspect.rank == member);
        let host_and_pid = processes.and_then(|processes| processes.get(member));
        let here = host_and_pid.and_then(RankProcess::suspended_state);
        match suspect {
            Some(suspect) => Some((rank, suspect.state.clone().or(here))),
            None => Some((rank, Some(here?))),
        }
    });
    let text = |state: ProcessState| state.to_string();
    suspended
        .map(|(rank, state)| (rank, state.map(text)))
        .collect()
}

fn diagnose(
    supervisor: &ControlPlaneSupervisor,
    pending: &PendingDiagnosis,
    left_ranks: &BTreeSet<usize>,
    slack: Duration,
) -> Fault {
    let session = supervisor.session().0;
    let host_and_pid = |rank: usize| host_and_pid(session, &pending.members, rank);
    let hosts: Vec<_> = (0..pending.members.len())
        .map(|rank| host_and_pid(rank).0)
        .collect();
    let missing = pending.missing(left_ranks);
    let input = DiagnosisInput {
        name: supervisor.name(),
        key: supervisor.key(),
        roster: supervisor.roster(),
        hosts: &hosts,
        symptoms: &pending.symptoms,
        reports: &pending.reports,
        departed_in_order: left_ranks,
        suspended: &suspended_ranks(session, &pending.members, &missing),
        done: &root_cause::completed_calls(&pending.reports),
        slack,
    };
    let diagnosis = find_root_cause(&input);
    let places: Vec<_> = (0..pending.members.len()).map(host_and_pid).collect();
    let seen = pending.reports.values().filter_map(|report| {
        Some(SeenByRank {
            rank: report.rank,
            evidence: report.host.as_ref()?,
            is_stuck: report.rank == diagnosis.rank
                && matches!(diagnosis.cause.root, RootCause::StuckInside { .. }),
        })
    });
    let seen: Vec<_> = seen.collect();
    let host_evidence = sentences(&seen, &places, supervisor.roster());
    let (host, pid) = host_and_pid(diagnosis.rank);
    let site = FaultSite {
        communicator: supervisor.name(),
        roster: supervisor.roster(),
        rank: diagnosis.rank,
        host: &host,
        pid,
        generation: session.job().1,
    };
    let fault = pending.symptoms[0].with_decided_cause(diagnosis.cause, site);
    fault.with_host_evidence(host_evidence)
}

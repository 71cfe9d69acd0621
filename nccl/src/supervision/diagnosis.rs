//! From a rank that ran out of time to a decided fault: the reports of the ranks are collected, and the root cause is determined.
//!
//! ```text
//! ranks that ran out of time            the first of them, as all hear it          every rank
//!   announce that (symptom/KEY) ──────▶   is the one that collects
//!                                                                    ◀──────────── says to it how it stands
//!                                         all have said so, or long enough has passed:
//!                                         decides, and announces the fault ──────▶ the first is the decided fault
//! ```
//!
//! So the decided fault is written as always: by the first fault that all ranks hear. What is certain by itself, a process that
//! died or a call that failed, is announced at once and ends the collection. When the collector dies, its death is the decided
//! fault; when it stands still, each of the others announces what it saw itself after a while. Reports go to the collector
//! alone: the traffic grows with the number of ranks, not with its square.
//!
//! When the coordinator stands still, no rank hears anything. Each rank detects that by itself: its own announcement does not
//! come back, and the coordinator's heartbeats are missing. Then that is the decided fault, in words that are the same on all
//! ranks whatever each of them waits in. Each rank also announces it, so that the coordinator, should it go on, and ranks that
//! did not wait, hear the same.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pending_diagnoses::{FAULT, HEARTBEAT_TIMEOUT, PendingDiagnosis, SYMPTOM};
use super::root_cause::{self, DiagnosisInput, find_root_cause};
use super::supervisor::ControlPlaneSupervisor;
use crate::events;
use crate::peers::Supervisor as _;
use nccl_base::departure::Departure;
use nccl_base::fault::{Cause, Fault, Place};
use nccl_control::ProcessState;
use nccl_control::{RankProcess, RankSession};

/// How long the other ranks may take to report; `LATE` applies where nothing shows that the missing ranks stand still,
/// because a busy machine may delay a report.
const WINDOW: Duration = Duration::from_millis(500);
const LATE: Duration = Duration::from_millis(1500);

/// After this time without a decided fault, a rank announces what it saw itself.
const LAST: Duration = Duration::from_secs(3);

/// Announces that this rank ran out of time, and ensures that there will be a decided fault.
pub(super) fn open(supervisor: &Arc<ControlPlaneSupervisor>, own: &Arc<Fault>) {
    let (session, members) = supervisor.session();
    let begun = Instant::now();
    session.announce(
        &format!("{SYMPTOM}{}", supervisor.key()),
        &own.encode(members),
    );
    let (theirs, fault) = (Arc::clone(supervisor), Arc::clone(own));
    let spawned = std::thread::Builder::new()
        .name(String::from("nccl-diagnose"))
        .spawn(move || run_collector(&theirs, &fault, begun));
    if let Err(error) = spawned {
        events::no_thread("to find a cause", &error);
        announce(supervisor, &own.without_others());
    }
}

fn announce(supervisor: &ControlPlaneSupervisor, fault: &Fault) {
    let (session, members) = supervisor.session();
    session.announce(
        &format!("{FAULT}{}", supervisor.key()),
        &fault.encode(members),
    );
}

/// Collects and decides, on the collector, until there is a decided fault; announces a silent coordinator, or what this rank
/// saw itself.
fn run_collector(supervisor: &ControlPlaneSupervisor, own: &Fault, begun: Instant) {
    let (session, pending_diagnoses) = (supervisor.session().0, supervisor.pending_diagnoses());
    let start = Instant::now();
    let mut is_decided = false;
    let mut all = pending_diagnoses.all.lock();
    while supervisor.fault().is_none() && !session.is_closed() {
        let now = Instant::now();
        let is_heard = all.iter().any(|(key, _)| key == supervisor.key());
        let waited = now.duration_since(start);
        if waited >= LAST || (waited >= HEARTBEAT_TIMEOUT && !is_heard) {
            drop(all);
            let silent = (!is_heard)
                .then(|| silent_coordinator(supervisor, own))
                .flatten();
            if silent.is_some() || waited >= LAST {
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
            let left = departed(session, &pending.members);
            let missing = pending.missing(&left);
            let waited = pending.opened.elapsed();
            let members = pending.members.clone();
            // Checked without the lock: the thread that reads the connections must not wait for it.
            let over = || {
                let still = || stopped_state(session, &members, &missing).len() == missing.len();
                missing.is_empty() || waited >= LATE || (waited >= WINDOW && still())
            };
            drop(all);
            let is_over = over();
            all = pending_diagnoses.all.lock();
            let pending = all.iter().find(|(key, _)| key == supervisor.key());
            if let (true, Some((_, pending))) = (is_over, pending) {
                is_decided = true;
                let pending = pending.clone();
                drop(all);
                // All reports were made within this time.
                let slack = begun.elapsed();
                let fault = diagnose(supervisor, &pending, &left, slack);
                announce(supervisor, &fault);
                all = pending_diagnoses.all.lock();
                continue;
            }
        }
        // Not every event that ends the loop is notified.
        pending_diagnoses
            .changed
            .wait_for(&mut all, Duration::from_millis(5));
    }
}

/// Returns which ranks of the communicator have left in order, and report nothing any more.
fn departed(session: &RankSession, members: &[usize]) -> BTreeSet<usize> {
    let departures = session.departures().into_iter();
    let left = departures.filter(|(_, departure)| *departure == Departure::Left);
    left.filter_map(|(rank, _)| members.iter().position(|member| *member == rank))
        .collect()
}

/// Returns the fault of a coordinator that stands still, as far as this rank can tell, whose own timeout is `seen`; `None`
/// if the coordinator is not a rank of the communicator.
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
    // All ranks must name the same state: unless all run on this host, none does, and states other than stopped come and go.
    let people = session.members();
    let people = people.get().map_or(&[][..], |people| people);
    let all_beside = members
        .iter()
        .all(|member| people.get(*member).is_some_and(RankProcess::is_here));
    let own = people.get(coordinator).filter(|_| all_beside);
    let state = own.and_then(RankProcess::stopped_state);
    let state = state.filter(ProcessState::is_stopped);
    let state = state.map(|state| state.to_string());
    let place = Place {
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
    Some(Fault::derived(cause, place))
}

/// Returns the host and the process id of rank `rank` of the communicator with these members.
fn host_and_pid(session: &RankSession, members: &[usize], rank: usize) -> (String, u32) {
    let people = session.members();
    let known = people.get().zip(members.get(rank));
    let known = known.and_then(|(people, member)| people.get(*member));
    known.map_or_else(
        || (String::from("unknown host"), 0),
        |member| (member.host.clone(), member.pid),
    )
}

/// Returns which of these ranks stand still, with the kernel's state of the process where it is known. A process that sleeps
/// or runs does not stand still: its report may be late.
fn stopped_state(
    session: &RankSession,
    members: &[usize],
    ranks: &[usize],
) -> BTreeMap<usize, Option<String>> {
    let suspects = session.suspects();
    let people = session.members();
    let people = people.get();
    let still = ranks.iter().filter_map(|&rank| {
        let member = *members.get(rank)?;
        let suspect = suspects.iter().find(|suspect| suspect.rank == member);
        let host_and_pid = people.and_then(|people| people.get(member));
        let here = host_and_pid.and_then(RankProcess::stopped_state);
        match suspect {
            Some(suspect) => Some((rank, suspect.state.clone().or(here))),
            None => Some((rank, Some(here?))),
        }
    });
    let in_words = |state: ProcessState| state.to_string();
    still
        .map(|(rank, state)| (rank, state.map(in_words)))
        .collect()
}

fn diagnose(
    supervisor: &ControlPlaneSupervisor,
    pending: &PendingDiagnosis,
    left: &BTreeSet<usize>,
    slack: Duration,
) -> Fault {
    let session = supervisor.session().0;
    let host_and_pid = |rank: usize| host_and_pid(session, &pending.members, rank);
    let hosts: Vec<_> = (0..pending.members.len())
        .map(|rank| host_and_pid(rank).0)
        .collect();
    let missing = pending.missing(left);
    let input = DiagnosisInput {
        name: supervisor.name(),
        key: supervisor.key(),
        roster: supervisor.roster(),
        hosts: &hosts,
        symptoms: &pending.symptoms,
        reports: &pending.reports,
        left,
        still: &stopped_state(session, &pending.members, &missing),
        done: &root_cause::completed_calls(&pending.reports),
        slack,
    };
    let diagnosis = find_root_cause(&input);
    let (host, pid) = host_and_pid(diagnosis.rank);
    let place = Place {
        communicator: supervisor.name(),
        roster: supervisor.roster(),
        rank: diagnosis.rank,
        host: &host,
        pid,
        generation: session.job().1,
    };
    pending.symptoms[0].elected(diagnosis.cause, place)
}

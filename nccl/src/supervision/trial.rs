//! From a rank that ran out of time to a verdict: the reports of the ranks are collected, and the cause is elected.
//!
//! ```text
//! ranks that ran out of time            the first of them, as all hear it          every rank
//!   announce that (symptom/KEY) ──────▶   is the one that collects
//!                                                                    ◀──────────── says to it how it stands
//!                                         all have said so, or long enough has passed:
//!                                         elects, and announces the fault ───────▶ the first is the verdict
//! ```
//!
//! So the verdict is written as always: by the first fault that all ranks hear. What is certain by itself, a process that died
//! or a call that failed, is announced at once and ends the collection. When the elector dies, its death is the verdict; when
//! it stands still, each of the others announces what it saw itself after a while. Reports go to the elector alone: the
//! traffic grows with the number of ranks, not with its square.
//!
//! When the coordinator stands still, no rank hears anything. Each rank detects that by itself: its own announcement does not
//! come back, and the coordinator's heartbeats are missing. Then that is the verdict, in words that are the same on all ranks
//! whatever each of them waits in. Each rank also announces it, so that the coordinator, should it go on, and ranks that did
//! not wait, hear the same.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::board::Board;
use super::elect::{self, Case, elect};
use super::trials::{FAULT, PATIENCE, SYMPTOM, Trial};
use crate::events;
use crate::peers::Supervisor as _;
use crate::rendezvous::ProcessState;
use crate::rendezvous::{Line, Member};
use nccl_base::departure::Departure;
use nccl_base::fault::{Cause, Fault, Place};

/// How long the other ranks may take to report; `LATE` applies where nothing shows that the missing ranks stand still,
/// because a busy machine may delay a report.
const WINDOW: Duration = Duration::from_millis(500);
const LATE: Duration = Duration::from_millis(1500);

/// After this time without a verdict, a rank announces what it saw itself.
const LAST: Duration = Duration::from_secs(3);

/// Announces that this rank ran out of time, and ensures that there will be a verdict.
pub(super) fn open(board: &Arc<Board>, own: &Arc<Fault>) {
    let (line, members) = board.line();
    let begun = Instant::now();
    line.announce(&format!("{SYMPTOM}{}", board.key()), &own.encode(members));
    let (theirs, fault) = (Arc::clone(board), Arc::clone(own));
    let spawned = std::thread::Builder::new()
        .name(String::from("nccl-elect"))
        .spawn(move || preside(&theirs, &fault, begun));
    if let Err(error) = spawned {
        events::no_thread("to find a cause", &error);
        announce(board, &own.without_others());
    }
}

fn announce(board: &Board, fault: &Fault) {
    let (line, members) = board.line();
    line.announce(&format!("{FAULT}{}", board.key()), &fault.encode(members));
}

/// Collects and elects, on the elector, until there is a verdict; announces a silent coordinator, or what this rank saw itself.
fn preside(board: &Board, own: &Fault, begun: Instant) {
    let (line, trials) = (board.line().0, board.trials());
    let start = Instant::now();
    let mut elected = false;
    let mut all = trials.all.lock();
    while board.fault().is_none() && !line.is_closed() {
        let now = Instant::now();
        let is_heard = all.iter().any(|(key, _)| key == board.key());
        let waited = now.duration_since(start);
        if waited >= LAST || (waited >= PATIENCE && !is_heard) {
            drop(all);
            let silent = (!is_heard)
                .then(|| silent_coordinator(board, own))
                .flatten();
            if silent.is_some() || waited >= LAST {
                let alone = || own.without_others();
                announce(board, silent.as_ref().unwrap_or(&alone()));
                return silent.into_iter().for_each(|fault| board.decide(fault));
            }
            all = trials.all.lock();
        }
        let trial = all.iter().find(|(key, _)| key == board.key());
        if let Some((_, trial)) = trial
            && !elected
            && trial.elector == line.rank()
        {
            let left = departed(line, &trial.members);
            let missing = trial.missing(&left);
            let waited = trial.opened.elapsed();
            let members = trial.members.clone();
            // Checked without the lock: the thread that reads the connections must not wait for it.
            let over = || {
                let still = || standing_still(line, &members, &missing).len() == missing.len();
                missing.is_empty() || waited >= LATE || (waited >= WINDOW && still())
            };
            drop(all);
            let is_over = over();
            all = trials.all.lock();
            let trial = all.iter().find(|(key, _)| key == board.key());
            if let (true, Some((_, trial))) = (is_over, trial) {
                elected = true;
                let trial = trial.clone();
                drop(all);
                // All reports were made within this time.
                let slack = begun.elapsed();
                let fault = verdict(board, &trial, &left, slack);
                announce(board, &fault);
                all = trials.all.lock();
                continue;
            }
        }
        // Not every event that ends the loop rings the bell.
        trials.bell.wait_for(&mut all, Duration::from_millis(5));
    }
}

/// Returns which ranks of the communicator have left in order, and report nothing any more.
fn departed(line: &Line, members: &[usize]) -> BTreeSet<usize> {
    let departures = line.departures().into_iter();
    let left = departures.filter(|(_, departure)| *departure == Departure::Left);
    left.filter_map(|(rank, _)| members.iter().position(|member| *member == rank))
        .collect()
}

/// Returns the fault of a coordinator that stands still, as far as this rank can tell, whose own timeout is `seen`; `None`
/// if the coordinator is not a rank of the communicator.
fn silent_coordinator(board: &Board, seen: &Fault) -> Option<Fault> {
    let (line, members) = board.line();
    let coordinator = line.coordinator();
    let ages = line.heartbeat_ages();
    let age = ages.into_iter().find(|(rank, _)| *rank == coordinator);
    let is_silent = age.is_none_or(|(_, age)| age >= PATIENCE);
    let rank = members.iter().position(|member| *member == coordinator)?;
    if !is_silent || coordinator == line.rank() || line.is_closed() {
        return None;
    }
    let (host, pid) = person(line, members, rank);
    // All ranks must name the same state: unless all run on this host, none does, and states other than stopped come and go.
    let people = line.members();
    let people = people.get().map_or(&[][..], |people| people);
    let all_beside = members
        .iter()
        .all(|member| people.get(*member).is_some_and(Member::is_here));
    let own = people.get(coordinator).filter(|_| all_beside);
    let state = own.and_then(Member::standing_still);
    let state = state.filter(ProcessState::is_stopped);
    let state = state.map(|state| state.to_string());
    let place = Place {
        communicator: board.name(),
        roster: board.roster(),
        rank,
        host: &host,
        pid,
        generation: line.job().1,
    };
    let cause = Cause {
        timeout: seen.timeout(),
        ..elect::silent_coordinator(rank, state)
    };
    Some(Fault::derived(cause, place))
}

/// Returns the host and the process id of rank `rank` of the communicator with these members.
fn person(line: &Line, members: &[usize], rank: usize) -> (String, u32) {
    let people = line.members();
    let known = people.get().zip(members.get(rank));
    let known = known.and_then(|(people, member)| people.get(*member));
    known.map_or_else(
        || (String::from("unknown host"), 0),
        |member| (member.host.clone(), member.pid),
    )
}

/// Returns which of these ranks stand still, with the kernel's state of the process where it is known. A process that sleeps
/// or runs does not stand still: its report may be late.
fn standing_still(
    line: &Line,
    members: &[usize],
    ranks: &[usize],
) -> BTreeMap<usize, Option<String>> {
    let suspects = line.suspects();
    let people = line.members();
    let people = people.get();
    let still = ranks.iter().filter_map(|&rank| {
        let member = *members.get(rank)?;
        let suspect = suspects.iter().find(|suspect| suspect.rank == member);
        let person = people.and_then(|people| people.get(member));
        let here = person.and_then(Member::standing_still);
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

fn verdict(board: &Board, trial: &Trial, left: &BTreeSet<usize>, slack: Duration) -> Fault {
    let line = board.line().0;
    let person = |rank: usize| person(line, &trial.members, rank);
    let hosts: Vec<_> = (0..trial.members.len())
        .map(|rank| person(rank).0)
        .collect();
    let missing = trial.missing(left);
    let case = Case {
        name: board.name(),
        key: board.key(),
        roster: board.roster(),
        hosts: &hosts,
        symptoms: &trial.symptoms,
        reports: &trial.reports,
        left,
        still: &standing_still(line, &trial.members, &missing),
        done: &elect::done_somewhere(&trial.reports),
        slack,
    };
    let verdict = elect(&case);
    let (host, pid) = person(verdict.rank);
    let place = Place {
        communicator: board.name(),
        roster: board.roster(),
        rank: verdict.rank,
        host: &host,
        pid,
        generation: line.job().1,
    };
    trial.symptoms[0].elected(verdict.cause, place)
}

//! What NCCL reported of the stalled operation, on each rank: a network that does not carry it, a device that does not go on
//! with it, and sentences for what was seen.
//!
//! Only what was observed on both ends decides. The ranks look at different times, within the time of one timeout: a transfer
//! that has not moved for a while on both ends stands still, and one that moves is slow only while its sender waits for the
//! network.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::inside_nccl::{CallInside, TransferInside, Wait};
use super::super::rank_report::RankReport;
use super::input::{Candidate, DiagnosisInput};
use nccl_base::fault::Fault;
use nccl_base::fault::cause::{FaultRole, RootCause};

/// The most ranks of which is said what they do inside NCCL.
const MOST_RANKS: usize = 8;

/// The connection from one rank to another on one channel, seen from both ends.
#[derive(Clone, Copy)]
struct Link<'r> {
    from: usize,
    to: usize,
    sender: &'r TransferInside,
    receiver: &'r TransferInside,
}

impl Link<'_> {
    fn still_ms(&self) -> u64 {
        self.sender.still_ms.min(self.receiver.still_ms)
    }

    /// Returns the number of steps that were handed to the network, and the number that arrived.
    fn done(&self) -> Option<(u32, u32)> {
        self.sender.done.zip(self.receiver.done)
    }
}

/// Returns what NCCL does for the stalled collective on a rank that waits in it.
fn inside<'r>(input: &DiagnosisInput<'_>, report: &'r RankReport) -> Option<&'r CallInside> {
    let front = input.front(report)?;
    let is_stalled = front.collective_index == input.stalled_collective();
    let inside = report.inside.as_ref()?.call(front.number)?;
    (front.collective_index.is_some() && is_stalled).then_some(inside)
}

fn links<'r>(input: &DiagnosisInput<'r>) -> Vec<Link<'r>> {
    let reports: &'r _ = input.reports;
    let mut links = Vec::new();
    for (to, report) in reports {
        let Some(call) = inside(input, report) else {
            continue;
        };
        for receiver in call.open_transfers().filter(|one| !one.is_send) {
            let from = receiver.peer;
            let other = reports.get(&from).and_then(|report| inside(input, report));
            let sends = other.into_iter().flat_map(|call| &call.operations);
            let sends = sends.flat_map(|one| &one.transfers);
            let sender = sends.filter(|one| {
                (one.is_send, one.peer, one.channel) == (true, *to, receiver.channel)
            });
            // One that is over has sent all; of several, the first that is under way.
            if let Some(sender) = sender.min_by_key(|one| one.is_over) {
                links.push(Link {
                    from,
                    to: *to,
                    sender,
                    receiver,
                });
            }
        }
    }
    links
}

/// Returns how long a transfer stands still before it counts as stopped: a part of the time that the ranks waited.
fn standstill(input: &DiagnosisInput<'_>) -> u64 {
    let timeout = input.symptoms.iter().find_map(Fault::timeout);
    let part = timeout.map_or(Duration::ZERO, |timeout| timeout / 4);
    u64::try_from(part.as_millis()).map_or(2000, |part| part.clamp(500, 2000))
}

/// Finds a network connection on which data is under way that does not arrive, or not fast enough.
pub(super) fn slow_network(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let limit = standstill(input);
    let is_slow = |link: &Link<'_>| {
        let Some((sent, arrived)) = link.done() else {
            return false;
        };
        let waits_for_peer = link.receiver.waits_for == Some(Wait::PeerData);
        let is_blocked = link.sender.waits_for == Some(Wait::Network);
        let is_still = link.still_ms() >= limit;
        waits_for_peer && (is_blocked || (is_still && sent > arrived))
    };
    let slow: Vec<_> = links(input).into_iter().filter(is_slow).collect();
    let link = *slow.iter().min_by_key(|link| {
        let is_moving = link.still_ms() < limit;
        (is_moving, link.receiver.done, link.from, link.to)
    })?;
    let (sent, arrived) = link.done()?;
    let is_moving = link.still_ms() < limit;
    let steps = link.receiver.steps;
    let (from, to) = (input.roster.who(&[link.from]), input.roster.who(&[link.to]));
    let (from_host, to_host) = (&input.hosts[link.from], &input.hosts[link.to]);
    let handed = format!(
        "{from} has handed {sent} of {steps} steps to the network, and {arrived} have arrived at {to}"
    );
    let text = match is_moving {
        true => format!(
            "the network from {from} ({from_host}) to {to} ({to_host}) is slow: {handed}; {}",
            input.symptom_text()
        ),
        false => format!(
            "the network from {from} ({from_host}) to {to} ({to_host}) does not carry data: {handed}, the last {:.1} s ago; {}",
            link.still_ms() as f64 / 1e3,
            input.symptom_text()
        ),
    };
    let mut evidence = Vec::new();
    let ends: BTreeSet<_> = slow.iter().map(|link| (link.from, link.to)).collect();
    let others = ends.len() - 1;
    if others > 0 {
        evidence.push(format!(
            "{others} other connections between the ranks wait for the network as well"
        ));
    }
    Some(Candidate {
        rank: link.to,
        operation: None,
        role: FaultRole::Initiating,
        root: RootCause::SlowNetwork {
            from: link.from,
            to: link.to,
            done: arrived,
            steps,
            is_moving,
        },
        text,
        evidence,
        hint: String::from(match is_moving {
            true => {
                "look at the rate and the load of the network between these hosts (ethtool, tc, the switch's counters); where it \
                 is as fast as it can be, set a longer `Timeouts::operation`"
            }
            false => {
                "look at the network between these hosts: error counters of both interfaces (ip -s link, ethtool -S), firewalls, \
                 routes, MTU"
            }
        }),
    })
}

/// Finds the one rank whose device does not go on, while all others wait for data: its kernel has not started, or does not take
/// what has arrived.
pub(super) fn slow_rank(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let calls: Vec<_> = (0..input.hosts.len())
        .map(|rank| inside(input, input.reports.get(&rank)?))
        .collect::<Option<_>>()?;
    let (rank, what) = kernel_not_started(&calls).or_else(|| takes_no_data(input, &calls))?;
    let report = input.reports.get(&rank)?;
    let operation = input.front(report)?.name();
    Some(Candidate {
        rank,
        operation: None,
        role: FaultRole::Initiating,
        text: format!(
            "its device does not go on with {operation}: {what}; {}",
            input.symptom_text()
        ),
        root: RootCause::SlowRank { operation },
        evidence: vec![String::from(
            "all other ranks wait for data from other ranks",
        )],
        hint: String::from(
            "look at what that rank's GPU does: work of other streams or processes, its clocks and its Xid messages \
             (nccl-doctor, nvidia-smi)",
        ),
    })
}

/// Finds the one rank on which no kernel of the call has started, while one runs on each of the others.
fn kernel_not_started(calls: &[&CallInside]) -> Option<(usize, String)> {
    let started: Vec<u32> = (calls.iter())
        .map(|call| {
            let kernels = call.operations.iter().map(|one| one.kernel);
            let started = kernels.map(|kernel| kernel.map(|(started, _)| started));
            started.sum::<Option<u32>>()
        })
        .collect::<Option<_>>()?;
    let mut waiting = (0..started.len()).filter(|rank| started[*rank] == 0);
    match (waiting.next(), waiting.next()) {
        (Some(rank), None) if started.len() > 1 => Some((
            rank,
            String::from("its kernel has not started, and on all other ranks one runs"),
        )),
        _ => None,
    }
}

/// Finds the one rank whose device does not take what has arrived, or gives nothing to send, and which waits for no other. Only
/// where every rank has a host of its own: between ranks of one host data moves without being seen.
fn takes_no_data(input: &DiagnosisInput<'_>, calls: &[&CallInside]) -> Option<(usize, String)> {
    let hosts: BTreeSet<_> = input.hosts.iter().collect();
    if hosts.len() < input.hosts.len() {
        return None;
    }
    let limit = standstill(input);
    let waits_for_rank = |call: &CallInside| {
        call.open_transfers().any(|one| {
            matches!(
                one.waits_for,
                Some(Wait::PeerData | Wait::PeerCredit | Wait::Network)
            )
        })
    };
    let is_observed = |call: &&CallInside| {
        let mut open = call.open_transfers();
        open.any(|one| one.done.is_some())
    };
    if !calls.iter().all(is_observed) {
        return None;
    }
    let mut free = (0..calls.len()).filter(|rank| !waits_for_rank(calls[*rank]));
    let (Some(rank), None) = (free.next(), free.next()) else {
        return None;
    };
    let open = calls[rank].open_transfers();
    let stopped = open.filter(|one| {
        matches!(
            one.waits_for,
            Some(Wait::OwnGpu | Wait::OwnGpuTakes | Wait::Flush)
        )
    });
    let first = stopped.min_by_key(|one| (one.is_send, one.channel))?;
    let peer = input.roster.who(&[first.peer]);
    let seconds = first.still_ms as f64 / 1e3;
    let what = match first.is_send {
        true => {
            format!("it has had no data for {peer} for {seconds:.1} s, and waits for no other rank")
        }
        false => format!("data from {peer} has arrived, and was not taken for {seconds:.1} s"),
    };
    (first.still_ms >= limit).then_some((rank, what))
}

/// Returns what the ranks do inside NCCL, in the calls in which they wait.
pub(super) fn sentences(input: &DiagnosisInput<'_>) -> Vec<String> {
    let seen = input.reports.values().filter_map(|report| {
        let front = input.front(report)?;
        let call = report.inside.as_ref()?.call(front.number)?;
        Some((report.rank, call.text(input.roster)))
    });
    let mut alike: Vec<(Vec<usize>, String)> = Vec::new();
    for (rank, text) in seen {
        match alike.iter_mut().find(|(_, known)| *known == text) {
            Some((ranks, _)) => ranks.push(rank),
            None => alike.push((vec![rank], text)),
        }
    }
    let more: usize = alike
        .iter()
        .skip(MOST_RANKS)
        .map(|(ranks, _)| ranks.len())
        .sum();
    let said = alike.iter().take(MOST_RANKS);
    let mut sentences: Vec<String> = said
        .map(|(ranks, text)| format!("inside NCCL, {}: {text}", input.roster.who(ranks)))
        .collect();
    if more > 0 {
        sentences.push(format!("inside NCCL, {more} more ranks were looked at"));
    }
    sentences
}

//! What NCCL reported about the stalled operation, on each rank: a network that does not carry it, a device that does
//! not continue it, and sentences for the observations.
//!
//! A conclusion needs observations from both ends, and all of them. The ranks look at different times, within the time
//! of one timeout. So a network counts as stopped when both ends have stood still for a while, and as slow when the
//! sender waited for it nearly all the time, for a good part of the timeout. A step in flight at the moment of the look
//! proves nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::inside_nccl::{CallInside, TransferInside, Wait};
use super::super::rank_report::RankReport;
use super::input::{Candidate, DiagnosisInput};
use nccl_base::fault::Fault;
use nccl_base::fault::cause::{FaultRole, RootCause};

/// Maximum number of ranks whose state inside NCCL is described.
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
    /// Returns the number of steps that were handed to the network, and the number that arrived.
    fn done(&self) -> Option<(u32, u32)> {
        self.sender.done.zip(self.receiver.done)
    }

    /// Returns for how long nothing has moved, if the receiver waits for data and the network has some for it.
    fn stopped_ms(&self) -> Option<u64> {
        let (sent, arrived) = self.done()?;
        let waits_for_data = self.receiver.waits_for == Some(Wait::PeerData);
        let is_held = !self.sender.is_over && self.sender.waits_for == Some(Wait::Network);
        let since = match (is_held, sent > arrived) {
            (true, _) => self.sender.waits_ms.min(self.sender.still_ms),
            (false, true) => self.sender.still_ms,
            (false, false) => return None,
        };
        waits_for_data.then(|| since.min(self.receiver.still_ms))
    }

    /// Returns whether the sender has waited for the network nearly all the time, since at least `since_ms`, and data
    /// has arrived meanwhile.
    fn is_slow(&self, since_ms: u64) -> bool {
        let sender = self.sender;
        let is_limited = sender.network_ms >= sender.age_ms / 10 * 9;
        let has_moved = self.receiver.still_ms + 1 < self.receiver.age_ms;
        let is_waited_for = self.receiver.waits_for == Some(Wait::PeerData);
        !sender.is_over && sender.age_ms >= since_ms && is_limited && has_moved && is_waited_for
    }
}

/// Returns what NCCL does for the stalled collective on a rank that waits in it.
fn inside<'r>(input: &DiagnosisInput<'_>, report: &'r RankReport) -> Option<&'r CallInside> {
    let front = input.front(report)?;
    let is_stalled = front.collective_index == input.stalled_collective();
    let inside = report.inside.as_ref()?.call(front.number)?;
    (front.collective_index.is_some() && is_stalled).then_some(inside)
}

/// Returns the transfers of a call with this peer, channel and direction.
fn transfers(
    call: &CallInside,
    (peer, channel, is_send): (usize, u8, bool),
) -> impl Iterator<Item = &TransferInside> {
    let all = call.operations.iter().flat_map(|one| &one.transfers);
    all.filter(move |one| (one.peer, one.channel, one.is_send) == (peer, channel, is_send))
}

/// Returns the connections of which both ends are known. Several transfers of a call between two ranks on one channel
/// cannot be told apart, and are left out.
fn links<'r>(input: &DiagnosisInput<'r>) -> Vec<Link<'r>> {
    let reports: &'r _ = input.reports;
    let mut links = Vec::new();
    for (&to, report) in reports {
        let Some(call) = inside(input, report) else {
            continue;
        };
        for receiver in call.open_transfers().filter(|one| !one.is_send) {
            let (from, channel) = (receiver.peer, receiver.channel);
            let Some(other) = reports
                .get(&from)
                .and_then(|report| inside(input, report))
                .filter(|_| from != to)
            else {
                continue;
            };
            let mut receivers = transfers(call, (from, channel, false));
            let mut senders = transfers(other, (to, channel, true));
            let is_only = receivers.nth(1).is_none();
            if let (true, Some(sender), None) = (is_only, senders.next(), senders.next()) {
                links.push(Link {
                    from,
                    to,
                    sender,
                    receiver,
                });
            }
        }
    }
    links
}

fn timeout(input: &DiagnosisInput<'_>) -> Duration {
    let timeout = input.symptoms.iter().find_map(Fault::timeout);
    timeout.unwrap_or_default()
}

/// Returns how long a transfer stands still before it counts as stopped: a part of the time that the ranks waited.
fn standstill(input: &DiagnosisInput<'_>) -> u64 {
    let part = timeout(input) / 4;
    u64::try_from(part.as_millis()).map_or(2000, |part| part.clamp(500, 2000))
}

/// Finds a network connection whose data does not arrive, or not fast enough.
pub(super) fn slow_network(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let limit = standstill(input);
    let half = u64::try_from(timeout(input).as_millis()).unwrap_or(u64::MAX) / 2;
    let all = links(input);
    let stopped_ms = |link: &Link<'_>| link.stopped_ms().filter(|ms| *ms >= limit);
    let stopped = all.iter().filter(|link| stopped_ms(link).is_some());
    let mut affected: Vec<_> = stopped.collect();
    let is_moving = affected.is_empty();
    if is_moving {
        let slow = all.iter().filter(|link| link.is_slow(half.max(limit)));
        affected.extend(slow);
    }
    let link = **affected
        .iter()
        .min_by_key(|link| (link.receiver.done, link.from, link.to))?;
    let (sent, arrived) = link.done()?;
    let steps = link.receiver.steps;
    let (from, to) = (input.roster.who(&[link.from]), input.roster.who(&[link.to]));
    let (from_host, to_host) = (&input.hosts[link.from], &input.hosts[link.to]);
    let handed = format!(
        "{from} has handed {sent} of {steps} steps to the network, and {arrived} have arrived at {to}"
    );
    let text = match is_moving {
        true => format!(
            "the network from {from} ({from_host}) to {to} ({to_host}) is slow: {handed}, and it was what {from} waited for during {:.1} \
             of {:.1} s; {}",
            link.sender.network_ms as f64 / 1e3,
            link.sender.age_ms as f64 / 1e3,
            input.symptom_text()
        ),
        false => format!(
            "the network from {from} ({from_host}) to {to} ({to_host}) does not carry data: {handed}, and for {:.1} s neither has changed; {}",
            stopped_ms(&link).unwrap_or_default() as f64 / 1e3,
            input.symptom_text()
        ),
    };
    let mut evidence = Vec::new();
    let ends: BTreeSet<_> = affected.iter().map(|link| (link.from, link.to)).collect();
    let others = ends.len() - 1;
    if others > 0 {
        evidence.push(format!(
            "{others} other connections between the ranks are in the same state"
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

/// Finds the one rank whose device makes no progress, while all others wait for data: its kernel has not started, or
/// does not take data that has arrived.
pub(super) fn slow_rank(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let calls: Vec<_> = (0..input.hosts.len())
        .map(|rank| inside(input, input.reports.get(&rank)?))
        .collect::<Option<_>>()?;
    let is_known = |call: &&CallInside| {
        call.omitted == 0 && !call.operations.iter().any(|one| one.is_incomplete)
    };
    if !calls.iter().all(is_known) {
        return None;
    }
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
        evidence: Vec::new(),
        hint: String::from(
            "look at what that rank's GPU does: work of other streams or processes, its clocks and its Xid messages \
             (nccl-doctor, nvidia-smi)",
        ),
    })
}

/// Finds the one rank on which no kernel of the call has started, while one runs on each of the others.
fn kernel_not_started(calls: &[&CallInside]) -> Option<(usize, String)> {
    let mut waiting = Vec::new();
    for (rank, call) in calls.iter().enumerate() {
        // With several operations, the one that the others need is unknown.
        let [operation] = &call.operations[..] else {
            return None;
        };
        match operation.kernel? {
            (0, _) => waiting.push(rank),
            (started, ended) if ended < started => {}
            _ => return None,
        }
    }
    match waiting[..] {
        [rank] if calls.len() > 1 => Some((
            rank,
            String::from("its kernel has not started, and one runs on each of the other ranks"),
        )),
        _ => None,
    }
}

/// Finds the one rank whose device does not take data that has arrived, or provides none to send, and which waits for
/// no other rank. Applies only if every rank has a host of its own: transfers between ranks of one host are not
/// observed.
fn takes_no_data(input: &DiagnosisInput<'_>, calls: &[&CallInside]) -> Option<(usize, String)> {
    let hosts: BTreeSet<_> = input.hosts.iter().collect();
    if hosts.len() < input.hosts.len() {
        return None;
    }
    let limit = standstill(input);
    let waits_for_rank = |call: &CallInside| {
        let mut waits = call.open_transfers().map(|one| one.waits_for);
        waits.any(|wait| wait.is_some_and(Wait::is_for_others))
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
    let seconds = first.waits_ms as f64 / 1e3;
    let what = match first.is_send {
        true => format!(
            "it has had no data for {peer} for {seconds:.1} s and waits for no other rank, and all others wait for one"
        ),
        false => format!(
            "data from {peer} has arrived and was not taken for {seconds:.1} s, and all others wait for a rank"
        ),
    };
    (first.waits_ms.min(first.still_ms) >= limit).then_some((rank, what))
}

/// Describes what the ranks do inside NCCL, in the calls in which they wait.
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

//! Evidence from the hosts of the ranks: the sentences of a fault, and hints that say where to look for the rest.
//!
//! Several processes of one host have read the same log: an event is reported once, with the age that the first of them
//! saw.

use std::collections::BTreeMap;
use std::mem::discriminant;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::input::DiagnosisInput;
use nccl_base::fault::Roster;
use nccl_diagnose::host_evidence::{
    DeviceState, DeviceTrouble, HostEvidence, KernelEvent, KernelEventKind, LogAccess, NvmlAccess,
};

/// Maximum number of hosts, and of sentences about each.
const MOST_HOSTS: usize = 12;
const MOST_OF_HOST: usize = 6;

/// What one rank has observed on its host.
#[derive(Clone, Copy)]
pub(in crate::supervision) struct SeenByRank<'e> {
    pub(in crate::supervision) rank: usize,
    pub(in crate::supervision) evidence: &'e HostEvidence,
    /// Whether all its reported threads matter, because it is inside a call that does not return.
    pub(in crate::supervision) is_stuck: bool,
}

/// Returns a sentence for each host on which something was seen, in the order of their first ranks; `places` are host and process
/// of each rank.
pub(in crate::supervision) fn sentences(
    seen: &[SeenByRank<'_>],
    places: &[(String, u32)],
    roster: &Roster,
) -> Vec<String> {
    let mut hosts: Vec<(&str, Vec<SeenByRank<'_>>)> = Vec::new();
    for one in seen {
        let Some((host, _)) = places.get(one.rank) else {
            continue;
        };
        match hosts.iter_mut().find(|(known, _)| known == host) {
            Some((_, of_host)) => of_host.push(*one),
            None => hosts.push((host, vec![*one])),
        }
    }
    let about = hosts.iter().filter_map(|(host, seen)| {
        let mut said = of_host(host, seen, places, roster);
        let more = said.len().saturating_sub(MOST_OF_HOST);
        said.truncate(MOST_OF_HOST);
        if more > 0 {
            said.push(format!("and {more} more"));
        }
        (!said.is_empty()).then(|| format!("host {host}: {}", said.join("; ")))
    });
    let mut sentences: Vec<String> = about.collect();
    let more = sentences.len().saturating_sub(MOST_HOSTS);
    sentences.truncate(MOST_HOSTS);
    if more > 0 {
        sentences.push(format!("and on {more} more hosts"));
    }
    sentences
}

fn of_host(
    host: &str,
    seen: &[SeenByRank<'_>],
    places: &[(String, u32)],
    roster: &Roster,
) -> Vec<String> {
    let here = places.iter().enumerate();
    let here = here.filter(|(_, (other, _))| other == host);
    // Ranks may be threads of one process.
    let mut ranks: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (rank, (_, pid)) in here {
        ranks.entry(*pid).or_default().push(rank);
    }
    // In a PID namespace, another process has the number that the log names.
    let known = || seen.iter().filter_map(|one| one.evidence.has_host_pids());
    let has_host_pids = known().next().is_some() && known().all(|is_of_host| is_of_host);
    let pids: Vec<u32> = ranks.keys().copied().collect();
    let mut events: Vec<KernelEvent> = Vec::new();
    for event in seen.iter().flat_map(|one| one.evidence.events_of(&pids)) {
        match events.iter_mut().find(|known| known.kind == event.kind) {
            Some(known) => {
                known.age = known.age.max(event.age);
                known.times = known.times.max(event.times);
            }
            None => events.push(event.clone()),
        }
    }
    // A device that failed explains more than what the driver did to the processes that used it.
    events.sort_by_key(|event| (is_consequence(event), std::cmp::Reverse(event.age)));
    let has_victim = events
        .iter()
        .any(|event| matches!(event.kind, KernelEventKind::OomKill(_)));
    let mut said: Vec<String> = events
        .iter()
        .map(|event| {
            let pid = match &event.kind {
                KernelEventKind::OomKill(kill) => Some(kill.pid),
                KernelEventKind::Xid(xid) => xid.pid,
                _ => None,
            };
            let of = pid.filter(|_| has_host_pids);
            let of = of.and_then(|pid| ranks.get(&pid));
            let of = of.map_or_else(String::new, |ranks| {
                format!(" (the process of {})", roster.who(ranks))
            });
            format!("{event}{of}, {} ago", age_text(event.age))
        })
        .collect();
    said.extend(devices(seen, &pids, roster));
    let kills = seen.iter().filter_map(|one| one.evidence.memory.oom_kills);
    if let Some(kills) = kills.max().filter(|kills| *kills > 0 && !has_victim) {
        let who = if kills == 1 { "process" } else { "processes" };
        said.push(format!(
            "the OOM killer has ended {kills} {who} of the ranks' control group"
        ));
    }
    let short = seen.iter().find(|one| one.evidence.memory.is_short());
    said.extend(short.map(|one| one.evidence.memory.to_string()));
    for one in seen {
        let threads = one.evidence.threads.iter();
        let threads = threads.filter(|thread| one.is_stuck || thread.is_stuck());
        said.extend(threads.map(|thread| format!("{}: {thread}", roster.who(&[one.rank]))));
    }
    said
}

/// Returns a sentence for each device in trouble, and one for the ranks that got no answer from NVML; `pids` are the
/// processes of the ranks of the host.
fn devices(seen: &[SeenByRank<'_>], pids: &[u32], roster: &Roster) -> Vec<String> {
    // A device, its troubles, and the ranks whose processes use it.
    let mut found: Vec<(&DeviceState, Vec<&DeviceTrouble>, Vec<usize>)> = Vec::new();
    let is_foreign = |trouble: &&DeviceTrouble| !matches!(trouble, DeviceTrouble::OtherProcess { pid, .. } if pids.contains(pid));
    for one in seen {
        for device in &one.evidence.devices.list {
            let troubles = device.troubles.iter().filter(is_foreign);
            let known = found
                .iter_mut()
                .find(|(known, ..)| known.bus_id == device.bus_id);
            match known {
                Some((_, all, ranks)) => {
                    ranks.push(one.rank);
                    // Each rank counts from its own first communicator on.
                    let kinds: Vec<_> = all.iter().copied().map(discriminant).collect();
                    all.extend(troubles.filter(|trouble| !kinds.contains(&discriminant(*trouble))));
                }
                None => found.push((device, troubles.collect(), vec![one.rank])),
            }
        }
    }
    let in_trouble = found.iter().filter(|(_, troubles, _)| !troubles.is_empty());
    let mut said: Vec<String> = in_trouble
        .map(|(device, troubles, ranks)| {
            let troubles: Vec<String> = troubles.iter().map(ToString::to_string).collect();
            format!(
                "device {} of {}: {}",
                device.bus_id,
                roster.who(ranks),
                troubles.join(", ")
            )
        })
        .collect();
    let silent = seen
        .iter()
        .filter(|one| one.evidence.devices.access == NvmlAccess::NoAnswer);
    let silent: Vec<usize> = silent.map(|one| one.rank).collect();
    if !silent.is_empty() {
        said.push(format!(
            "{} ({})",
            NvmlAccess::NoAnswer,
            roster.who(&silent)
        ));
    }
    said
}

fn is_consequence(event: &KernelEvent) -> bool {
    matches!(&event.kind, KernelEventKind::Xid(xid) if xid.is_of_program())
}

fn is_xid(kind: &KernelEventKind) -> bool {
    matches!(kind, KernelEventKind::Xid(_))
}

fn age_text(age: Duration) -> String {
    match age.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

/// What is known about the kernel logs of hosts.
#[derive(Debug, PartialEq, Eq)]
enum KernelLogs {
    /// No rank has reported on them.
    Unknown,
    /// All were read, and have no Xid since the ranks were started.
    Clean,
    /// All were read, and the fault contains their events.
    Shown,
    /// The logs of these hosts were not read; `why` is the reason on the first of them.
    Unread { hosts: Vec<String>, why: LogAccess },
}

impl KernelLogs {
    /// Classifies the logs of the hosts of all ranks, or of `rank` alone.
    fn of(input: &DiagnosisInput<'_>, rank: Option<usize>) -> Self {
        let mut unread: Vec<(String, LogAccess)> = Vec::new();
        let (mut is_clean, mut is_known) = (true, false);
        let hosts = input.hosts.iter().enumerate();
        let hosts = hosts.filter(|(of, _)| rank.is_none_or(|rank| rank == *of));
        let mut hosts: Vec<&String> = hosts.map(|(_, host)| host).collect();
        hosts.sort_unstable();
        hosts.dedup();
        for host in hosts {
            let reports = input.reports.values();
            let here = reports.filter(|report| input.hosts.get(report.rank) == Some(host));
            let logs = here.filter_map(|report| Some(&report.host.as_ref()?.kernel_log));
            let logs: Vec<_> = logs.collect();
            is_known |= !logs.is_empty();
            let events = logs.iter().flat_map(|log| &log.events);
            is_clean &= logs.iter().all(|log| log.omitted == 0);
            is_clean &= !events.map(|event| &event.kind).any(is_xid);
            if !logs.iter().any(|log| log.access == LogAccess::Read) {
                let why = logs.first().map(|log| log.access.clone());
                unread.push((host.clone(), why.unwrap_or_default()));
            }
        }
        match (is_known, unread.first()) {
            (false, _) => Self::Unknown,
            (true, None) if is_clean => Self::Clean,
            (true, None) => Self::Shown,
            (true, Some((_, why))) => Self::Unread {
                why: why.clone(),
                hosts: unread.iter().map(|(host, _)| host.clone()).collect(),
            },
        }
    }
}

/// Returns where to look, beside `others`, when a device may hang. Names only kernel logs that were not read.
pub(super) fn look_at(input: &DiagnosisInput<'_>, rank: Option<usize>, others: &str) -> String {
    match KernelLogs::of(input, rank) {
        KernelLogs::Unknown => format!("look at dmesg for Xid messages, {others}"),
        KernelLogs::Clean => format!(
            "the kernel log {} was read and has no Xid since the ranks were started; look {others}",
            whose(rank)
        ),
        KernelLogs::Shown => format!(
            "`hosts` has what the kernel log {} shows; look {others}",
            whose(rank)
        ),
        KernelLogs::Unread { mut hosts, why } => {
            let more = hosts.len().saturating_sub(MOST_HOSTS);
            hosts.truncate(MOST_HOSTS);
            let more = match more {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            format!(
                "look at dmesg for Xid messages on {}{more} ({why}), {others}",
                hosts.join(", ")
            )
        }
    }
}

fn whose(rank: Option<usize>) -> &'static str {
    match rank {
        Some(_) => "of its host",
        None => "of every host",
    }
}

/// The evidence that a rank sends to the others when it has ended a communicator, if it has any.
#[derive(Default, Serialize, Deserialize)]
pub(in crate::supervision) struct EvidencePart {
    evidence: Option<HostEvidence>,
    /// Whether the kernel's log was read and is clean.
    is_clean: bool,
}

impl EvidencePart {
    /// Gathers the evidence now.
    pub(in crate::supervision) fn gather() -> Self {
        let evidence = HostEvidence::gather();
        let is_clean = evidence.has_clean_log();
        let is_empty = evidence.kernel_log.events.is_empty()
            && evidence.threads.is_empty()
            && !evidence.memory.is_short()
            && !evidence.devices.shows_trouble()
            && evidence.memory.oom_kills.unwrap_or(0) == 0;
        Self {
            evidence: (!is_empty).then_some(evidence),
            is_clean,
        }
    }

    pub(in crate::supervision) fn encode(&self) -> Vec<u8> {
        // Plain values, all of which can be serialized.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Decodes the evidence that another rank has sent; empty if it cannot be decoded.
    pub(in crate::supervision) fn decode(bytes: &[u8]) -> Self {
        let part: Self = serde_json::from_slice(bytes).unwrap_or_default();
        Self {
            evidence: part.evidence.map(HostEvidence::bounded),
            ..part
        }
    }

    pub(in crate::supervision) fn evidence(&self) -> Option<&HostEvidence> {
        self.evidence.as_ref()
    }

    pub(in crate::supervision) fn is_clean(&self) -> bool {
        self.is_clean
    }
}

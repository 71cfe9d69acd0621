//! Ranks, hosts, and owners of addresses in the logs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use crate::debug_log::collect::DebugLog;
use crate::debug_log::facts::{Membership, Process};
use nccl_base::ranges::ranges;
use nccl_base::report::Finding;

/// The processes of all logs, and their communicators, without idle parents.
pub(super) struct LogView<'l> {
    pub(super) log: &'l DebugLog,
    pub(super) groups: Vec<CommunicatorRanks<'l>>,
}

/// The ranks of one communicator.
pub(super) struct CommunicatorRanks<'l> {
    /// Its identifier in the logs; a split of some releases has none.
    pub(super) id: Option<&'l str>,
    pub(super) ranks: usize,
    pub(super) members: Vec<(&'l Process, &'l Membership)>,
    host_by_rank: HashMap<usize, &'l str>,
    /// Whether a member says that all ranks are on one host.
    one_host: bool,
}

impl CommunicatorRanks<'_> {
    /// The ranks that are not in the logs, at most 65536 of them.
    pub(super) fn missing(&self) -> Vec<usize> {
        // A longer list would not be read, and a rank count from a log must not decide about memory.
        let present: BTreeSet<usize> = self.members.iter().map(|(_, one)| one.rank).collect();
        (0..self.ranks)
            .filter(|rank| !present.contains(rank))
            .take(1 << 16)
            .collect()
    }

    /// Whether two ranks are on one host, as far as the logs show.
    pub(super) fn share_a_host(&self, a: usize, b: usize) -> bool {
        let same = || Some(self.host_by_rank.get(&a)? == self.host_by_rank.get(&b)?);
        self.one_host || same() == Some(true)
    }

    /// How many hosts it spans, as far as the logs show.
    pub(super) fn hosts(&self) -> usize {
        let told = self
            .members
            .iter()
            .filter_map(|(_, one)| one.layout)
            .map(|(nodes, _)| nodes);
        let seen: BTreeSet<&str> = self
            .members
            .iter()
            .map(|(process, _)| &process.host[..])
            .collect();
        told.max().map_or(seen.len(), |told| told as usize)
    }
}

impl<'l> LogView<'l> {
    pub(super) fn new(log: &'l DebugLog) -> Self {
        let mut groups: BTreeMap<(Option<&str>, usize), CommunicatorRanks<'l>> = BTreeMap::new();
        for process in log.processes() {
            for member in process.working() {
                // A split of some releases has no identifier: its idle parent's is used.
                let mut idle = process.communicators.iter().filter(|one| one.is_idle).rev();
                let parent = idle.find(|one| member.carries_data_of(one));
                let parent = parent.and_then(|parent| parent.id.as_deref());
                let id = member.id.as_deref().or(parent);
                let group = groups
                    .entry((id, member.ranks))
                    .or_insert_with(|| CommunicatorRanks {
                        id,
                        ranks: member.ranks,
                        members: Vec::new(),
                        host_by_rank: HashMap::new(),
                        one_host: false,
                    });
                group.one_host |= member.layout.is_some_and(|(nodes, _)| nodes == 1);
                if !process.host.is_empty() {
                    group.host_by_rank.insert(member.rank, &process.host);
                }
                group.members.push((process, member));
            }
        }
        let mut groups: Vec<_> = groups.into_values().collect();
        groups.sort_by_key(|group| std::cmp::Reverse((group.ranks, group.members.len())));
        Self { log, groups }
    }

    pub(super) fn processes(&self) -> &'l [Process] {
        self.log.processes()
    }

    /// The hosts with lines in the logs.
    pub(super) fn hosts(&self) -> BTreeSet<&'l str> {
        let named = self
            .processes()
            .iter()
            .filter(|process| !process.host.is_empty());
        named.map(|process| &process.host[..]).collect()
    }

    /// The owner of an address: `eth1 of node-b (ranks 4-7)`.
    pub(super) fn owner(&self, address: IpAddr) -> Option<String> {
        let owners: Vec<_> = self
            .processes()
            .iter()
            .filter_map(|process| {
                let mut own = process.addresses();
                let (name, _) = own.find(|(_, known)| *known == address)?;
                Some((name, process))
            })
            .collect();
        let &(interface, process) = owners.first()?;
        let processes: Vec<_> = owners.iter().map(|(_, process)| *process).collect();
        let ranks = ranks_of(&processes);
        let ranks = match ranks[..] {
            [] => String::new(),
            _ => format!(" ({})", numbered(&ranks)),
        };
        Some(format!("{interface} of {}{ranks}", process.host))
    }
}

/// `rank 3`, `ranks 0-3,5`
pub(super) fn numbered(ranks: &[usize]) -> String {
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", ranges(ranks))
}

pub(super) fn ranks_of(processes: &[&Process]) -> Vec<usize> {
    let ranks: BTreeSet<usize> = processes
        .iter()
        .flat_map(|process| {
            let ranks = process.ranks();
            let tag = process.tag.filter(|_| ranks.is_empty());
            ranks.into_iter().chain(tag)
        })
        .collect();
    ranks.into_iter().collect()
}

pub(super) fn hosts_of(processes: &[&Process]) -> Vec<String> {
    let hosts: BTreeSet<&str> = processes.iter().map(|process| &process.host[..]).collect();
    hosts
        .into_iter()
        .filter(|host| !host.is_empty())
        .map(str::to_owned)
        .collect()
}

/// `rank 3 (node-a, pid 4021)`, or the known part of it; for several, `ranks 0-3 (node-a, node-b)`.
pub(super) fn who(processes: &[&Process]) -> String {
    let ranks = ranks_of(processes);
    let place = match processes {
        [one] if !one.host.is_empty() => format!("{}, pid {}", one.host, one.pid),
        _ => {
            let hosts = hosts_of(processes);
            let more = hosts.len().saturating_sub(4);
            let mut text = hosts[..hosts.len() - more].join(", ");
            if more > 0 {
                text.push_str(&format!(" and {more} more hosts"));
            }
            text
        }
    };
    match (&ranks[..], &place[..]) {
        ([], "") => "a process without a name".to_owned(),
        ([], place) => place.to_owned(),
        (ranks, "") => numbered(ranks),
        (ranks, place) => format!("{} ({place})", numbered(ranks)),
    }
}

/// Adds the ranks and hosts of these processes to a finding.
pub(super) fn about(mut finding: Finding, processes: &[&Process]) -> Finding {
    finding.ranks = ranks_of(processes);
    finding.hosts = hosts_of(processes);
    finding
}

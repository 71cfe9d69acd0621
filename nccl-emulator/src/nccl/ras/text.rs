//! The answer to `STATUS` as a text for people: the job, its communicators in groups, errors, and warnings.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::Ipv4Addr;

use super::peers::{Peer, Peers, ProcessId};
use super::place::CUDA;
use super::report::{FUNCTIONS, Gathered, RankState, Whole};
use crate::version;

/// The largest group whose members are listed, and the largest share of all that is listed. Verbose output has no limit, and
/// another share.
const DETAILS: usize = 10;
const SHARE: f64 = 0.25;
const VERBOSE_SHARE: f64 = 0.5;

/// The state of a communicator on a rank, in the order of NCCL's bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Status {
    NoComm,
    Init,
    Running,
    Finalize,
    Abort,
}

impl Status {
    fn of(rank: &RankState) -> Self {
        match () {
            () if rank.is_aborted => Self::Abort,
            () if rank.is_finalized || rank.is_destroyed => Self::Finalize,
            () if rank.init == 0 => Self::Running,
            () => Self::Init,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::NoComm => "NOCOMM",
            Self::Init => "INIT",
            Self::Running => "RUNNING",
            Self::Finalize => "FINALIZE",
            Self::Abort => "ABORT",
        }
    }
}

/// What is wrong with a communicator; the order is that of NCCL's bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Faults {
    is_incomplete: bool,
    has_error: bool,
    is_mismatch: bool,
}

impl Faults {
    fn name(self) -> String {
        let names = [
            (self.is_incomplete, "INCOMPLETE"),
            (self.has_error, "ERROR"),
            (self.is_mismatch, "MISMATCH"),
        ];
        let names: Vec<_> = names.iter().filter(|one| one.0).map(|one| one.1).collect();
        match names.is_empty() {
            true => "OK".into(),
            false => names.join(","),
        }
    }
}

/// A communicator and what was found out about it.
struct Summary<'a> {
    whole: &'a Whole,
    nodes: usize,
    /// The fewest and the most ranks of a node.
    per_node: (usize, usize),
    statuses: BTreeSet<Status>,
    faults: Faults,
    /// Ranks whose process did not answer.
    incomplete: Vec<u32>,
    /// Ranks whose process answered without them.
    without: Vec<u32>,
}

impl<'a> Summary<'a> {
    fn of(whole: &'a Whole, gathered: &Gathered) -> Self {
        let answered = |rank: &u32| gathered.answered.contains(&whole.member(*rank).process);
        let (without, incomplete): (Vec<_>, Vec<_>) = whole.missing().partition(answered);
        let mut nodes: BTreeMap<Option<Ipv4Addr>, usize> = BTreeMap::new();
        for rank in &whole.ranks {
            let peer = gathered.peers.all.get(&whole.member(rank.rank).process);
            *nodes.entry(peer.map(|peer| peer.address)).or_default() += 1;
        }
        let mut statuses: BTreeSet<_> = whole.ranks.iter().map(Status::of).collect();
        if !without.is_empty() {
            statuses.insert(Status::NoComm);
        }
        let is_error = |code: u8| !matches!(code, 0 | 7);
        let differs = |rank: &RankState| rank.counts != whole.ranks[0].counts;
        let faults = Faults {
            is_incomplete: !incomplete.is_empty(),
            has_error: whole
                .ranks
                .iter()
                .any(|rank| is_error(rank.init) || is_error(rank.error)),
            is_mismatch: statuses.len() > 1 || whole.ranks.iter().any(differs),
        };
        Self {
            whole,
            nodes: nodes.len(),
            per_node: (
                nodes.values().copied().min().unwrap_or(0),
                nodes.values().copied().max().unwrap_or(0),
            ),
            statuses,
            faults,
            incomplete,
            without,
        }
    }

    fn size(&self) -> usize {
        self.whole.members.len()
    }

    fn status(&self) -> Status {
        self.statuses.last().copied().unwrap_or(Status::NoComm)
    }

    /// Returns the common properties of the communicators of a group.
    fn group(&self) -> (usize, usize, Status, Faults) {
        (self.size(), self.nodes, self.status(), self.faults)
    }
}

/// Whether a group of this size is listed.
fn is_outlier(count: usize, is_verbose: bool, total: Option<usize>) -> bool {
    let share = |limit: f64| total.map(|total| (count as f64, total as f64 * limit));
    match (count, is_verbose) {
        (1, _) => true,
        (_, true) => share(VERBOSE_SHARE).is_none_or(|(count, limit)| count < limit),
        (_, false) => count <= DETAILS && share(SHARE).is_none_or(|(count, limit)| count <= limit),
    }
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Returns the part that needs no other process: releases, and the summary of the job.
pub(super) fn opening(peers: &Peers) -> String {
    let mut text = format!(
        "NCCL version {} compiled with CUDA 13.0\nCUDA runtime version {CUDA}, driver version {CUDA}\n\nJob \
         summary\n===========\n\n",
        version::release()
    );
    let mut nodes: BTreeMap<Ipv4Addr, Vec<&Peer>> = BTreeMap::new();
    for peer in peers.all.values() {
        nodes.entry(peer.address).or_default().push(peer);
    }
    let gpus: usize = peers.all.values().map(|peer| peer.cuda.count()).sum();
    let of_node: BTreeSet<usize> = nodes.values().map(Vec::len).collect();
    let of_process: BTreeSet<usize> = peers.all.values().map(|peer| peer.cuda.count()).collect();
    let (total, processes) = (nodes.len(), peers.all.len());
    if let (Some(per_node), Some(per_process), 1, 1) = (
        of_node.first(),
        of_process.first(),
        of_node.len(),
        of_process.len(),
    ) {
        let _ = write!(
            text,
            "  Nodes  Processes         GPUs  Processes     GPUs\n(total)   per node  per process    (total)  (total)\n\
             {total:7}  {per_node:9}  {per_process:11}  {processes:9}  {gpus:7}\n"
        );
    } else {
        let per_node = frequencies(nodes.values().map(Vec::len));
        let per_process = frequencies(peers.all.values().map(|peer| peer.cuda.count()));
        if let [(gpus, _)] = per_process[..] {
            text += "  Nodes  Processes         GPUs\n          per node  per process\n";
            for &(processes, count) in &per_node {
                let _ = writeln!(text, "{count:7}  {processes:9}  {gpus:11}");
            }
        } else {
            text += "  Nodes  Processes\n          per node\n";
            for (processes, count) in &per_node {
                let _ = writeln!(text, "{count:7}  {processes:9}");
            }
            text += "\n         Processes         GPUs\n                    per process\n";
            for (gpus, count) in per_process {
                let _ = writeln!(text, "         {count:9}  {gpus:11}");
            }
        }
        let _ = write!(
            text,
            "\n  Nodes  Processes         GPUs\n(total)    (total)      (total)\n{total:7}  {processes:9}  {gpus:11}\n"
        );
    }
    text + "\nCommunicators..."
}

/// Returns values with their number of occurrences, the most frequent first.
fn frequencies<T: Ord + Copy>(values: impl Iterator<Item = T>) -> Vec<(T, usize)> {
    let mut counts: BTreeMap<T, usize> = BTreeMap::new();
    values.for_each(|value| *counts.entry(value).or_default() += 1);
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|&(value, count)| Reverse((count, value)));
    counts
}

/// Returns the part behind [`opening`].
pub(super) fn answer(gathered: &Gathered, is_verbose: bool) -> String {
    let mut summaries: Vec<Summary<'_>> = gathered
        .communicators
        .iter()
        .map(|whole| Summary::of(whole, gathered))
        .collect();
    summaries.sort_by_key(|one| (Reverse(one.group()), one.whole.ranks.len()));
    let groups: Vec<&[Summary<'_>]> = summaries.chunk_by(|a, b| a.group() == b.group()).collect();
    let mut text = format!(" ({:.3}s)\n=============\n\n", gathered.seconds);
    text += match groups.is_empty() {
        true => "No communicator data collected!\n",
        false => {
            "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n    #  in group  per comm  per node  per \
             comm  in group\n"
        }
    };
    for (number, group) in groups.iter().enumerate() {
        table_row(&mut text, number, group);
    }
    let mut page = Page {
        text,
        gathered,
        is_verbose,
    };
    page.text += "\nErrors\n======\n\n";
    page.missing_processes();
    page.dead_processes();
    page.each(&groups, Page::errors_of);
    page.text += "Warnings\n========\n\n";
    if gathered.timeouts > 0 {
        let _ = write!(
            page.text,
            "TIMEOUT\n  Encountered {} communication timeout{} while gathering communicator data\n\n",
            gathered.timeouts,
            plural(gathered.timeouts)
        );
    }
    page.each(&groups, Page::warnings_of);
    page.text
}

fn table_row(text: &mut String, number: usize, group: &[Summary<'_>]) {
    let first = &group[0];
    let fewest = group.iter().map(|one| one.per_node.0).min().unwrap_or(0);
    let most = group.iter().map(|one| one.per_node.1).max().unwrap_or(0);
    let per_node = match fewest == most {
        true => format!("{most}"),
        false => format!("{fewest}-{most}"),
    };
    let of_rank = |one: &Summary<'_>, rank: &RankState| {
        let member = one.whole.member(rank.rank);
        (member.process, member.nvml)
    };
    let gpus: BTreeSet<(ProcessId, i32)> = group
        .iter()
        .flat_map(|one| one.whole.ranks.iter().map(|rank| of_rank(one, rank)))
        .collect();
    let _ = writeln!(
        text,
        "{number:5}  {:8}  {:8}  {per_node:>8}  {:8}  {:8}  {:>8}  {:>6}",
        group.len(),
        first.nodes,
        first.size(),
        gpus.len(),
        first.status().name(),
        first.faults.name()
    );
}

/// The text so far, and its subject.
struct Page<'a> {
    text: String,
    gathered: &'a Gathered,
    is_verbose: bool,
}

impl Page<'_> {
    fn each(&mut self, groups: &[&[Summary<'_>]], write: impl Fn(&mut Self, &str, &Summary<'_>)) {
        for (number, group) in groups.iter().enumerate() {
            for (at, summary) in group.iter().enumerate() {
                let name = format!("#{number}-{at} ({:016x})", summary.whole.id.0);
                write(self, &name, summary);
            }
        }
    }

    fn missing_processes(&mut self) {
        let peers = &self.gathered.peers;
        let is_missing = |peer: &&Peer| {
            !self.gathered.answered.contains(&peer.process) && !peers.dead.contains(&peer.process)
        };
        let missing: Vec<&Peer> = peers.all.values().filter(is_missing).collect();
        if missing.is_empty() {
            return;
        }
        let count = missing.len();
        let ending = if count > 1 { "es" } else { "" };
        let _ = write!(
            self.text,
            "INCOMPLETE\n  Missing communicator data from {count} job process{ending}\n"
        );
        self.processes(missing);
    }

    fn dead_processes(&mut self) {
        let peers = &self.gathered.peers;
        if peers.dead.is_empty() {
            return;
        }
        let count = peers.dead.len();
        let ending = if count > 1 { "es are" } else { " is" };
        let _ = write!(
            self.text,
            "DEAD\n  {count} job process{ending} considered dead (unreachable via the RAS network)\n"
        );
        let dead = peers.dead.iter();
        self.processes(dead.filter_map(|process| peers.all.get(process)).collect());
    }

    fn processes(&mut self, mut peers: Vec<&Peer>) {
        peers.sort_by_key(|peer| (peer.address, peer.pid));
        if is_outlier(peers.len(), self.is_verbose, None) {
            for peer in peers {
                let _ = writeln!(self.text, "  {peer}");
            }
        }
        self.text.push('\n');
    }

    /// Returns the location of a rank.
    fn place(&self, whole: &Whole, rank: u32) -> String {
        let member = whole.member(rank);
        let gpu = match member.device == member.nvml {
            true => format!("{}", member.device),
            false => format!("{} (NVML {})", member.device, member.nvml),
        };
        match self.gathered.peers.all.get(&member.process) {
            Some(peer) => format!(
                "GPU {gpu} managed by process {} on node {}",
                peer.pid, peer.address
            ),
            None => "[process information not found]".into(),
        }
    }

    /// Writes the common properties of ranks: one line for a single rank; for several ranks a line for all, and one for each if
    /// there are few.
    fn ranks(
        &mut self,
        whole: &Whole,
        ranks: &[u32],
        one: &str,
        several: &str,
        total: Option<usize>,
    ) {
        if ranks.len() > 1 && !several.is_empty() {
            let _ = writeln!(self.text, "  {} ranks {several}", ranks.len());
        }
        if !is_outlier(ranks.len(), self.is_verbose, total) {
            return;
        }
        for &rank in ranks {
            let place = self.place(whole, rank);
            let _ = match ranks.len() == 1 && !one.is_empty() {
                true => writeln!(self.text, "  Rank {rank} {one} -- {place}"),
                false => writeln!(self.text, "  Rank {rank} -- {place}"),
            };
        }
    }

    fn errors_of(&mut self, name: &str, summary: &Summary<'_>) {
        let whole = summary.whole;
        if summary.faults.is_incomplete {
            let count = summary.incomplete.len();
            let _ = write!(
                self.text,
                "{name} INCOMPLETE\n  Missing communicator data from {count} rank{}\n",
                plural(count)
            );
            self.ranks(whole, &summary.incomplete, "", "", None);
            self.text.push('\n');
        }
        if summary.faults.has_error {
            let _ = writeln!(self.text, "{name} ERROR");
            self.codes(whole, "Initialization", |rank| rank.init);
            self.codes(whole, "Asynchronous", |rank| rank.error);
            self.text.push('\n');
        }
    }

    fn codes(&mut self, whole: &Whole, kind: &str, code: impl Fn(&RankState) -> u8) {
        let failed: Vec<&RankState> = whole
            .ranks
            .iter()
            .filter(|rank| !matches!(code(rank), 0 | 7))
            .collect();
        if failed.is_empty() {
            return;
        }
        let (count, s) = (failed.len(), plural(failed.len()));
        let _ = writeln!(self.text, "  {kind} error{s} on {count} rank{s}");
        for (found, _) in frequencies(failed.iter().map(|rank| code(rank))) {
            let of_code = failed.iter().filter(|rank| code(rank) == found);
            let ranks: Vec<u32> = of_code.map(|rank| rank.rank).collect();
            let reported = format!("reported {}", error_name(found));
            self.ranks(whole, &ranks, &reported, &reported, None);
        }
    }

    fn warnings_of(&mut self, name: &str, summary: &Summary<'_>) {
        if !summary.faults.is_mismatch {
            return;
        }
        let whole = summary.whole;
        let total = Some(summary.size());
        let _ = writeln!(self.text, "{name} MISMATCH");
        if summary.statuses.len() > 1 {
            self.text += "  Communicator ranks have different status\n";
            let known = whole.ranks.iter().map(|rank| (Status::of(rank), rank.rank));
            let without = summary.without.iter().map(|&rank| (Status::NoComm, rank));
            for (status, ranks) in grouped(known.chain(without)) {
                let has = format!("has status {}", status.name());
                let have = format!("have status {}", status.name());
                self.ranks(whole, &ranks, &has, &have, total);
            }
        }
        for (at, function) in FUNCTIONS.iter().enumerate() {
            let counts = whole.ranks.iter().map(|rank| (rank.counts[at], rank.rank));
            let groups = grouped(counts);
            if groups.len() < 2 {
                continue;
            }
            let _ = writeln!(
                self.text,
                "  Communicator ranks have different {} operation counts",
                function.name()
            );
            for (count, ranks) in groups {
                let (one, several) = match count {
                    0 => (
                        "has not launched any operations".to_owned(),
                        "have not launched any operations".to_owned(),
                    ),
                    _ => (
                        format!("has launched up to operation {count}"),
                        format!("have launched up to operation {count}"),
                    ),
                };
                self.ranks(whole, &ranks, &one, &several, total);
            }
            self.text.push('\n');
        }
    }
}

/// Groups ranks by a common property, the largest group first.
fn grouped<T: Ord + Copy>(values: impl Iterator<Item = (T, u32)>) -> Vec<(T, Vec<u32>)> {
    let mut groups: BTreeMap<T, Vec<u32>> = BTreeMap::new();
    values.for_each(|(value, rank)| groups.entry(value).or_default().push(rank));
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(value, ranks)| Reverse((ranks.len(), *value)));
    groups
}

fn error_name(code: u8) -> &'static str {
    match code {
        1 => "Unhandled CUDA error",
        2 => "System error",
        3 => "Internal error",
        4 => "Invalid argument",
        5 => "Invalid usage",
        6 => "Remote process error",
        7 => "NCCL operation in progress",
        _ => "Unexpected error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nccl::ras::peers::Devices;
    use crate::nccl::ras::report::{Member, OfCommunicator, Report};

    fn peer(process: ProcessId, node: u8) -> Peer {
        let mut devices = Devices::default();
        devices.add(0);
        Peer {
            process,
            address: Ipv4Addr::new(127, 0, 0, node),
            gossip: 1,
            query: 1,
            pid: 100 + process as u32,
            cuda: devices,
            nvml: devices,
        }
    }

    fn rank(rank: u32) -> RankState {
        RankState {
            rank,
            counts: [0, 0, 0, 0, 7],
            init: 0,
            error: 0,
            is_finalized: false,
            is_destroyed: false,
            is_aborted: false,
        }
    }

    /// A communicator with a rank in each of eight processes, of which the last three have a node of their own; `change` is applied to
    /// what its ranks tell.
    fn gathered(change: impl Fn(&mut RankState)) -> Gathered {
        let mut peers = Peers::default();
        let member = |process| Member {
            process,
            device: 0,
            nvml: 0,
        };
        let members: Vec<_> = (0..8).map(member).collect();
        let mut reports = Vec::new();
        for process in 0..8 {
            peers.add(peer(process, if process < 5 { 1 } else { 2 }));
            let mut state = rank(process as u32);
            change(&mut state);
            reports.push(Report {
                process,
                communicators: vec![OfCommunicator {
                    hash: 0xabc,
                    host: 1,
                    members: members.clone(),
                    ranks: vec![state],
                }],
            });
        }
        Gathered::of(reports, peers, 0, 0.25)
    }

    #[test]
    fn a_job_whose_nodes_differ_is_counted_by_node() {
        let text = opening(&gathered(|_| ()).peers);
        assert!(
            text.ends_with(
                "  Nodes  Processes         GPUs\n          per node  per process\n      1          5            1\n      1          \
                 3            1\n\n  Nodes  Processes         GPUs\n(total)    (total)      (total)\n      2          8            \
                 8\n\nCommunicators..."
            ),
            "{text}"
        );
    }

    #[test]
    fn a_communicator_without_faults_is_a_line() {
        let text = answer(&gathered(|_| ()), false);
        assert!(
            text.starts_with(" (0.250s)\n=============\n\nGroup"),
            "{text}"
        );
        let row = "    0         1         2       3-5         8         8   RUNNING      OK\n";
        let ending = format!("{row}\nErrors\n======\n\nWarnings\n========\n\n");
        assert!(text.ends_with(&ending), "{text}");
    }

    #[test]
    fn few_ranks_that_differ_are_named_and_many_are_not() {
        let text = answer(
            &gathered(|rank| {
                rank.counts[4] -= u64::from(rank.rank < 2);
                rank.error = if rank.rank == 7 { 6 } else { 0 };
                rank.is_aborted = rank.rank > 4;
            }),
            false,
        );
        let errors = "#0-0 (0000000000000abc) ERROR\n  Asynchronous error on 1 rank\n  Rank 7 reported Remote process error -- GPU 0 \
                      managed by process 107 on node 127.0.0.2\n";
        assert!(text.contains(errors), "{text}");
        let warnings = "#0-0 (0000000000000abc) MISMATCH\n  Communicator ranks have different status\n  5 ranks have status \
                        RUNNING\n  3 ranks have status ABORT\n  Communicator ranks have different AllReduce operation counts\n  6 ranks \
                        have launched up to operation 7\n  2 ranks have launched up to operation 6\n  Rank 0 -- GPU 0 managed by process \
                        100 on node 127.0.0.1\n  Rank 1 -- ";
        assert!(text.contains(warnings), "{text}");
        assert!(text.contains("ABORT  ERROR,MISMATCH\n"), "{text}");
    }
}

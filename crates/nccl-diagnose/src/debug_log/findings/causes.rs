//! The first failure, its consequences, and the ranks that still wait.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::view::{CommunicatorRanks, LogView, about, numbered, who};
use crate::debug_log::facts::{Ended, Process, Retry, Warning};
use crate::debug_log::tokens::address_in;
use nccl_base::ranges::ranges;
use nccl_base::report::{Finding, Severity};
use nccl_base::warning::{CONNECT, Class, KnownWarning};

/// Findings of each kind.
const MOST_FINDINGS: usize = 16;

/// A warning and its process.
#[derive(Clone, Copy)]
struct RankWarning<'l> {
    process: &'l Process,
    warning: &'l Warning,
}

impl RankWarning<'_> {
    /// `rank 3 (node-a, pid 4021) at 02:17:39`
    fn by(&self) -> String {
        let process = self.process;
        let mut text = match self.warning.rank {
            Some(rank) if process.host.is_empty() => format!("rank {rank}"),
            Some(rank) => format!("rank {rank} ({}, pid {})", process.host, process.pid),
            None => who(&[process]),
        };
        if let Some(time) = &self.warning.time {
            text.push_str(&format!(" at {time}"));
        }
        text
    }

    /// The warning's text, with the place in NCCL's source.
    fn words(&self) -> String {
        match &self.warning.place[..] {
            "" => format!("{:?}", self.warning.text),
            place => format!("{:?} ({place})", self.warning.text),
        }
    }

    fn rank(&self) -> Option<usize> {
        self.warning.rank.or_else(|| self.process.rank())
    }
}

fn ranks(warnings_of: &[RankWarning<'_>]) -> Vec<usize> {
    let ranks: BTreeSet<usize> = warnings_of.iter().filter_map(RankWarning::rank).collect();
    ranks.into_iter().collect()
}

fn finding(finding: Finding, warnings_of: &[RankWarning<'_>]) -> Finding {
    let processes: Vec<_> = warnings_of.iter().map(|one| one.process).collect();
    let mut finding = about(finding, &processes);
    finding.ranks = ranks(warnings_of);
    finding
}

/// The key by which the warnings of one class can be ordered.
#[derive(Clone, Copy, PartialEq)]
enum SortedBy {
    Time,
    Line,
    Unknown,
}

fn sort(warnings_of: &mut [RankWarning<'_>]) -> SortedBy {
    // A failing rank makes others fail to connect, so a failed connection comes last among equal times.
    let connects = |one: &RankWarning<'_>| {
        KnownWarning::of(&one.warning.text).is_some_and(|k| k.check == CONNECT)
    };
    let line = |one: &RankWarning<'_>| one.warning.at.clone();
    if warnings_of.iter().all(|one| one.warning.time.is_some()) {
        warnings_of.sort_by_cached_key(|one| (one.warning.time.clone(), connects(one), line(one)));
        return SortedBy::Time;
    }
    let logs: BTreeSet<_> = warnings_of.iter().map(|one| &one.warning.at.0).collect();
    if logs.len() == 1 {
        warnings_of.sort_by_key(|one| one.warning.at.1);
        return SortedBy::Line;
    }
    warnings_of.sort_by_cached_key(|one| (connects(one), line(one)));
    SortedBy::Unknown
}

pub(super) fn warnings(view: &LogView<'_>, findings: &mut Vec<Finding>) {
    let mut by_class: BTreeMap<Class, Vec<RankWarning<'_>>> = BTreeMap::new();
    for process in view.processes() {
        for warning in &process.warnings {
            let warnings_of = RankWarning { process, warning };
            by_class.entry(warning.class).or_default().push(warnings_of);
        }
    }
    let mut of = |class| by_class.remove(&class).unwrap_or_default();
    let (mut causes, unknown) = (of(Class::Cause), of(Class::Unknown));
    let consequences = of(Class::Consequence);
    if !causes.is_empty() {
        let order = sort(&mut causes);
        roots(view, &causes, order, &consequences, findings);
    } else if !consequences.is_empty() {
        findings.push(only_consequences(view, &consequences));
    }
    others(unknown, findings);
}

/// The causes by kind, the first one first.
fn roots(
    view: &LogView<'_>,
    causes: &[RankWarning<'_>],
    order: SortedBy,
    consequences: &[RankWarning<'_>],
    findings: &mut Vec<Finding>,
) {
    let mut kinds: Vec<(&KnownWarning, Vec<RankWarning<'_>>)> = Vec::new();
    for one in causes {
        let Some(known) = KnownWarning::of(&one.warning.text) else {
            continue;
        };
        match kinds.iter_mut().find(|(kind, _)| kind.check == known.check) {
            Some((_, warnings_of)) => warnings_of.push(*one),
            None => kinds.push((known, vec![*one])),
        }
    }
    let several = causes.len() > 1;
    for (number, (known, warnings_of)) in kinds.into_iter().take(MOST_FINDINGS).enumerate() {
        let first = warnings_of[0];
        let mut what = match order {
            SortedBy::Time if several && number == 0 => {
                "the first by the hosts' clocks: ".to_owned()
            }
            SortedBy::Line if several && number == 0 => "the first in the log: ".to_owned(),
            _ => String::new(),
        };
        what.push_str(&format!("{} warns {}", first.by(), first.words()));
        if let Some(address) = address_in(&first.warning.text) {
            what.push_str(&format!("; {}", owner_text(view, address)));
        }
        let others: Vec<_> = ranks(&warnings_of)
            .into_iter()
            .filter(|rank| Some(*rank) != first.rank())
            .collect();
        if !others.is_empty() {
            what.push_str(&format!("; {} alike", numbered(&others)));
        }
        if number == 0 && !consequences.is_empty() {
            let times: u64 = consequences.iter().map(|one| one.warning.times).sum();
            let ranks = ranks(consequences);
            let of = if ranks.is_empty() {
                String::new()
            } else {
                format!(" of {}", numbered(&ranks))
            };
            what.push_str(&format!(
                "; {times} warnings{of} about closed connections are consequences"
            ));
        }
        findings.push(finding(
            Finding::error(known.check, what).fix(known.fix),
            &warnings_of,
        ));
    }
}

/// The owner of an address, as half a sentence.
fn owner_text(view: &LogView<'_>, address: IpAddr) -> String {
    match view.owner(address) {
        Some(owner) => format!("{address} is {owner}"),
        None => format!("no process of these logs says that {address} is its own"),
    }
}

/// Connections were closed, and no log says why.
fn only_consequences(view: &LogView<'_>, consequences: &[RankWarning<'_>]) -> Finding {
    let mut consequences = consequences.to_vec();
    sort(&mut consequences);
    let first = consequences[0];
    let mut what = format!(
        "{} warns {}, as one does when another rank has ended or failed; why that rank did is not in these logs",
        first.by(),
        first.words()
    );
    if let Some(address) = address_in(&first.warning.text) {
        what.push_str(&format!("; {}", owner_text(view, address)));
    }
    // Errors of the system, of CUDA or of a call do not come from other ranks; some releases do not warn about them.
    let own: Vec<_> = view
        .processes()
        .iter()
        .filter_map(|process| {
            let (place, code) = process.first_error.as_ref()?;
            let own = matches!(code, 1 | 2 | 4 | 5);
            own.then(|| format!("{} (error {code} at {place})", who(&[process])))
        })
        .take(4)
        .collect();
    let warned: BTreeSet<usize> = consequences.iter().filter_map(RankWarning::rank).collect();
    let silent: Vec<usize> = view.groups.first().map_or_else(Vec::new, |group| {
        let all = (0..group.ranks).take(1 << 16);
        all.filter(|rank| !warned.contains(rank)).collect()
    });
    let fix = match silent[..] {
        _ if !own.is_empty() => format!(
            "begin with {}: NCCL failed there without a warning, which closed connections do not make it do",
            own.join(", ")
        ),
        [] => "look for a process that was killed (nccl-doctor reads the kernel's log of its host: OOM killer, Xid), and at what each rank \
               printed last".to_owned(),
        _ => format!(
            "{} warned about nothing: look at what they printed last, and for how they ended (nccl-doctor reads the kernel's log of a \
             host: OOM killer, Xid)",
            numbered(&silent)
        ),
    };
    finding(
        Finding::error("log-consequence", what).fix(fix),
        &consequences,
    )
}

/// Warnings of unknown kinds.
fn others(mut unknown: Vec<RankWarning<'_>>, findings: &mut Vec<Finding>) {
    sort(&mut unknown);
    let mut by_place: Vec<Vec<RankWarning<'_>>> = Vec::new();
    for one in unknown {
        // Warnings from one place in the source differ in numbers only.
        let same = |warnings_of: &Vec<RankWarning<'_>>| {
            let (first, place) = (warnings_of[0].warning, &one.warning.place);
            first.text == one.warning.text || (!place.is_empty() && first.place == *place)
        };
        match by_place.iter().position(same) {
            Some(at) => by_place[at].push(one),
            None if by_place.len() < MOST_FINDINGS => by_place.push(vec![one]),
            None => {}
        }
    }
    for warnings_of in by_place {
        let mut what = format!("{} warns {}", warnings_of[0].by(), warnings_of[0].words());
        if warnings_of.len() > 1 {
            what.push_str(&format!(", and {} more times", warnings_of.len() - 1));
        }
        findings.push(finding(Finding::warning("log-warning", what), &warnings_of));
    }
}

/// Communicators whose start did not complete, and ranks that are not in the logs.
pub(super) fn starts(view: &LogView<'_>, findings: &mut Vec<Finding>) {
    let explained = findings.iter().any(|one| one.severity == Severity::Error);
    let mut came_up = 0;
    let mut incomplete = 0;
    for group in &view.groups {
        let waiting: Vec<_> = group
            .members
            .iter()
            .filter(|(_, one)| {
                // A rank that gave up waiting had not completed its start, either.
                !one.came_up() && matches!(one.ended, None | Some(Ended::Aborted))
            })
            .collect();
        if waiting.is_empty() {
            came_up += 1;
            continue;
        }
        incomplete += 1;
        if incomplete <= MOST_FINDINGS {
            let waiting: Vec<_> = waiting.iter().map(|(p, one)| (*p, one.rank)).collect();
            findings.push(waits(group, &waiting, explained));
        }
    }
    let Some(world) = view.groups.first() else {
        return;
    };
    let missing = world.missing();
    if incomplete == 0 {
        if !missing.is_empty() {
            let what = format!(
                "of the {} ranks of communicator {}, {} are not in these logs, and were not compared",
                world.ranks,
                world.id.unwrap_or("(a split)"),
                ranges(&missing)
            );
            let fix = "give the logs of all ranks, of all hosts";
            findings.push(Finding::warning("log-ranks", what).fix(fix));
        }
        let communicators = if came_up == 1 {
            "communicator"
        } else {
            "communicators"
        };
        let what = format!(
            "{came_up} {communicators}, of up to {} ranks, came up",
            world.ranks
        );
        findings.push(Finding::ok("log-init", what));
    }
    for (process, one) in &world.members {
        if let Some((total, part, seconds)) = &one.init_seconds
            && *total >= SLOW_INIT
        {
            let what = format!(
                "{} took {total:.1} s to start, {seconds:.1} s of them for {part}",
                who(&[*process])
            );
            let fix = match &part[..] {
                "bootstrap" => {
                    "in bootstrap a rank waits for the last one: start them together, and see retries"
                }
                _ => {
                    "compare with the other ranks: is the host or the file system of libnccl slow?"
                }
            };
            findings.push(about(
                Finding::warning("log-slow-init", what).fix(fix),
                &[*process],
            ));
            break;
        }
    }
}

/// Seconds of a start beyond which it is reported.
const SLOW_INIT: f64 = 30.0;

/// `explained`: whether another error gives the reason.
fn waits(group: &CommunicatorRanks<'_>, waiting: &[(&Process, usize)], explained: bool) -> Finding {
    let processes: Vec<_> = waiting.iter().map(|(process, _)| *process).collect();
    let mut here: Vec<usize> = waiting.iter().map(|(_, rank)| *rank).collect();
    here.sort_unstable();
    here.dedup();
    let name = group
        .id
        .map_or("a split".to_owned(), |id| format!("communicator {id}"));
    let missing = group.missing();
    let mut what = format!(
        "{name} of {} ranks did not come up on {}: the logs end, or go on, without Init COMPLETE",
        group.ranks,
        numbered(&here)
    );
    let fix = match (group.id, &missing[..]) {
        (None, _) | (_, []) if explained => "mend what else is wrong first".to_owned(),
        (None, _) | (_, []) => {
            "all of its ranks began, so they wait for each other's connections: look at retries and addresses"
                .to_owned()
        }
        (_, missing) => {
            what.push_str(&format!("; {} never began to", numbered(missing)));
            format!(
                "look at {}: not started, ended before, or still busy with something else (if their logs are \
                 elsewhere, give those as well)",
                numbered(missing)
            )
        }
    };
    let mut finding = about(Finding::error("log-init", what).fix(fix), &processes);
    finding.ranks = here;
    finding
}

/// Communicators that the program aborted, where no other finding gives the reason.
pub(super) fn ends(view: &LogView<'_>, findings: &mut Vec<Finding>) {
    let aborted: Vec<_> = view
        .processes()
        .iter()
        .filter(|process| {
            let mut communicators = process.communicators.iter();
            communicators.any(|one| one.ended == Some(Ended::Aborted))
        })
        .collect();
    if aborted.is_empty() || findings.iter().any(|one| one.severity == Severity::Error) {
        return;
    }
    let what = format!(
        "{} aborted communicators, and NCCL warned about nothing before",
        who(&aborted)
    );
    let fix = "the program gave up waiting, or failed elsewhere: look at what it says itself, on the rank that did so \
               first";
    findings.push(about(
        Finding::warning("log-abort", what).fix(fix),
        &aborted,
    ));
}

/// Connections that needed several attempts.
pub(super) fn retries(view: &LogView<'_>, findings: &mut Vec<Finding>) {
    let mut by_address: BTreeMap<Option<IpAddr>, Vec<(&Process, &Retry)>> = BTreeMap::new();
    for process in view.processes() {
        for retry in &process.retries {
            let tries = by_address.entry(retry.address).or_default();
            tries.push((process, retry));
        }
    }
    for (address, tries) in by_address.into_iter().take(MOST_FINDINGS) {
        let processes: Vec<_> = tries.iter().map(|(process, ..)| *process).collect();
        let times: u64 = tries.iter().map(|(_, retry)| retry.times).sum();
        let reasons: BTreeSet<&str> = tries.iter().map(|(_, retry)| &*retry.reason).collect();
        let reasons: Vec<_> = reasons.into_iter().take(4).collect();
        let to = address.map_or(
            "an address that this release does not name".to_owned(),
            |a| a.to_string(),
        );
        let mut what = format!(
            "{} tried {times} times in vain to connect to {to} ({})",
            who(&processes),
            reasons.join(", ")
        );
        if let Some(address) = address {
            what.push_str(&format!("; {}", owner_text(view, address)));
        }
        let fix = if tries.iter().any(|(_, retry)| retry.is_refused()) {
            "refused: the host is there, and no process listens there (any more): the rank ended, or the address is of an \
             interface that other hosts have as well, like docker0; then set NCCL_SOCKET_IFNAME"
        } else {
            "set NCCL_SOCKET_IFNAME on all hosts to the interface of their common network, and let the firewall \
             pass all ports between them"
        };
        findings.push(about(Finding::warning(CONNECT, what).fix(fix), &processes));
    }
}

//! Which host is to blame where hosts do not reach each other.
//!
//! Every pair that failed is a line between two hosts. The host with the most lines is reported with all of its lines;
//! these are removed, and the rest is examined again. So one host behind a firewall is one finding, however many others
//! cannot reach it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use rustix::io::Errno;

use super::network::{export, listed, suggestion};
use super::view::{FactsView, shortened};
use crate::preflight::bounds::MOST_FINDINGS;
use crate::preflight::interfaces::Rule;
use crate::preflight::reachability::{Failure, PROBE_TIMEOUT, ProbeListener};
use nccl_base::report::{Finding, Severity};

const CHECK: &str = "reachable";

pub(super) fn check(
    view: &FactsView<'_>,
    listeners: &[ProbeListener],
    failures: &[Failure],
    found: &mut Vec<Finding>,
) {
    let before = found.len();
    let ranks = view.ranks().count();
    let listeners: Vec<ProbeListener> = listeners
        .iter()
        .filter(|listener| listener.rank < ranks)
        .cloned()
        .collect();
    for listener in listeners
        .iter()
        .filter(|listener| !listener.failed.is_empty())
    {
        // The missing interface is a finding of its own.
        let Some((address, _)) = view.choice(listener.rank) else {
            continue;
        };
        let what = format!(
            "{} cannot listen at {} on {}, where NCCL would: {}",
            view.who(&[listener.rank]),
            address.address,
            address.interface,
            listener.failed
        );
        let finding = Finding::new(severity(view, listener.rank), CHECK, what)
            .fix("choose another interface there (export NCCL_SOCKET_IFNAME=NAME)");
        found.push(view.about(&[listener.rank], finding));
    }
    let lines: Vec<&Failure> = failures
        .iter()
        .filter(|failure| failure.from < ranks && failure.to < ranks)
        .collect();
    for (culprit, own) in culprits(view, &lines) {
        found.push(blame(view, &listeners, culprit, own));
    }
    if found.len() == before && listeners.len() > 1 {
        let ranks: Vec<usize> = listeners.iter().map(|listener| listener.rank).collect();
        let text = format!(
            "{} hosts reach each other at the addresses that NCCL takes",
            listeners.len()
        );
        found.push(view.about(&ranks, Finding::new(Severity::Ok, CHECK, text)));
    }
}

/// How bad it is that NCCL could not listen where a rank advertises, or not be reached there.
fn severity(view: &FactsView<'_>, rank: usize) -> Severity {
    match view.choice(rank) {
        Some((_, Rule::Guess)) => Severity::Warning,
        _ => Severity::Error,
    }
}

/// The lines at one rank that are not yet explained by another rank.
#[derive(Default)]
struct Ends {
    to: usize,
    from: usize,
    /// The places of all its lines.
    lines: Vec<usize>,
}

/// The ranks to blame, each with its lines, the most blamed first; no more than a report has findings.
fn culprits<'l>(view: &FactsView<'_>, lines: &[&'l Failure]) -> Vec<(usize, Vec<&'l Failure>)> {
    let mut ends: BTreeMap<usize, Ends> = BTreeMap::new();
    for (place, line) in lines.iter().enumerate() {
        let to = ends.entry(line.to).or_default();
        to.to += 1;
        to.lines.push(place);
        let from = ends.entry(line.from).or_default();
        from.from += 1;
        from.lines.push(place);
    }
    let suspicious = match lines.is_empty() {
        true => Vec::new(),
        false => suspicious(view),
    };
    let mut is_left = vec![true; lines.len()];
    let mut found = Vec::new();
    while let Some(culprit) = most_blamed(&ends, &suspicious) {
        let places = ends.remove(&culprit).map_or_else(Vec::new, |own| own.lines);
        let own: Vec<&Failure> = places
            .into_iter()
            .filter(|&place| std::mem::take(&mut is_left[place]))
            .map(|place| lines[place])
            .collect();
        // Only the other ends are still there.
        for line in &own {
            if let Some(to) = ends.get_mut(&line.to) {
                to.to -= 1;
            }
            if let Some(from) = ends.get_mut(&line.from) {
                from.from -= 1;
            }
        }
        found.push((culprit, own));
        if found.len() == MOST_FINDINGS {
            break;
        }
    }
    found
}

/// The rank with the most lines. Among equals: first a rank that advertises an address that another host has, or one
/// made for containers; then a rank that others do not reach, before a rank that does not reach others.
fn most_blamed(ends: &BTreeMap<usize, Ends>, suspicious: &[bool]) -> Option<usize> {
    ends.iter()
        .filter(|(_, own)| own.to + own.from > 0)
        .max_by_key(|&(&rank, own)| (own.to + own.from, suspicious[rank], own.to, Reverse(rank)))
        .map(|(&rank, _)| rank)
}

/// For each rank, whether it advertises an address that another network has too, or one made for containers.
fn suspicious(view: &FactsView<'_>) -> Vec<bool> {
    // The first network that has an address, and whether another one has it.
    let mut owners: HashMap<IpAddr, (usize, bool)> = HashMap::new();
    for (rank, process) in view.processes() {
        let Some(network) = view.network(rank) else {
            continue;
        };
        for own in &process.addresses {
            owners
                .entry(own.address)
                .and_modify(|(first, is_shared)| *is_shared |= *first != network)
                .or_insert((network, false));
        }
    }
    let ranks = view.ranks().map(|rank| {
        view.choice(rank).is_some_and(|(address, rule)| {
            let owner = owners.get(&address.address);
            owner.is_some_and(|&(_, is_shared)| is_shared)
                || matches!(
                    rule,
                    Rule::Docker | Rule::Loopback | Rule::Virtual | Rule::Guess
                )
        })
    });
    ranks.collect()
}

fn blame(
    view: &FactsView<'_>,
    listeners: &[ProbeListener],
    culprit: usize,
    lines: Vec<&Failure>,
) -> Finding {
    let process = view.process(culprit);
    let host = view.host(culprit);
    // Applies to all ranks of its network.
    let network = view.network(culprit);
    let ranks: Vec<usize> = view
        .ranks()
        .filter(|&rank| view.network(rank) == network)
        .collect();
    let worst = lines.iter().map(|line| severity(view, line.to)).max();
    let (to, from): (Vec<&Failure>, Vec<&Failure>) =
        lines.into_iter().partition(|line| line.to == culprit);
    let mut parts = Vec::new();
    // The prober of a listener receives the packets.
    type Other = fn(&Failure) -> usize;
    let (there, here): (Other, Other) = (|line| line.to, |line| line.from);
    let kinds = [
        ("unreachable from", &to, false, here),
        ("cannot reach", &from, false, there),
        ("gets no large packets from", &from, true, there),
        ("has no large packets come to", &to, true, here),
    ];
    for (words, lines, large, other) in kinds {
        let lines: Vec<&Failure> = lines
            .iter()
            .copied()
            .filter(|line| line.large == large)
            .collect();
        if !lines.is_empty() {
            parts.push(format!(
                "{words} {}",
                reasons(view, listeners, &lines, other)
            ));
        }
    }
    let verb = if ranks.len() == 1 {
        "advertises"
    } else {
        "advertise"
    };
    let advertised = match view.choice(culprit) {
        Some((address, rule)) => format!(
            "{verb} {} on {} ({})",
            address.address,
            address.interface,
            rule.why()
        ),
        None => format!("{verb} nothing"),
    };
    let has = process.map_or_else(String::new, |process| {
        format!("; host {host} has {}", listed(process))
    });
    let what = format!(
        "{} {advertised}: {}{has}",
        view.who(&ranks),
        parts.join(", and ")
    );
    let finding = Finding::new(worst.unwrap_or(Severity::Error), CHECK, what);
    let fix = remedy(view, listeners, culprit, &to, &from);
    view.about(&ranks, finding.fix(fix))
}

/// The hosts at the other ends, by reason.
fn reasons(
    view: &FactsView<'_>,
    listeners: &[ProbeListener],
    lines: &[&Failure],
    other: fn(&Failure) -> usize,
) -> String {
    let mut by_reason: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for line in lines {
        by_reason
            .entry(reason(view, listeners, line))
            .or_default()
            .push(other(line));
    }
    let parts: Vec<String> = by_reason
        .into_iter()
        .map(|(reason, mut ranks)| {
            ranks.sort_unstable();
            let hosts = view.hosts(&ranks);
            let word = if hosts.len() == 1 { "host" } else { "hosts" };
            format!("{word} {} ({reason})", shortened(&hosts))
        })
        .collect();
    parts.join(", ")
}

/// The system's reason, and what it usually means.
fn reason(view: &FactsView<'_>, listeners: &[ProbeListener], line: &Failure) -> String {
    if line.large {
        let listener = listeners.iter().find(|listener| listener.rank == line.to);
        let mtu = listener.map_or(0, |listener| listener.mtu);
        let mtu = if mtu > 0 {
            format!(" of {mtu} bytes")
        } else {
            String::new()
        };
        return format!(
            "small ones pass: something on the way takes less than the MTU{mtu} and does not say so"
        );
    }
    let target = view.choice(line.to);
    let source = view.process(line.from);
    let own = target.zip(source).is_some_and(|((target, _), source)| {
        source
            .addresses
            .iter()
            .any(|own| own.address == target.address)
    });
    if own {
        return String::from("it has this address itself");
    }
    if line.stranger {
        return String::from("another process answers there");
    }
    if line.silent {
        return format!(
            "connected, but the rank did not answer within {:.1} s: it has no CPU time or no file descriptors, or another process \
             listens there",
            PROBE_TIMEOUT.as_secs_f32()
        );
    }
    if line.error == 0 {
        return format!(
            "no answer within {:.1} s: a firewall drops it, or there is no way back",
            PROBE_TIMEOUT.as_secs_f32()
        );
    }
    // Linux has no greater error numbers.
    let Some(number) = i32::try_from(line.error)
        .ok()
        .filter(|&number| number < 4096)
    else {
        return String::from("unknown error");
    };
    let error = std::io::Error::from_raw_os_error(number);
    let error = error.to_string();
    let text = error.split(" (os error").next().unwrap_or(&error);
    let meaning = match Errno::from_raw_os_error(number) {
        Errno::CONNREFUSED => ": a firewall rejects it, or the address belongs to another host",
        Errno::HOSTUNREACH => ": no host has the address, or a firewall or router rejects it",
        Errno::NETUNREACH => ": there is no route to its subnet",
        Errno::ACCESS | Errno::PERM => ": a firewall or route of the host itself forbids it",
        Errno::INVAL => ": a route of the host itself leads nowhere",
        Errno::TIMEDOUT => ": a firewall drops it",
        _ => "",
    };
    format!("{text}{meaning}")
}

fn remedy(
    view: &FactsView<'_>,
    listeners: &[ProbeListener],
    culprit: usize,
    to: &[&Failure],
    from: &[&Failure],
) -> String {
    let host = view.host(culprit);
    if to.iter().chain(from).all(|line| line.large) {
        return narrow(view, listeners, culprit, to, from);
    }
    if to.iter().chain(from).all(|line| line.silent) {
        return String::from(
            "the network lets connections pass: look at the load and the limit of open files (ulimit -n) of the ranks that did not \
             answer",
        );
    }
    if let Some(better) = suggestion(view, culprit) {
        return format!(
            "use {} ({}) on host {host}: {}",
            better.interface,
            better.address,
            export(view, culprit, &better.interface)
        );
    }
    let at = |rank: usize| {
        let listener = listeners.iter().find(|listener| listener.rank == rank);
        let interface = listener.map_or("", |listener| &listener.interface);
        format!("{interface} of host {}", view.host(rank))
    };
    let others = |lines: &[&Failure], other: fn(&Failure) -> usize| {
        let mut ranks: Vec<usize> = lines.iter().map(|line| other(line)).collect();
        ranks.sort_unstable();
        let hosts = view.hosts(&ranks);
        let word = if hosts.len() == 1 { "host" } else { "hosts" };
        format!("{word} {}", shortened(&hosts))
    };
    let limits = view.process(culprit).map(|process| &process.limits);
    let ports = limits.and_then(|limits| limits.first_port.zip(limits.last_port));
    let ports = ports.map_or_else(String::new, |(first, last)| format!(" ({first} to {last})"));
    let ways = match (to.is_empty(), from.is_empty()) {
        (false, _) => format!("from {} to {}", others(to, |line| line.from), at(culprit)),
        _ => format!("from {} to {}", at(culprit), others(from, |line| line.to)),
    };
    format!(
        "let TCP pass {ways}, to any port{ports}: NCCL listens where the system lets it (nft list ruleset and ip \
         route get show what forbids it)"
    )
}

/// Advice where only large packets are lost.
fn narrow(
    view: &FactsView<'_>,
    listeners: &[ProbeListener],
    culprit: usize,
    to: &[&Failure],
    from: &[&Failure],
) -> String {
    let listener = listeners.iter().find(|listener| listener.rank == culprit);
    let interface = listener.map_or("its interface", |listener| &listener.interface);
    let other = from.iter().map(|line| line.to);
    let other = other.chain(to.iter().map(|line| line.from)).min();
    let address = other.and_then(|other| view.choice(other)).map_or_else(
        || String::from("ADDRESS"),
        |(address, _)| address.address.to_string(),
    );
    format!(
        "find what passes (ping -M do -s BYTES {address} on host {host}) and set {interface} of the hosts to it, 28 \
         bytes more (ip link set dev {interface} mtu NUMBER), or let ICMP \"fragmentation needed\" through",
        host = view.host(culprit)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::facts::Facts;
    use crate::preflight::tests::{ranks_on, set, with_addresses};
    use nccl_base::report::Report;

    const REFUSED: u64 = 111;

    /// Three hosts of two ranks, with eth0 in one subnet and docker's interface, which NCCL does not take.
    fn hosts() -> (Vec<Facts>, Vec<ProbeListener>) {
        let mut facts = ranks_on(&["h1", "h1", "h2", "h2", "h3", "h3"]);
        for (rank, facts) in facts.iter_mut().enumerate() {
            let own = format!("10.0.0.{}", rank / 2 + 1);
            with_addresses(facts, &[("docker0", "172.17.0.1"), ("eth0", &own)]);
            facts.process.as_mut().unwrap().namespaces.network = format!("net:[{}]", rank / 2);
        }
        let listener = |rank: usize| ProbeListener {
            rank,
            interface: String::from("eth0"),
            at: format!("10.0.0.{}:4000", rank / 2 + 1),
            ..ProbeListener::default()
        };
        (facts, vec![listener(0), listener(2), listener(4)])
    }

    fn failure(from: usize, to: usize, error: u64) -> Failure {
        Failure {
            from,
            to,
            error,
            ..Failure::default()
        }
    }

    fn checked(facts: &[Facts], listeners: &[ProbeListener], failures: &[Failure]) -> Report {
        let mut found = Vec::new();
        check(&FactsView::of(facts), listeners, failures, &mut found);
        Report::new(found)
    }

    #[test]
    fn a_host_behind_a_firewall_is_one_finding_that_names_it_and_how_to_let_it_through() {
        let (facts, listeners) = hosts();
        let report = checked(&facts, &listeners, &[failure(0, 2, 0), failure(4, 2, 0)]);
        let [finding] = &report.findings[..] else {
            panic!("{report}");
        };
        assert_eq!(
            (&finding.ranks[..], &finding.hosts[..]),
            (&[2, 3][..], &["h2".to_owned()][..])
        );
        for words in [
            "ranks 2,3 (h2) advertise 10.0.0.2 on eth0",
            "unreachable from hosts h1, h3 (no answer within 2.5 s: a firewall drops it",
            "let TCP pass from hosts h1, h3 to eth0 of host h2",
        ] {
            assert!(report.to_string().contains(words), "{words:?} in {report}");
        }
    }

    #[test]
    fn a_host_whose_large_packets_are_lost_is_told_apart_from_one_out_of_reach() {
        let (facts, mut listeners) = hosts();
        listeners
            .iter_mut()
            .for_each(|listener| listener.mtu = 9000);
        let lost = |from, to| Failure {
            large: true,
            ..failure(from, to, 0)
        };
        let report = checked(&facts, &listeners, &[lost(2, 0), lost(2, 4), lost(4, 2)]);
        let [finding] = &report.findings[..] else {
            panic!("{report}");
        };
        assert_eq!(finding.hosts, ["h2"]);
        for words in [
            "gets no large packets from hosts h1, h3 (small ones pass: something on the way takes less than the \
             MTU of 9000 bytes and does not say so), and has no large packets come to host h3",
            "ping -M do -s BYTES 10.0.0.1 on host h2",
            "ip link set dev eth0 mtu",
        ] {
            assert!(report.to_string().contains(words), "{words:?} in {report}");
        }
    }

    #[test]
    fn a_rank_that_does_not_answer_is_told_apart_from_another_process_at_its_address() {
        let (facts, listeners) = hosts();
        let silent = |from| Failure {
            silent: true,
            ..failure(from, 2, 0)
        };
        let report = checked(&facts, &listeners, &[silent(0), silent(4)]).to_string();
        for words in [
            "unreachable from hosts h1, h3 (connected, but the rank did not answer within 2.5 s",
            "look at the load and the limit of open files (ulimit -n) of the ranks that did not answer",
        ] {
            assert!(report.contains(words), "{words:?} in {report}");
        }
        let stranger = Failure {
            stranger: true,
            ..failure(0, 2, 0)
        };
        let report = checked(&facts, &listeners, &[stranger]).to_string();
        assert!(report.contains("another process answers there"), "{report}");
    }

    #[test]
    fn a_host_that_neither_reaches_nor_is_reached_is_blamed_for_all_of_it() {
        let (facts, listeners) = hosts();
        let all = [(0, 4), (2, 4), (4, 0), (4, 2)].map(|(from, to)| failure(from, to, REFUSED));
        let report = checked(&facts, &listeners, &all);
        let [finding] = &report.findings[..] else {
            panic!("{report}");
        };
        assert_eq!(finding.hosts, ["h3"]);
        assert!(
            finding
                .what
                .contains("and cannot reach hosts h1, h2 (Connection refused"),
            "{finding}"
        );
    }

    #[test]
    fn an_address_that_every_host_has_is_said_so_and_another_is_offered() {
        let (mut facts, mut listeners) = hosts();
        for facts in &mut facts[2..4] {
            set(facts, "NCCL_SOCKET_IFNAME", "docker");
        }
        listeners[1].at = String::from("172.17.0.1:4000");
        let report = checked(
            &facts,
            &listeners,
            &[failure(0, 2, REFUSED), failure(4, 2, REFUSED)],
        );
        for words in [
            "advertise 172.17.0.1 on docker0 (named by NCCL_SOCKET_IFNAME)",
            "hosts h1, h3 (it has this address itself)",
            "use eth0 (10.0.0.2) on host h2: export NCCL_SOCKET_IFNAME=eth0",
        ] {
            assert!(report.to_string().contains(words), "{words:?} in {report}");
        }
    }

    #[test]
    fn of_two_hosts_the_one_with_the_suspicious_address_is_blamed() {
        let (mut facts, listeners) = hosts();
        let process = facts[0].process.as_mut().unwrap();
        process.addresses.remove(1);
        let both = [failure(0, 2, 0), failure(2, 0, REFUSED)];
        let report = checked(&facts, &listeners[..2], &both);
        assert_eq!(
            report.of(Severity::Error).next().unwrap().hosts,
            ["h1"],
            "{report}"
        );
    }

    #[test]
    fn a_guess_that_is_out_of_reach_is_a_warning() {
        let (mut facts, mut listeners) = hosts();
        for facts in &mut facts[2..4] {
            set(facts, "NCCL_COMM_ID", "head:4000");
        }
        let to_it = [failure(0, 2, REFUSED), failure(4, 2, REFUSED)];
        let report = checked(&facts, &listeners, &to_it);
        assert_eq!(report.worst(), Severity::Warning, "{report}");
        let from_it = [failure(2, 0, REFUSED), failure(2, 4, REFUSED)];
        let report = checked(&facts, &listeners, &from_it);
        assert_eq!(report.worst(), Severity::Error, "{report}");
        listeners[1].failed = String::from("Too many open files");
        let report = checked(&facts, &listeners, &[]);
        assert_eq!(report.worst(), Severity::Warning, "{report}");
        for facts in &mut facts[2..4] {
            facts.process.as_mut().unwrap().meeting = "10.0.0.9".parse().ok();
        }
        let report = checked(&facts, &listeners[..1], &to_it);
        assert_eq!(report.worst(), Severity::Error, "{report}");
    }

    /// Takes many minutes unless the time for each culprit is about proportional to the number of hosts.
    #[test]
    fn a_thousand_hosts_that_do_not_reach_each_other_are_each_named() {
        const HOSTS: usize = 1000;
        const LOCAL: usize = 8;
        let names: Vec<String> = (0..HOSTS * LOCAL)
            .map(|rank| format!("h{}", rank / LOCAL))
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut facts = ranks_on(&names);
        for (rank, facts) in facts.iter_mut().enumerate() {
            let host = rank / LOCAL;
            let own = format!("10.0.{}.{}", host / 250, host % 250 + 1);
            with_addresses(facts, &[("docker0", "172.17.0.1"), ("eth0", &own)]);
        }
        let listeners: Vec<ProbeListener> = (0..HOSTS)
            .map(|host| ProbeListener {
                rank: host * LOCAL,
                ..ProbeListener::default()
            })
            .collect();
        // As many as a rank probes.
        let failures: Vec<Failure> = (0..HOSTS)
            .flat_map(|from| {
                let others = (1..=128).map(move |next| (from + next) % HOSTS);
                others.map(move |to| failure(from * LOCAL, to * LOCAL, 0))
            })
            .collect();
        let report = checked(&facts, &listeners, &failures);
        // Hosts that no line connects are explained by the others: one of 129 in a row.
        let least = HOSTS - HOSTS / 129;
        assert!((least..=HOSTS).contains(&report.of(Severity::Error).count()));
        let first = &report.findings[0];
        assert_eq!(first.ranks, (0..LOCAL).collect::<Vec<_>>());
        assert!(
            first.what.contains("unreachable from hosts h872, h873"),
            "{first}"
        );
    }

    #[test]
    fn hosts_that_reach_each_other_are_fine() {
        let (facts, listeners) = hosts();
        let report = checked(&facts, &listeners, &[]);
        assert!(report.worst() == Severity::Ok && report.findings.len() == 1);
    }

    #[test]
    fn a_door_that_did_not_open_is_an_error_of_its_own() {
        let (facts, mut listeners) = hosts();
        listeners[1].failed = String::from("Too many open files");
        let report = checked(&facts, &listeners, &[]).to_string();
        assert!(
            report.contains("rank 2 (h2) cannot listen at 10.0.0.2 on eth0"),
            "{report}"
        );
    }
}

//! Compares the address that NCCL takes on each host with that of the ranks' own connection.

use std::net::IpAddr;

use super::view::FactsView;
use crate::preflight::facts::ProcessFacts;
use crate::preflight::interfaces::{Address, Rule};
use nccl_base::report::{Finding, Severity};

pub(super) fn check(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let before = found.len();
    nothing_to_take(view, found);
    let several = networks(view) > 1;
    if several {
        families(view, found);
        loopbacks(view, found);
        names(view, found);
        apart(view, found);
    }
    if found.len() == before {
        let ranks: Vec<usize> = view.ranks().collect();
        let groups = view.groups(|rank| {
            let (address, rule) = view.choice(rank)?;
            Some(format!(
                "{} on {} ({})",
                address.address,
                address.interface,
                rule.why()
            ))
        });
        let text = match &groups[..] {
            [(one, _)] => format!("NCCL takes {one}"),
            [(one, of), ..] => format!(
                "NCCL takes an address on every host, {one} for {}",
                view.who(&of[..1])
            ),
            [] => return,
        };
        found.push(view.about(&ranks, Finding::new(Severity::Ok, "interface", text)));
    }
}

/// The number of different networks of the ranks: namespaces or machines.
pub(in crate::preflight) fn networks(view: &FactsView<'_>) -> usize {
    view.groups(|rank| view.network(rank)).len()
}

/// The addresses of a host, for sentences, without loopback and link-local ones.
pub(in crate::preflight) fn listed(process: &ProcessFacts) -> String {
    let leads = |own: &&Address| match own.address {
        IpAddr::V4(address) => !address.is_loopback(),
        IpAddr::V6(address) => !address.is_loopback() && !address.is_unicast_link_local(),
    };
    let texts: Vec<String> = process
        .addresses
        .iter()
        .filter(leads)
        .take(16)
        .map(|own| {
            let down = if own.up { "" } else { " (down)" };
            format!("{} {}{down}", own.interface, own.address)
        })
        .collect();
    match texts.is_empty() {
        true => String::from("no other interface with an address"),
        false => texts.join(", "),
    }
}

/// The line that makes NCCL take an interface on a rank's host: a name that is a prefix of another interface's name
/// needs `=`.
pub(in crate::preflight) fn export(view: &FactsView<'_>, rank: usize, interface: &str) -> String {
    let addresses = view.process(rank).map(|process| &process.addresses);
    let mut names = addresses
        .into_iter()
        .flatten()
        .map(|own| &own.interface[..]);
    let whole = names.any(|name| name != interface && name.starts_with(interface));
    let sign = if whole { "=" } else { "" };
    format!("export NCCL_SOCKET_IFNAME={sign}{interface}")
}

fn nothing_to_take(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let without = view.groups(|rank| {
        let process = view.process(rank)?;
        if view.choice(rank).is_some() {
            return None;
        }
        let settings = process.interface_settings();
        let preference = ["NCCL_COMM_ID", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"]
            .iter()
            .find_map(|name| Some(format!("{name}={}", process.value(name)?)));
        // An address that would match if its interface were up.
        let mut raised = process.addresses.clone();
        raised.iter_mut().for_each(|address| address.up = true);
        let down = crate::preflight::interfaces::choose(&raised, settings);
        let down = down.map(|(address, _)| (address.interface.clone(), address.address));
        Some((settings.is_open(), preference, down, listed(process)))
    });
    for ((is_open, preference, down, listed), ranks) in without {
        let who = view.who(&ranks);
        let hosts = view.hosts(&ranks).join(", ");
        let because = preference
            .as_ref()
            .map_or_else(String::new, |preference| format!(" with {preference}"));
        if is_open {
            let what = format!(
                "{who}: the interface that NCCL takes{because} is not known: /etc/hosts has no single address of \
                 this name, and no interface fits without it; the host has {listed}"
            );
            let finding = Finding::warning("interface", what)
                .fix("write the address into NCCL_COMM_ID, or the name into /etc/hosts");
            found.push(view.about(&ranks, finding));
            continue;
        }
        let (what, fix) = match down {
            Some((interface, address)) => (
                format!(
                    "{who}: NCCL finds no interface{because}: {interface} ({address}) is down; the host has {listed}"
                ),
                format!("ip link set {interface} up on host {hosts}, or name another interface"),
            ),
            None => (
                format!("{who}: NCCL finds no interface{because}; the host has {listed}"),
                match preference {
                    Some(_) => format!("name an interface that host {hosts} has, and that is up"),
                    None => format!(
                        "bring an interface up on host {hosts} (ip link set lo up suffices for one host)"
                    ),
                },
            ),
        };
        found.push(view.about(&ranks, Finding::error("interface", what).fix(fix)));
    }
}

fn families(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let groups = view.groups(|rank| Some(view.choice(rank)?.0.address.is_ipv6()));
    if groups.len() < 2 {
        return;
    }
    let (odd, text) = view.contrast(&groups, |is_v6| {
        String::from(if *is_v6 { "with IPv6" } else { "with IPv4" })
    });
    let what = format!("NCCL takes addresses of different families: {text}");
    let finding = Finding::warning("address-family", what)
        .fix("export NCCL_SOCKET_FAMILY=AF_INET (or AF_INET6) on every rank");
    found.push(view.about(&odd, finding));
}

/// Hosts where NCCL takes an address that only the host itself reaches.
fn loopbacks(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let on_loopback = view.groups(|rank| {
        let process = view.process(rank)?;
        let (address, rule) = view.choice(rank)?;
        address.address.is_loopback().then(|| {
            (
                address.interface.clone(),
                address.address,
                rule == Rule::Guess,
                rule.why(),
                listed(process),
            )
        })
    });
    for ((interface, address, is_guess, why, listed), ranks) in on_loopback {
        let what = format!(
            "{}: NCCL takes {address} on {interface} ({why}), which no other host can reach; the host has {listed}",
            view.who(&ranks)
        );
        let fix = match suggestion(view, ranks[0]) {
            Some(better) => format!("{} there", export(view, ranks[0], &better.interface)),
            None => String::from("bring an interface up that the other hosts can reach"),
        };
        let finding = match is_guess {
            true => Finding::warning("interface", what),
            false => Finding::error("interface", what),
        };
        found.push(view.about(&ranks, finding.fix(fix)));
    }
}

fn names(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    for rank in view.ranks() {
        let Some(process) = view.facts(rank).process.as_ref() else {
            continue;
        };
        let meeting = process
            .value("NCCL_COMM_ID")
            .and_then(crate::preflight::interfaces::meeting_host);
        for name in &process.loopback_names {
            let what = format!(
                "{}: the name {:?} is {} by /etc/hosts line {}, which no other host can reach: what goes by this \
                 name would offer it an address of its own",
                view.who(&[rank]),
                name.name,
                name.address,
                name.line
            );
            let finding = match meeting == Some(&name.name[..]) {
                true => Finding::error("host-name", what),
                false => Finding::warning("host-name", what),
            };
            let own = process
                .control
                .map_or_else(|| String::from("its address"), |own| own.to_string());
            let fix = format!(
                "write {own} in front of {} in /etc/hosts on host {}",
                name.name, process.host
            );
            found.push(view.about(&[rank], finding.fix(fix)));
        }
    }
}

/// Hosts where NCCL takes an interface other than that of the ranks' own connection, without being told to.
fn apart(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let apart = view.groups(|rank| {
        let process = view.process(rank)?;
        let (chosen, rule) = view.choice(rank)?;
        let control = process.control_interface()?;
        let same = chosen.interface == control.interface;
        // A name counts as an instruction, unless the program has named another interface.
        let asked = process.interface.is_some() || rule != Rule::Named;
        let sensible =
            !control.address.is_loopback() && !matches!(rule, Rule::Meeting | Rule::Guess);
        (!same && asked && sensible).then(|| {
            let told = |address: &Address| (address.interface.clone(), address.address);
            (told(control), told(chosen), rule.why())
        })
    });
    for ((control, chosen, why), ranks) in apart {
        let what = format!(
            "{}: the ranks' own connection goes by {} ({}), and NCCL takes {} ({}, {why})",
            view.who(&ranks),
            control.0,
            control.1,
            chosen.0,
            chosen.1
        );
        let finding = Finding::warning("interface", what).fix(format!(
            "{} on host {}, if NCCL is to go there as well",
            export(view, ranks[0], &control.0),
            view.hosts(&ranks).join(", ")
        ));
        found.push(view.about(&ranks, finding));
    }
}

/// A better interface for NCCL on a rank's host, if there is one: that of the ranks' own connection, or one
/// in a subnet that most of the other hosts are in.
pub(in crate::preflight) fn suggestion<'f>(
    view: &FactsView<'f>,
    rank: usize,
) -> Option<&'f Address> {
    let process = view.process(rank)?;
    let network = view.network(rank)?;
    let taken = view.choice(rank).map(|(address, _)| &address.interface);
    let other =
        |own: &&Address| Some(&own.interface) != taken && own.up && !own.address.is_loopback();
    if let Some(control) = process.control_interface().filter(other) {
        return Some(control);
    }
    let score = |own: &&Address| view.taken_near(network, own);
    let best = process
        .addresses
        .iter()
        .filter(other)
        .rev()
        .max_by_key(score)?;
    (score(&best) > 0).then_some(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::facts::{Facts, LoopbackName};
    use crate::preflight::tests::{ranks_on, set, with_addresses};
    use nccl_base::report::Report;

    fn checked(facts: &[Facts]) -> Report {
        let mut found = Vec::new();
        check(&FactsView::of(facts), &mut found);
        Report::new(found)
    }

    #[test]
    fn an_interface_that_is_down_is_said_to_be_down_with_the_line_that_brings_it_up() {
        let mut facts = ranks_on(&["h1", "h2"]);
        with_addresses(&mut facts[0], &[("lo", "127.0.0.1"), ("eth0", "10.0.0.1")]);
        with_addresses(&mut facts[1], &[("lo", "127.0.0.1"), ("eth0", "10.0.0.2")]);
        facts[1].process.as_mut().unwrap().addresses[1].up = false;
        set(&mut facts[1], "NCCL_SOCKET_IFNAME", "eth");
        let report = checked(&facts).to_string();
        for words in [
            "rank 1 (h2): NCCL finds no interface with NCCL_SOCKET_IFNAME=eth: eth0 (10.0.0.2) is down",
            "ip link set eth0 up on host h2",
        ] {
            assert!(report.contains(words), "{words:?} in {report}");
        }
        // Without a name, NCCL takes the loopback, which is worse.
        facts[1].process.as_mut().unwrap().variables.clear();
        let report = checked(&facts).to_string();
        assert!(report.contains("NCCL takes 127.0.0.1 on lo"), "{report}");
        assert!(report.contains("eth0 10.0.0.2 (down)"), "{report}");
    }

    #[test]
    fn an_interface_that_nobody_has_is_said_with_those_there_are() {
        let mut facts = ranks_on(&["h1"]);
        with_addresses(&mut facts[0], &[("eno1", "10.0.0.1")]);
        set(&mut facts[0], "NCCL_SOCKET_IFNAME", "bond0");
        let report = checked(&facts);
        assert_eq!(report.worst(), Severity::Error);
        assert!(
            report.to_string().contains("the host has eno1 10.0.0.1"),
            "{report}"
        );
    }

    #[test]
    fn nccl_apart_from_the_ranks_connection_is_warned_of_with_the_line_to_export() {
        let mut facts = ranks_on(&["h1", "h2"]);
        for (rank, facts) in facts.iter_mut().enumerate() {
            let (a, b) = (
                format!("10.0.0.{}", rank + 1),
                format!("10.9.0.{}", rank + 1),
            );
            with_addresses(facts, &[("eth0", &a), ("ib0", &b)]);
            facts.process.as_mut().unwrap().control = a.parse().ok();
        }
        let report = checked(&facts).to_string();
        assert!(
            report.contains("goes by eth0 (10.0.0.2), and NCCL takes ib0 (10.9.0.2"),
            "{report}"
        );
        assert!(
            report.contains("export NCCL_SOCKET_IFNAME=eth0 on host h2"),
            "{report}"
        );
        // A name that is a prefix of another is written as a whole name.
        let process = facts[1].process.as_mut().unwrap();
        let mut other = process.addresses[1].clone();
        other.interface = String::from("eth00");
        process.addresses.push(other);
        let report = checked(&facts).to_string();
        assert!(
            report.contains("export NCCL_SOCKET_IFNAME==eth0 on host h2"),
            "{report}"
        );
        // A named interface is taken as intended.
        for facts in &mut facts {
            set(facts, "NCCL_SOCKET_IFNAME", "ib0");
        }
        assert!(checked(&facts).worst() == Severity::Ok);
        facts[1].process.as_mut().unwrap().interface = Some(String::from("eth0"));
        assert_eq!(checked(&facts).of(Severity::Warning).count(), 1);
    }

    #[test]
    fn a_host_whose_name_is_its_loopback_is_named_with_the_line_of_the_file() {
        let mut facts = ranks_on(&["h1", "h2"]);
        with_addresses(&mut facts[0], &[("eth0", "10.0.0.1")]);
        with_addresses(&mut facts[1], &[("eth0", "10.0.0.2")]);
        let process = facts[1].process.as_mut().unwrap();
        process.loopback_names = vec![LoopbackName {
            name: String::from("h2"),
            address: String::from("127.0.1.1"),
            line: 2,
        }];
        let report = checked(&facts);
        assert!(
            report
                .to_string()
                .contains("\"h2\" is 127.0.1.1 by /etc/hosts line 2"),
            "{report}"
        );
        assert_eq!(report.worst(), Severity::Warning);
        set(&mut facts[1], "NCCL_COMM_ID", "h2:4000");
        assert_eq!(checked(&facts).worst(), Severity::Error);
    }

    #[test]
    fn what_follows_from_a_meeting_place_without_a_known_address_is_no_error() {
        let mut facts = ranks_on(&["h1", "h2"]);
        with_addresses(&mut facts[0], &[("lo", "127.0.0.1")]);
        with_addresses(&mut facts[1], &[("eth0", "10.0.0.2")]);
        for facts in &mut facts {
            set(facts, "NCCL_COMM_ID", "head:4000");
        }
        set(&mut facts[1], "NCCL_SOCKET_IFNAME", "nope");
        let report = checked(&facts);
        assert_eq!(report.worst(), Severity::Warning, "{report}");
        for words in [
            "NCCL takes 127.0.0.1 on lo (a guess: /etc/hosts has no single address",
            "rank 1 (h2): the interface that NCCL takes with NCCL_COMM_ID=head:4000 is not known",
        ] {
            assert!(report.to_string().contains(words), "{words:?} in {report}");
        }
        // With an address, the names do not count, and the subnet does.
        facts[1].process.as_mut().unwrap().meeting = "10.0.0.9".parse().ok();
        assert_eq!(checked(&facts).findings.len(), 1);
        facts[1].process.as_mut().unwrap().meeting = "10.9.0.9".parse().ok();
        let report = checked(&facts);
        assert_eq!(report.worst(), Severity::Error);
        assert!(
            report
                .to_string()
                .contains("NCCL finds no interface with NCCL_COMM_ID=head:4000"),
            "{report}"
        );
    }

    #[test]
    fn families_that_differ_are_told_apart() {
        let mut facts = ranks_on(&["h1", "h2", "h3"]);
        with_addresses(&mut facts[0], &[("eth0", "10.0.0.1")]);
        with_addresses(&mut facts[1], &[("eth0", "fd00::2")]);
        with_addresses(&mut facts[2], &[("eth0", "10.0.0.3")]);
        let report = checked(&facts).to_string();
        assert!(
            report.contains("rank 1 (h2) with IPv6, the other 2 ranks (h1, h3) with IPv4"),
            "{report}"
        );
    }
}

//! Ranks of three hosts, of which the second differs.

use std::process::{Child, Command};

use super::hosts::Kind::{Cable, Nowhere};
use super::hosts::{Hosts, agreed, contains};

const MEETING: (&str, &str) = ("NCCL_RUN_RENDEZVOUS", "tcp:10.77.0.1:29400");

/// Two ranks on each of three hosts, each with the variables of `more` for its host.
fn ranks(hosts: &Hosts, more: &dyn Fn(usize) -> Vec<(&'static str, &'static str)>) -> Vec<Child> {
    (0..6)
        .map(|rank| {
            let host = rank / 2;
            let mut variables = vec![MEETING];
            variables.extend(more(host));
            hosts.start(host, rank, 6, "check", &variables)
        })
        .collect()
}

fn nothing(_: usize) -> Vec<(&'static str, &'static str)> {
    Vec::new()
}

/// Three hosts with one cable each.
fn plain() -> Option<Hosts> {
    Hosts::new(&[
        &[("eth0", Cable, &["10.77.0.1/24"])],
        &[("eth0", Cable, &["10.77.0.2/24"])],
        &[("eth0", Cable, &["10.77.0.3/24"])],
    ])
}

#[test]
fn hosts_that_reach_each_other_are_fine() {
    let Some(hosts) = plain() else { return };
    let report = agreed(ranks(&hosts, &nothing));
    assert!(!report.contains("error ("), "{report}");
    contains(&report, &["ok (reachable): 3 hosts reach each other"]);
}

#[test]
fn a_host_that_the_environment_did_not_reach_and_whose_first_interface_leads_nowhere_is_named() {
    let hosts = Hosts::new(&[
        &[
            ("br-7", Nowhere, &["172.18.0.1/16"]),
            ("eth0", Cable, &["10.77.0.1/24"]),
        ],
        &[
            ("br-7", Nowhere, &["172.18.0.1/16"]),
            ("ens3", Cable, &["10.77.0.2/24"]),
        ],
        &[
            ("br-7", Nowhere, &["172.18.0.1/16"]),
            ("eth0", Cable, &["10.77.0.3/24"]),
        ],
    ]);
    let Some(hosts) = hosts else { return };
    let report = agreed(ranks(&hosts, &|host| match host {
        1 => Vec::new(),
        _ => vec![("NCCL_SOCKET_IFNAME", "eth0")],
    }));
    contains(
        &report,
        &[
            "the environment did not reach host h2: ranks 2,3 (h2) without NCCL_SOCKET_IFNAME",
            "error (reachable): ranks 2,3 (h2) advertise 172.18.0.1 on br-7",
            "unreachable from hosts h1, h3 (it has this address itself)",
            "use ens3 (10.77.0.2) on host h2: export NCCL_SOCKET_IFNAME=ens3",
        ],
    );
}

#[test]
fn hosts_whose_first_interface_leads_nowhere_are_each_told_which_to_use() {
    let hosts = Hosts::new(&[
        &[
            ("br-7", Nowhere, &["172.18.0.1/16"]),
            ("eth0", Cable, &["10.77.0.1/24"]),
        ],
        &[
            ("br-7", Nowhere, &["172.19.0.1/16"]),
            ("eth0", Cable, &["10.77.0.2/24"]),
        ],
        &[
            ("br-7", Nowhere, &["172.20.0.1/16"]),
            ("eth0", Cable, &["10.77.0.3/24"]),
        ],
    ]);
    let Some(hosts) = hosts else { return };
    let report = agreed(ranks(&hosts, &nothing));
    contains(
        &report,
        &[
            "Network is unreachable: there is no route to its subnet",
            "goes by eth0 (10.77.0.2), and NCCL takes br-7 (172.19.0.1",
            "use eth0",
            "export NCCL_SOCKET_IFNAME=eth0",
        ],
    );
}

#[test]
fn an_interface_that_is_down_is_named_with_the_line_that_brings_it_up() {
    let hosts = Hosts::new(&[
        &[
            ("eth0", Cable, &["10.77.0.1/24"]),
            ("eth1", Cable, &["10.88.0.1/24"]),
        ],
        &[
            ("eth0", Cable, &["10.77.0.2/24"]),
            ("eth1", Cable, &["10.88.0.2/24"]),
        ],
        &[
            ("eth0", Cable, &["10.77.0.3/24"]),
            ("eth1", Cable, &["10.88.0.3/24"]),
        ],
    ]);
    let Some(hosts) = hosts else { return };
    hosts.on(1, "ip link set eth1 down");
    let report = agreed(ranks(&hosts, &|_| vec![("NCCL_SOCKET_IFNAME", "eth1")]));
    contains(
        &report,
        &[
            "ranks 2,3 (h2): NCCL finds no interface with NCCL_SOCKET_IFNAME=eth1: eth1 (10.88.0.2) is down",
            "ip link set eth1 up on host h2",
        ],
    );
}

/// Adds a rule for connections from other hosts; returns false, with a message, without nft.
fn firewall(hosts: &Hosts, host: usize, verdict: &str) -> bool {
    rule(
        hosts,
        host,
        &format!("tcp flags & (syn | ack) == syn {verdict}"),
    )
}

/// Adds a rule for incoming packets of a host; returns false, with a message, without nft.
fn rule(hosts: &Hosts, host: usize, rule: &str) -> bool {
    let made = Command::new("nft").arg("--version").output();
    if !made.is_ok_and(|made| made.status.success()) {
        eprintln!("SKIPPED: a firewall needs nft of nftables");
        return false;
    }
    let rules = format!(
        "add table inet t; add chain inet t c {{ type filter hook input priority 0; }}; add rule inet t c {rule}"
    );
    let output = Command::new("ip")
        .args(["netns", "exec", &hosts.namespace(host), "nft", &rules])
        .output()
        .expect("nft");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{rules}: {said}");
    true
}

#[test]
fn a_firewall_that_drops_is_found_within_seconds() {
    let Some(hosts) = plain() else { return };
    if !firewall(&hosts, 1, "drop") {
        return;
    }
    let report = agreed(ranks(&hosts, &nothing));
    contains(
        &report,
        &[
            "error (reachable): ranks 2,3 (h2) advertise 10.77.0.2 on eth0",
            "unreachable from hosts h1, h3 (no answer within 2.5 s: a firewall drops it",
            "let TCP pass from hosts h1, h3 to eth0 of host h2",
        ],
    );
}

/// As with a tunnel on the path, and a firewall that hides its small MTU from the sender.
#[test]
fn a_way_that_loses_large_packets_is_found_within_seconds() {
    let Some(hosts) = plain() else { return };
    if !rule(&hosts, 1, "meta length > 1400 drop") {
        return;
    }
    // A cable of the kernel passes several packets as one.
    for host in 0..3 {
        hosts.on(host, "ip link set dev eth0 gso_max_segs 1");
    }
    let report = agreed(ranks(&hosts, &nothing));
    contains(
        &report,
        &[
            "error (reachable): ranks 2,3 (h2) advertise 10.77.0.2 on eth0",
            "gets no large packets from hosts h1, h3 (small ones pass: something on the way takes less than the \
             MTU of 1500 bytes and does not say so)",
            "ping -M do -s BYTES 10.77.0.1 on host h2",
        ],
    );
}

#[test]
fn a_firewall_that_rejects_is_told_by_what_it_says() {
    for (verdict, reason) in [
        (
            "reject with tcp reset",
            "Connection refused: a firewall rejects it",
        ),
        (
            "reject with icmpx type admin-prohibited",
            "No route to host",
        ),
    ] {
        let Some(hosts) = plain() else { return };
        if !firewall(&hosts, 1, verdict) {
            return;
        }
        let report = agreed(ranks(&hosts, &nothing));
        contains(
            &report,
            &[
                "ranks 2,3 (h2) advertise 10.77.0.2 on eth0",
                "unreachable from hosts h1, h3",
                reason,
            ],
        );
    }
}

#[test]
fn a_route_of_the_host_itself_that_forbids_the_way_is_blamed_on_that_host() {
    let Some(hosts) = plain() else { return };
    hosts.on(1, "ip route add prohibit 10.77.0.3/32");
    let report = agreed(ranks(&hosts, &nothing));
    contains(
        &report,
        &[
            "error (reachable)",
            "Permission denied: a firewall or route of the host itself forbids it",
        ],
    );
}

#[test]
fn hosts_without_any_ipv4_are_fine() {
    let hosts = Hosts::new(&[
        &[("eth0", Cable, &["fd77::1/64"])],
        &[("ens3", Cable, &["fd77::2/64"])],
    ]);
    let Some(hosts) = hosts else { return };
    let place = ("NCCL_RUN_RENDEZVOUS", "tcp:[fd77::1]:29400");
    let ranks = (0..2).map(|rank| hosts.start(rank, rank, 2, "check", &[place]));
    let report = agreed(ranks.collect());
    assert!(!report.contains("error ("), "{report}");
    contains(&report, &["2 hosts reach each other"]);
}

#[test]
fn a_host_with_another_family_and_a_rank_with_another_release_are_found_between_hosts_too() {
    let hosts = Hosts::new(&[
        &[("eth0", Cable, &["10.77.0.1/24", "fd77::1/64"])],
        &[("eth0", Cable, &["10.77.0.2/24", "fd77::2/64"])],
        &[("eth0", Cable, &["10.77.0.3/24", "fd77::3/64"])],
    ]);
    let Some(hosts) = hosts else { return };
    let report = agreed(ranks(&hosts, &|host| match host {
        1 => vec![
            ("NCCL_SOCKET_FAMILY", "AF_INET6"),
            ("NCCL_EMULATOR_VERSION", "2.29.7"),
        ],
        _ => Vec::new(),
    }));
    contains(
        &report,
        &[
            "ranks 2,3 (h2) with IPv6, the other 4 ranks (h1, h3) with IPv4",
            "ranks 2,3 (h2) loaded NCCL 2.29.7",
            "NCCL_SOCKET_FAMILY=AF_INET6",
        ],
    );
}

//! Bytes from the wire may be anything.

use super::random::facts;
use super::{ranks_on, with_addresses};
use crate::preflight::bounds::{Bounded, LONGEST_LIST, LONGEST_TEXT, MOST_FINDINGS};
use crate::preflight::facts::Facts;
use crate::preflight::reachability::{Failure, ProbeListener};
use nccl_base::report::{Finding, Report, Severity};
use nccl_base::system::env_drift::DriftedVariable;
use nccl_base::system::variables::Variable;
use nccl_base::wire;
use serde::{Deserialize, Serialize};

/// Whether `bytes` decode; a decoded value survives another round trip.
fn again<T>(bytes: &[u8]) -> bool
where
    T: for<'b> Deserialize<'b> + Serialize + PartialEq + std::fmt::Debug,
{
    let Ok(value) = wire::decode::<T>(bytes) else {
        return false;
    };
    assert_eq!(wire::decode::<T>(&wire::encode(&value)), Ok(value));
    true
}

#[test]
fn no_bytes_make_the_decoders_panic_or_keep_more_than_they_were_given() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut seeds: Vec<Vec<u8>> = (0..20).map(|_| wire::encode(&facts(&mut random))).collect();
    let findings = (0..4).map(|number| {
        let mut finding = Finding::warning("check", format!("finding {number}")).fix("do it");
        finding.ranks = vec![1, 2, number];
        finding.hosts = vec![String::from("h")];
        finding
    });
    seeds.push(wire::encode(&Report::new(findings.collect())));
    let failure = Failure {
        source: String::from("10.0.0.1"),
        ..Failure::default()
    };
    seeds.push(wire::encode(&vec![failure; 3]));
    seeds.push(wire::encode(&ProbeListener::default()));
    let mut understood = 0;
    for _ in 0..20_000 {
        let mut bytes = random.choice(&seeds).unwrap().clone();
        for _ in 0..random.usize(0..4) {
            let at = random.usize(..bytes.len());
            match random.u8(..5) {
                0 => bytes[at] ^= 1 << random.u8(..8),
                1 => bytes[at] = *random.choice(&[0, 1, 0x7f, 0x80, 0xff][..]).unwrap(),
                2 => bytes.truncate(at.max(1)),
                3 => bytes.insert(at, random.u8(..)),
                _ => {
                    let other = random.choice(&seeds).unwrap();
                    bytes.splice(at.., other.iter().copied());
                }
            }
        }
        understood += usize::from(again::<Facts>(&bytes));
        understood += usize::from(again::<Report>(&bytes));
        understood += usize::from(again::<Vec<Failure>>(&bytes));
        understood += usize::from(again::<ProbeListener>(&bytes));
    }
    // Otherwise the mutations were too wild to decode.
    assert!(understood > 5_000, "{understood}");
}

#[test]
fn what_is_too_long_is_cut_before_it_is_sent_and_where_it_has_come() {
    let text = || "ü".repeat(LONGEST_TEXT);
    let mut facts = facts(&mut fastrand::Rng::with_seed(8));
    let process = facts.process.get_or_insert_default();
    let variable = Variable {
        name: text(),
        value: text(),
        file: text(),
    };
    let late = DriftedVariable {
        name: text(),
        was: Some(text()),
        is: Some(text()),
    };
    process.variables = vec![variable; LONGEST_LIST + 10];
    process.late = vec![late; LONGEST_LIST + 10];
    process.visible_devices = Some(text());
    process.missing_file = Some(text());
    process.interface = Some(text());
    let process = facts.bounded().process.unwrap_or_default();
    let lists = (process.variables.len(), process.late.len());
    assert_eq!(lists, (LONGEST_LIST, LONGEST_LIST));
    let (variable, late) = (&process.variables[0], &process.late[0]);
    let late = [Some(&late.name), late.was.as_ref(), late.is.as_ref()];
    let single = [
        process.visible_devices.as_ref(),
        process.missing_file.as_ref(),
        process.interface.as_ref(),
    ];
    let texts = [&variable.name, &variable.value, &variable.file].map(Some);
    for cut in late.into_iter().chain(single).chain(texts) {
        assert_eq!(cut.map(String::len), Some(LONGEST_TEXT));
    }

    let mut finding = Finding::warning("check", text()).fix(text());
    finding.hosts = vec![String::from("h"); LONGEST_LIST + 10];
    finding.ranks = (0..LONGEST_LIST * 4).collect();
    let findings = (0..MOST_FINDINGS + 10).map(|number| {
        let mut finding = finding.clone();
        finding.ranks.push(number);
        finding
    });
    let report = Report::new(findings.collect()).bounded();
    assert_eq!(report.findings.len(), MOST_FINDINGS);
    let finding = &report.findings[0];
    assert_eq!(finding.ranks.len(), LONGEST_LIST * 4 + 1);
    assert_eq!(finding.hosts.len(), LONGEST_LIST);
    assert_eq!(finding.what.len(), LONGEST_TEXT);
    assert_eq!(finding.fix.as_ref().map(String::len), Some(LONGEST_TEXT));
}

#[test]
fn the_addresses_that_are_taken_are_kept_of_a_list_that_is_too_long() {
    let services: Vec<String> = (0..600)
        .map(|number| format!("10.96.{}.{}", number / 250, number % 250))
        .collect();
    let mut all: Vec<(&str, &str)> = services
        .iter()
        .map(|address| ("kube-ipvs0", &address[..]))
        .collect();
    let eth1: Vec<String> = (1..=99).map(|number| format!("10.2.0.{number}")).collect();
    all.extend(eth1.iter().map(|address| ("eth1", &address[..])));
    all.extend([("eth0", "10.1.0.1"), ("eth2", "10.3.0.1")]);
    let mut facts = ranks_on(&["h"]);
    with_addresses(&mut facts[0], &all);
    let mut process = facts.remove(0).process.unwrap();
    for own in &mut process.addresses {
        own.up = own.interface != "kube-ipvs0";
    }
    process.control = services.last().and_then(|last| last.parse().ok());
    let variable = |name: &str, value: &str| Variable {
        name: name.to_owned(),
        value: value.to_owned(),
        file: String::new(),
    };
    for (variables, expected) in [
        (vec![], "10.2.0.1"),
        (vec![variable("NCCL_SOCKET_IFNAME", "eth0")], "10.1.0.1"),
        (vec![variable("NCCL_COMM_ID", "10.3.0.9:4000")], "10.3.0.1"),
    ] {
        let mut process = process.clone();
        process.variables = variables;
        let before = process
            .choice()
            .map(|(address, rule)| (address.clone(), rule));
        let facts = Facts {
            process: Some(process),
            ..Facts::default()
        };
        let process = facts.bounded().process.unwrap();
        assert_eq!(process.addresses.len(), LONGEST_LIST);
        let after = process
            .choice()
            .map(|(address, rule)| (address.clone(), rule));
        assert_eq!(after, before);
        assert_eq!(
            after
                .map(|(address, _)| address.address.to_string())
                .as_deref(),
            Some(expected)
        );
        let control = process.control_interface().map(|own| &own.interface[..]);
        assert_eq!(control, Some("kube-ipvs0"));
        // In the order in which the system has them.
        assert_eq!(process.addresses.last().unwrap().interface, "eth2");
    }
}

#[test]
fn a_report_has_the_worst_first_in_whatever_order_it_came() {
    let findings = vec![Finding::ok("a", "x"), Finding::error("b", "y")];
    let report: Report = wire::decode(&wire::encode(&findings)).unwrap();
    let severities = report.findings.iter().map(|finding| finding.severity);
    assert!(severities.eq([Severity::Error, Severity::Ok]));
}

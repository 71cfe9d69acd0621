//! Made-up machines, and tests of all of the preflight.

// The test support of nccl-base is included by path, because it is not exported.
mod codec;
#[path = "../../../../nccl-base/src/system/fake_tree.rs"]
mod fake_tree;
mod random;

use super::facts::{Facts, ProcessFacts};
use super::interfaces::Address;
pub(super) use fake_tree::Tree;
use nccl_base::system::variables::Variable;

/// Sets a variable in the environment of a rank.
pub(super) fn set(facts: &mut Facts, name: &str, value: &str) {
    let variable = Variable {
        name: name.to_owned(),
        value: value.to_owned(),
        file: String::new(),
    };
    facts.process.as_mut().unwrap().variables.push(variable);
}

/// Ranks that agree about everything, on these hosts.
pub(super) fn ranks_on(hosts: &[&str]) -> Vec<Facts> {
    hosts
        .iter()
        .enumerate()
        .map(|(rank, host)| Facts {
            protocol: super::facts::PROTOCOL,
            process: Some(ProcessFacts {
                host: (*host).to_owned(),
                pid: 1000 + rank as u64,
                architecture: String::from("x86_64"),
                little_endian: true,
                boot: format!("boot of {host}"),
                ..ProcessFacts::default()
            }),
            ..Facts::default()
        })
        .collect()
}

pub(super) fn with_addresses(facts: &mut Facts, addresses: &[(&str, &str)]) {
    let process = facts.process.as_mut().unwrap();
    let address = |&(interface, address): &(&str, &str)| Address {
        interface: interface.to_owned(),
        address: address.parse().unwrap(),
        prefix: 24,
        scope: 0,
        up: true,
    };
    process.addresses = addresses.iter().map(address).collect();
}

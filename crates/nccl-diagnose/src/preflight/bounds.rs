//! Limits of the texts and lists that travel between ranks: those of a program's environment may have any length.

use std::collections::{BTreeMap, BTreeSet};

use nccl_base::departure::cut;
use nccl_base::report::Report;

use super::facts::{Facts, ProcessFacts};
use super::interfaces::Address;
use crate::host_evidence::bound_devices;

/// Bytes of the longest text: a path.
pub(super) const LONGEST_TEXT: usize = 4096;

/// Entries of the longest list of a fact; lists of ranks have no limit.
pub(super) const LONGEST_LIST: usize = 512;

pub(super) const MOST_FINDINGS: usize = 1024;

/// A value that is cut before it is sent, and after it has been received.
pub(super) trait Bounded {
    fn bounded(self) -> Self;
}

impl Bounded for Facts {
    fn bounded(mut self) -> Self {
        if let Some(library) = &mut self.library {
            let texts = [&mut library.version, &mut library.path].into_iter();
            let texts = texts.chain(&mut library.build_id);
            texts.for_each(|text| cut(text, LONGEST_TEXT));
        }
        if let Some(device) = &mut self.device {
            bound_devices(&mut device.nvml);
        }
        let Some(process) = &mut self.process else {
            return self;
        };
        process.variables.truncate(LONGEST_LIST);
        process.late.truncate(LONGEST_LIST);
        shorten_addresses(process);
        process.loopback_names.truncate(LONGEST_LIST);
        process.ports.truncate(LONGEST_LIST);
        let ports = process.ports.iter_mut();
        ports.for_each(|port| port.gids.truncate(LONGEST_LIST));
        let variables = process.variables.iter_mut();
        let variables = variables.flat_map(|one| [&mut one.name, &mut one.value, &mut one.file]);
        let late = process.late.iter_mut();
        let late = late.flat_map(|one| {
            let values = one.was.iter_mut().chain(&mut one.is);
            values.chain([&mut one.name])
        });
        let single = [
            &mut process.missing_file,
            &mut process.visible_devices,
            &mut process.interface,
        ];
        let texts = variables.chain(late).chain(single.into_iter().flatten());
        texts.for_each(|text| cut(text, LONGEST_TEXT));
        self
    }
}

/// Keeps the addresses that NCCL and the ranks' own connection take, then the first ones of every interface: one
/// interface may have more than all others (kube-ipvs0 has one for each service). The order stays, so that NCCL's rules
/// find the same address as before.
fn shorten_addresses(process: &mut ProcessFacts) {
    if process.addresses.len() <= LONGEST_LIST {
        return;
    }
    let choice = process.choice().map(|(address, _)| address);
    let needed = [choice, process.control_interface()];
    let is_needed = |own: &Address| needed.contains(&Some(own));
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut places: Vec<(usize, usize)> = Vec::new();
    for (place, own) in process.addresses.iter().enumerate() {
        let count = counts.entry(&own.interface).or_default();
        *count += 1;
        places.push((if is_needed(own) { 0 } else { *count }, place));
    }
    places.sort_unstable();
    let kept: BTreeSet<usize> = places
        .into_iter()
        .take(LONGEST_LIST)
        .map(|(_, place)| place)
        .collect();
    let all = std::mem::take(&mut process.addresses).into_iter();
    let kept = all.enumerate().filter(|(place, _)| kept.contains(place));
    process.addresses = kept.map(|(_, own)| own).collect();
}

impl Bounded for Report {
    fn bounded(self) -> Self {
        let mut findings = self.findings.to_vec();
        findings.truncate(MOST_FINDINGS);
        for finding in &mut findings {
            finding.hosts.truncate(LONGEST_LIST);
            let texts = finding.fix.iter_mut().chain([&mut finding.what]);
            texts.for_each(|text| cut(text, LONGEST_TEXT));
        }
        Self::in_order(findings)
    }
}

//! What has to agree on all ranks: the release, and most variables.

use std::collections::BTreeMap;

use nccl_sys::Version;

use super::view::{LogView, about, who};
use crate::debug_log::facts::Process;
use nccl_base::report::Finding;
use nccl_base::system::nccl_variables::{Agreement, agreement};

pub(super) fn versions(view: &LogView<'_>, findings: &mut Vec<Finding>) {
    let mut by_version: BTreeMap<Version, Vec<&Process>> = BTreeMap::new();
    for process in view.processes() {
        if let Some(version) = process.version {
            by_version.entry(version).or_default().push(process);
        }
    }
    for (_, version) in view.log.versions() {
        by_version.entry(*version).or_default();
    }
    let told: Vec<String> = by_version
        .iter()
        .map(|(version, processes)| match processes[..] {
            [] => {
                let logs = view
                    .log
                    .versions()
                    .iter()
                    .filter(|(_, other)| other == version);
                let logs: Vec<_> = logs.map(|(log, _)| &log[..]).take(3).collect();
                format!("{version} (in {})", logs.join(", "))
            }
            _ => format!("{version} on {}", who(processes)),
        })
        .collect();
    match told.len() {
        0 => {}
        1 => {
            let version = by_version.keys().next().expect("there is one");
            let what = format!("all processes that say which NCCL they have loaded have {version}");
            findings.push(Finding::ok("log-version", what));
        }
        _ => {
            let what = format!(
                "the ranks have loaded different releases of NCCL: {}",
                told.join("; ")
            );
            let fix = "make all ranks load the same libnccl: compare the images, LD_LIBRARY_PATH and LD_PRELOAD";
            let most = by_version.values().map(Vec::len).max();
            let odd: Vec<_> = by_version
                .values()
                .filter(|processes| Some(processes.len()) != most)
                .flatten()
                .copied()
                .collect();
            findings.push(about(Finding::error("log-version", what).fix(fix), &odd));
        }
    }
}

/// Variables whose values differ among the processes that log one.
pub(super) fn variables(view: &LogView<'_>, findings: &mut Vec<Finding>) {
    let mut values: BTreeMap<&str, BTreeMap<&str, Vec<&Process>>> = BTreeMap::new();
    for process in view.processes() {
        for (name, value) in &process.variables {
            let by_value = values.entry(name).or_default();
            by_value.entry(value).or_default().push(process);
        }
    }
    for (name, by_value) in values {
        if by_value.len() < 2 {
            continue;
        }
        let severity = match agreement(name) {
            Agreement::Must => Finding::error,
            Agreement::Should => Finding::warning,
            Agreement::PerHost | Agreement::Free => continue,
        };
        let most = by_value.values().map(Vec::len).max();
        let told: Vec<_> = by_value
            .iter()
            .map(|(value, processes)| format!("{value} on {}", who(processes)))
            .take(8)
            .collect();
        let odd: Vec<_> = by_value
            .values()
            .filter(|processes| Some(processes.len()) != most)
            .flatten()
            .copied()
            .collect();
        let what = format!("{name} differs: {}", told.join("; "));
        let fix = format!("give {name} the same value on all ranks, or unset it everywhere");
        findings.push(about(severity("log-variable", what).fix(fix), &odd));
    }
}

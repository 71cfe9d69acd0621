//! Network adapters with RDMA: present on every host or on none, and named correctly.

use super::view::FactsView;
use crate::preflight::facts::ProcessFacts;
use crate::preflight::interfaces::List;
use crate::preflight::rdma::Port;
use nccl_base::report::{Finding, Severity};
use nccl_base::system::variables::number;

pub(super) fn check(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let before = found.len();
    named(view, found);
    addresses(view, found);
    some_without(view, found);
    let usable: usize = view
        .processes()
        .map(|(_, process)| usable(process).len())
        .sum();
    if found.len() == before && usable > 0 {
        let ranks: Vec<usize> = view.ranks().collect();
        let text = "every rank has adapters with RDMA";
        found.push(view.about(&ranks, Finding::new(Severity::Ok, "rdma", text)));
    }
}

fn wanted(process: &ProcessFacts) -> Option<List> {
    let names = process.value("NCCL_IB_HCA")?;
    (!names.is_empty()).then(|| List::parse(names))
}

/// The ports that NCCL may use: active, and in `NCCL_IB_HCA` if that is set.
fn usable(process: &ProcessFacts) -> Vec<&Port> {
    let list = wanted(process);
    let is_wanted = |port: &&Port| {
        let matches = |list: &List| list.matches_port(&port.adapter, Some(port.port));
        list.as_ref().is_none_or(matches)
    };
    if process.is_on("NCCL_IB_DISABLE") {
        return Vec::new();
    }
    process
        .ports
        .iter()
        .filter(|port| port.active)
        .filter(is_wanted)
        .collect()
}

fn listed(process: &ProcessFacts) -> String {
    let texts: Vec<String> = process
        .ports
        .iter()
        .take(16)
        .map(|port| {
            let state = if port.active { "active" } else { "not active" };
            format!("{}:{} ({state})", port.adapter, port.port)
        })
        .collect();
    match texts.is_empty() {
        true => String::from("no adapter at all"),
        false => texts.join(", "),
    }
}

/// Names in `NCCL_IB_HCA` that match no adapter: NCCL does not report these, and uses sockets.
fn named(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let nothing = view.groups(|rank| {
        let process = view.process(rank)?;
        let names = process
            .value("NCCL_IB_HCA")
            .filter(|names| !names.is_empty())?;
        let disabled = process.is_on("NCCL_IB_DISABLE");
        (!disabled && usable(process).is_empty()).then(|| (names.to_owned(), listed(process)))
    });
    for ((names, listed), ranks) in nothing {
        let what = format!(
            "{}: NCCL_IB_HCA={names} names no active adapter, and NCCL goes by sockets there without a word; the \
             host has {listed}",
            view.who(&ranks)
        );
        let finding = Finding::warning("rdma-adapters", what)
            .fix("name an adapter that is active (ibstat), or unset NCCL_IB_HCA");
        found.push(view.about(&ranks, finding));
    }
}

/// An index in `NCCL_IB_GID_INDEX` that a port does not have.
fn addresses(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let without = view.groups(|rank| {
        let process = view.process(rank)?;
        let index = process.value("NCCL_IB_GID_INDEX").and_then(number)?;
        let index = u64::try_from(index).ok()?;
        let port = usable(process)
            .into_iter()
            .find(|port| port.ethernet && !port.gids.is_empty() && !port.gids.contains(&index))?;
        Some((
            index,
            format!("{}:{}", port.adapter, port.port),
            port.gids.clone(),
        ))
    });
    for ((index, port, gids), ranks) in without {
        let gids: Vec<_> = gids.iter().take(16).map(ToString::to_string).collect();
        let what = format!(
            "{}: NCCL_IB_GID_INDEX={index}, and {port} has no address of this number, only {}",
            view.who(&ranks),
            gids.join(", ")
        );
        let finding = Finding::error("rdma-addresses", what).fix(
            "unset NCCL_IB_GID_INDEX, so that NCCL chooses, or take the number of a RoCE v2 address (show_gids)",
        );
        found.push(view.about(&ranks, finding));
    }
}

/// Hosts without RDMA among hosts with it: they cannot communicate.
fn some_without(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let decided = |process: &ProcessFacts| {
        // The user has named the network, and a plugin may bring its own.
        ["NCCL_NET", "NCCL_NET_PLUGIN"]
            .iter()
            .any(|name| process.value(name).is_some())
    };
    if view.processes().any(|(_, process)| decided(process)) {
        return;
    }
    let groups = view.groups(|rank| Some(!usable(view.process(rank)?).is_empty()));
    if groups.len() < 2 {
        return;
    }
    let (odd, text) = view.contrast(&groups, |has| {
        String::from(if *has {
            "with RDMA"
        } else {
            "with no active adapter for RDMA"
        })
    });
    let what = format!(
        "some hosts can do RDMA, and others cannot: {text}; NCCL takes a network per rank, and hangs"
    );
    let finding = Finding::warning("rdma", what).fix(
        "load the adapters' drivers (and pass /dev/infiniband into containers) there, or set NCCL_NET=Socket on \
         every rank",
    );
    found.push(view.about(&odd, finding));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::facts::Facts;
    use crate::preflight::tests::ranks_on;
    use nccl_base::report::Report;
    use nccl_base::system::variables::Variable;

    fn with_ports(hosts: &[&str], ports: &[usize]) -> Vec<Facts> {
        let mut facts = ranks_on(hosts);
        for (facts, &count) in facts.iter_mut().zip(ports) {
            let port = |number| Port {
                adapter: format!("mlx5_{number}"),
                port: 1,
                active: true,
                ethernet: true,
                gids: vec![0, 1, 3],
            };
            facts.process.as_mut().unwrap().ports = (0..count).map(port).collect();
        }
        facts
    }

    fn set(facts: &mut Facts, name: &str, value: &str) {
        facts.process.as_mut().unwrap().variables.push(Variable {
            name: name.to_owned(),
            value: value.to_owned(),
            file: String::new(),
        });
    }

    fn checked(facts: &[Facts]) -> String {
        let mut found = Vec::new();
        check(&FactsView::of(facts), &mut found);
        Report::new(found).to_string()
    }

    #[test]
    fn a_host_without_rdma_among_hosts_with_it_is_named() {
        let facts = with_ports(&["h1", "h2", "h3"], &[2, 0, 2]);
        let text = checked(&facts);
        assert!(
            text.contains("rank 1 (h2) with no active adapter"),
            "{text}"
        );
        let mut facts = with_ports(&["h1", "h2"], &[1, 0]);
        for facts in &mut facts {
            set(facts, "NCCL_NET", "Socket");
        }
        assert!(!checked(&facts).contains("warning"));
        let facts = with_ports(&["h1", "h2"], &[0, 0]);
        assert_eq!(checked(&facts), "");
    }

    #[test]
    fn an_adapter_that_is_misspelt_is_said_with_those_there_are() {
        let mut facts = with_ports(&["h1", "h2"], &[2, 2]);
        set(&mut facts[0], "NCCL_IB_HCA", "mlx5_0,mlx5_1");
        set(&mut facts[1], "NCCL_IB_HCA", "=mlx5_9");
        let text = checked(&facts);
        assert!(
            text.contains("rank 1 (h2): NCCL_IB_HCA==mlx5_9 names no active adapter"),
            "{text}"
        );
        assert!(
            text.contains("mlx5_0:1 (active), mlx5_1:1 (active)"),
            "{text}"
        );
    }

    #[test]
    fn an_address_that_a_port_does_not_have_is_an_error() {
        let mut facts = with_ports(&["h1"], &[1]);
        set(&mut facts[0], "NCCL_IB_GID_INDEX", "3");
        assert!(!checked(&facts).contains("error"));
        set(&mut facts[0], "NCCL_IB_GID_INDEX", "3");
        facts[0].process.as_mut().unwrap().variables[0].value = String::from("5");
        let text = checked(&facts);
        assert!(
            text.contains("mlx5_0:1 has no address of this number, only 0, 1, 3"),
            "{text}"
        );
    }
}

//! Network adapters with RDMA: present on every host or on none, and named correctly.

use super::network::networks;
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

/// Whether ranks are in different networks: within one, NCCL needs no adapter.
fn is_spread(view: &FactsView<'_>) -> bool {
    let has_others = |process: &ProcessFacts| view.size() > view.local_ranks(process);
    let mut processes = view.processes();
    networks(view) > 1 || (view.is_alone() && processes.any(|(_, process)| has_others(process)))
}

/// Whether the variables name another network than NCCL's own with RDMA: sockets, or that of a plugin. `NCCL_NET` selects by
/// name, whichever plugin is loaded.
fn is_elsewhere(process: &ProcessFacts) -> bool {
    let said = |name| process.value(name).filter(|value| !value.is_empty());
    let (chosen, own) = match said("NCCL_NET") {
        Some(network) => (Some(network), "IB"),
        None => (said("NCCL_NET_PLUGIN"), "none"),
    };
    chosen.is_some_and(|chosen| !chosen.eq_ignore_ascii_case(own))
}

/// An index in `NCCL_IB_GID_INDEX` that ports do not have. NCCL looks it up only on a port of a connection, so that it
/// surely fails only where no port has it.
fn addresses(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    if !is_spread(view) {
        return;
    }
    let without = view.groups(|rank| {
        let process = view.process(rank)?;
        if is_elsewhere(process) {
            return None;
        }
        let index = process.value("NCCL_IB_GID_INDEX").and_then(number)?;
        let index = u64::try_from(index).ok()?;
        let ports = usable(process);
        let lacks =
            |port: &&Port| port.ethernet && !port.gids.is_empty() && !port.gids.contains(&index);
        let lacking: Vec<&Port> = ports.iter().copied().filter(lacks).collect();
        let texts: Vec<String> = lacking
            .iter()
            .take(16)
            .map(|port| {
                let gids = port.gids.iter().take(16).map(ToString::to_string);
                let gids = gids.collect::<Vec<_>>().join(", ");
                format!("{}:{} has only {gids}", port.adapter, port.port)
            })
            .collect();
        let is_every = lacking.len() == ports.len();
        (!lacking.is_empty()).then(|| (index, is_every, texts.join("; ")))
    });
    for ((index, is_every, texts), ranks) in without {
        let who = view.who(&ranks);
        let finding = match is_every {
            true => Finding::error(
                "rdma-addresses",
                format!(
                    "{who}: NCCL_IB_GID_INDEX={index}, and no port that NCCL may use has an address of this \
                     number: {texts}"
                ),
            )
            .fix(
                "unset NCCL_IB_GID_INDEX, so that NCCL chooses, or take the number of a RoCE v2 address \
                 (show_gids)",
            ),
            false => Finding::warning(
                "rdma-addresses",
                format!(
                    "{who}: NCCL_IB_GID_INDEX={index}, and some ports that NCCL may use have no address of this \
                     number: {texts}; a connection by such a port fails"
                ),
            )
            .fix(
                "leave these ports out of NCCL_IB_HCA, or unset NCCL_IB_GID_INDEX, so that NCCL chooses",
            ),
        };
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
    use crate::preflight::tests::{ranks_on, set};
    use nccl_base::report::Report;

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

    /// Two hosts with so many ports each, where `NCCL_IB_GID_INDEX` is 5, which none of the ports has.
    fn with_wrong_index(ports: usize) -> Vec<Facts> {
        let mut facts = with_ports(&["h1", "h2"], &[ports, ports]);
        for facts in &mut facts {
            set(facts, "NCCL_IB_GID_INDEX", "5");
        }
        facts
    }

    #[test]
    fn an_address_that_a_port_does_not_have_is_an_error() {
        let mut facts = with_wrong_index(1);
        let text = checked(&facts);
        for words in [
            "error (rdma-addresses): ranks 0 (h1), 1 (h2): NCCL_IB_GID_INDEX=5, and no port",
            "mlx5_0:1 has only 0, 1, 3",
        ] {
            assert!(text.contains(words), "{words:?} in {text}");
        }
        for facts in &mut facts {
            facts.process.as_mut().unwrap().variables[0].value = String::from("3");
        }
        assert!(!checked(&facts).contains("rdma-addresses"));
    }

    #[test]
    fn an_address_that_only_some_ports_have_is_a_warning_that_names_the_others() {
        let mut facts = with_wrong_index(2);
        for facts in &mut facts {
            facts.process.as_mut().unwrap().ports[0].gids.push(5);
        }
        let text = checked(&facts);
        assert!(text.contains("warning (rdma-addresses)"), "{text}");
        assert!(
            text.contains("number: mlx5_1:1 has only 0, 1, 3;"),
            "{text}"
        );
        assert!(!text.contains("mlx5_0"), "{text}");
        // Connections may go by InfiniBand, which needs no such address.
        let mut facts = with_wrong_index(2);
        for facts in &mut facts {
            facts.process.as_mut().unwrap().ports[0].ethernet = false;
        }
        assert!(!checked(&facts).contains("error"));
        for facts in &mut facts {
            set(facts, "NCCL_IB_HCA", "mlx5_1");
        }
        assert!(checked(&facts).contains("error (rdma-addresses)"));
    }

    #[test]
    fn an_address_that_no_connection_looks_up_is_not_missed() {
        let facts = with_wrong_index(1);
        let is_missed = |facts: &[Facts]| checked(facts).contains("rdma-addresses");
        assert!(is_missed(&facts) && !is_missed(&facts[..1]));
        for (name, value, expected) in [
            ("NCCL_NET", "Socket", false),
            ("NCCL_NET", "IB", true),
            ("NCCL_NET_PLUGIN", "aws-ofi", false),
            ("NCCL_NET_PLUGIN", "none", true),
        ] {
            let mut facts = facts.clone();
            for facts in &mut facts {
                set(facts, name, value);
            }
            assert_eq!(is_missed(&facts), expected, "{name}={value}");
        }
        let mut both = facts.clone();
        for facts in &mut both {
            set(facts, "NCCL_NET", "IB");
            set(facts, "NCCL_NET_PLUGIN", "aws-ofi");
        }
        assert!(is_missed(&both));
        // Before there is a world, the number of ranks tells whether there are other hosts.
        let alone = |all| {
            let mut found = Vec::new();
            check(&FactsView::alone(&facts[..1], 8, all), &mut found);
            found
                .iter()
                .any(|finding| finding.check == "rdma-addresses")
        };
        assert!(alone(16) && !alone(8));
    }
}

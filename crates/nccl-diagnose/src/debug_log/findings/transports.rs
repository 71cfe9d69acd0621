//! The transports of data, and why they are not the best ones.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::view::{LogView, about, who};
use crate::debug_log::facts::{Link, PluginState, Process, Transport};
use nccl_base::report::Finding;

const COMMON: &str = "set NCCL_SOCKET_IFNAME on all hosts to the interface of their common network (it has to \
    reach every rank: mpirun -x, srun --export=ALL)";

/// Whether an interface has an address that other hosts have as well, or that only the host itself reaches.
fn is_private_to_a_host(name: &str, address: Option<IpAddr>) -> bool {
    let prefixes = ["docker", "virbr", "veth", "br-", "cni", "podman", "lxc"];
    prefixes.iter().any(|prefix| name.starts_with(prefix))
        || name == "lo"
        || address.is_some_and(|address| address.is_loopback())
}

/// The interfaces where the ranks meet: all hosts have to be on one network.
pub(super) fn interfaces(view: &LogView<'_>, findings: &mut Vec<Finding>) {
    let mut by_place: BTreeMap<(&str, Option<[u8; 2]>), Vec<&Process>> = BTreeMap::new();
    let mut isolated = Vec::new();
    for process in view.processes() {
        let Some(endpoint) = &process.bootstrap else {
            continue;
        };
        if is_private_to_a_host(&endpoint.interface, endpoint.address) {
            isolated.push(process);
        }
        let network = endpoint.address.map(|address| match address {
            IpAddr::V4(address) => [address.octets()[0], address.octets()[1]],
            IpAddr::V6(address) => [address.octets()[0], address.octets()[1]],
        });
        by_place
            .entry((&endpoint.interface, network))
            .or_default()
            .push(process);
    }
    let several_hosts = view.hosts().len() > 1 || view.groups.iter().any(|group| group.hosts() > 1);
    if !several_hosts || by_place.is_empty() {
        return;
    }
    let told = |processes: &[&Process]| {
        let endpoint = processes[0].bootstrap.as_ref();
        endpoint.map_or(String::new(), |endpoint| match endpoint.address {
            Some(address) => format!("{} {address}", endpoint.interface),
            None => endpoint.interface.clone(),
        })
    };
    if !isolated.is_empty() {
        let what = format!(
            "{} meets the others at {}, which leads to no other host",
            who(&isolated),
            told(&isolated)
        );
        findings.push(about(
            Finding::error("log-interface", what).fix(COMMON),
            &isolated,
        ));
        return;
    }
    let networks: BTreeSet<_> = by_place.keys().map(|(_, network)| *network).collect();
    let most = by_place.values().map(Vec::len).max();
    if networks.len() > 1 {
        let places: Vec<_> = by_place
            .values()
            .map(|processes| format!("{} at {}", who(processes), told(processes)))
            .take(8)
            .collect();
        let odd: Vec<_> = by_place
            .values()
            .filter(|processes| Some(processes.len()) != most)
            .flatten()
            .copied()
            .collect();
        let what = format!(
            "the ranks meet on different networks: {}",
            places.join("; ")
        );
        findings.push(about(
            Finding::warning("log-interface", what).fix(COMMON),
            &odd,
        ));
        return;
    }
    let names: BTreeSet<_> = by_place.keys().map(|(name, _)| *name).collect();
    let names: Vec<_> = names.into_iter().take(8).collect();
    let what = format!("all hosts meet on one network, at {}", names.join(", "));
    findings.push(Finding::ok("log-interface", what));
}

/// The network between hosts.
pub(super) fn networks(view: &LogView<'_>, findings: &mut Vec<Finding>) {
    let Some(world) = view.groups.first() else {
        // No `Init START` in the logs: there is nothing to compare.
        return;
    };
    let mut by_network: BTreeMap<&str, Vec<&Process>> = BTreeMap::new();
    for (process, one) in &world.members {
        if let Some(network) = &one.network {
            by_network.entry(network).or_default().push(process);
        }
    }
    let mut told = by_network.iter();
    match (told.next(), told.next()) {
        (None, _) => {}
        (Some((network, processes)), None) if *network == "Socket" && world.hosts() > 1 => {
            let what = format!(
                "all ranks, on {} hosts, use sockets for what goes between hosts",
                world.hosts()
            );
            let fix = why_sockets(processes);
            findings.push(about(
                Finding::warning("log-network", what).fix(fix),
                processes,
            ));
        }
        (Some((network, _)), None) => {
            let what = match world.hosts() {
                0 | 1 => format!(
                    "all ranks have chosen network {network}, and need none: they share a host"
                ),
                _ => format!("all ranks use network {network} between hosts"),
            };
            findings.push(Finding::ok("log-network", what));
        }
        (Some(_), Some(_)) => {
            let parts: Vec<_> = by_network
                .iter()
                .map(|(network, processes)| format!("{network} on {}", who(processes)))
                .collect();
            let what = format!(
                "the ranks have chosen different networks, and cannot talk: {}",
                parts.join("; ")
            );
            // NCCL uses sockets only if it finds nothing better.
            let odd = by_network
                .get("Socket")
                .or_else(|| by_network.values().min_by_key(|p| p.len()));
            let odd = odd.cloned().unwrap_or_default();
            let fix = why_sockets(&odd);
            findings.push(about(Finding::error("log-network", what).fix(fix), &odd));
        }
    }
}

/// Why these processes use sockets, and how to change that.
fn why_sockets(processes: &[&Process]) -> String {
    let set = |name: &str, wanted: &dyn Fn(&str) -> bool| {
        let value = processes
            .iter()
            .find_map(|process| process.variable(name).filter(|v| wanted(v)));
        value.map(|value| format!("{name}={value}"))
    };
    let forbidden = set("NCCL_IB_DISABLE", &|value| value.trim() != "0")
        .or_else(|| set("NCCL_NET", &|value| value.eq_ignore_ascii_case("socket")));
    if let Some(setting) = forbidden {
        return format!("{setting} asks for that: unset it on {}", who(processes));
    }
    let failed = processes.iter().flat_map(|process| &process.plugins);
    if let Some(plugin) = failed
        .clone()
        .find(|plugin| plugin.state == PluginState::Failed && plugin.kind == "NET")
    {
        return format!(
            "the network plugin cannot be used ({}): install what it needs there",
            plugin.text
        );
    }
    if processes.iter().any(|process| process.no_adapters) {
        let chosen = set("NCCL_IB_HCA", &|_| true);
        let chosen = chosen.map_or(String::new(), |chosen| {
            format!("; {chosen} has to name one that exists")
        });
        return format!(
            "NCCL finds no InfiniBand or RoCE adapter there: ibv_devinfo has to list one, in a container too \
             (--device=/dev/infiniband, libibverbs and the adapter's driver inside){chosen}; in a cloud, its \
             NCCL plugin has to be installed"
        );
    }
    "see with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,ENV why nothing better was found"
        .to_owned()
}

/// Plugins that were requested or found, but are not used.
pub(super) fn plugins(view: &LogView<'_>, findings: &mut Vec<Finding>) {
    let mut failed: BTreeMap<(&str, &str), Vec<&Process>> = BTreeMap::new();
    let mut missing: BTreeMap<&str, Vec<&Process>> = BTreeMap::new();
    for process in view.processes() {
        let internal = ["", "IB", "Socket", "none"];
        let asked = ["NCCL_NET_PLUGIN", "NCCL_NET"].iter().find_map(|name| {
            let value = process.variable(name)?;
            (!internal
                .iter()
                .any(|known| value.eq_ignore_ascii_case(known)))
            .then_some(value)
        });
        let of_network: Vec<_> = process
            .plugins
            .iter()
            .filter(|one| one.kind == "NET")
            .collect();
        let loaded = of_network
            .iter()
            .any(|one| one.state == PluginState::Loaded);
        for plugin in &process.plugins {
            match plugin.state {
                PluginState::Failed if !(plugin.kind == "NET" && loaded) => {
                    failed
                        .entry((&plugin.kind, &plugin.text))
                        .or_default()
                        .push(process);
                }
                PluginState::Missing if plugin.kind == "NET" && !loaded => {
                    if let Some(asked) = asked {
                        missing.entry(asked).or_default().push(process);
                    }
                }
                _ => {}
            }
        }
    }
    for ((kind, text), processes) in failed.into_iter().take(8) {
        let what = format!(
            "{}: the {kind} plugin cannot be used: {text}",
            who(&processes)
        );
        let fix = "see whether its libraries are all there (ldd), and whether it fits this NCCL";
        findings.push(about(
            Finding::warning("log-plugin", what).fix(fix),
            &processes,
        ));
    }
    for (asked, processes) in missing.into_iter().take(8) {
        let what = format!(
            "{}: the network plugin {asked} was asked for, and is not there",
            who(&processes)
        );
        let fix = "install it there, and let LD_LIBRARY_PATH lead to it";
        findings.push(about(
            Finding::error("log-plugin", what).fix(fix),
            &processes,
        ));
    }
}

/// Connections inside hosts that do not go from device to device.
pub(super) fn inside_hosts(view: &LogView<'_>, findings: &mut Vec<Finding>) {
    let (mut by_memory, mut by_network, mut direct) = (
        TransportUse::default(),
        TransportUse::default(),
        TransportUse::default(),
    );
    for (number, group) in view.groups.iter().enumerate() {
        for (process, one) in &group.members {
            for link in one.links.keys() {
                let way = match &link.via {
                    Transport::P2p(_) => &mut direct,
                    Transport::Shm => &mut by_memory,
                    Transport::Net { .. } if group.share_a_host(link.from, link.to) => {
                        &mut by_network
                    }
                    Transport::Net { .. } => continue,
                };
                way.add(number, process, link);
            }
        }
    }
    let all = direct.len() + by_memory.len() + by_network.len();
    if by_memory.len() > 0 {
        let what = format!(
            "{}: {} of {all} connections inside hosts go through the host's memory (SHM), not from device to \
             device: {}",
            who(&by_memory.processes),
            by_memory.len(),
            by_memory.examples()
        );
        let fix = why_not_direct(&by_memory.processes);
        findings.push(about(
            Finding::warning("log-peer-to-peer", what).fix(fix),
            &by_memory.processes,
        ));
    }
    if by_network.len() > 0 {
        let what = format!(
            "{}: {} of {all} connections inside hosts go over the network: {}",
            who(&by_network.processes),
            by_network.len(),
            by_network.examples()
        );
        let fix = "ranks of one host have to see each other's memory: no NCCL_SHM_DISABLE or NCCL_P2P_DISABLE, \
                   containers with one IPC namespace and /dev/shm (--ipc=host), and the same NCCL_HOSTID";
        findings.push(about(
            Finding::warning("log-peer-to-peer", what).fix(fix),
            &by_network.processes,
        ));
    }
    if all > 0 && direct.len() == all {
        let what = format!("all {all} connections inside hosts go from device to device");
        findings.push(Finding::ok("log-peer-to-peer", what));
    }
}

/// Connections with one transport: each once, although both of its ends may log it.
#[derive(Default)]
struct TransportUse<'l> {
    processes: Vec<&'l Process>,
    /// The number of the communicator, and the two ranks.
    pairs: BTreeSet<(usize, usize, usize)>,
}

impl<'l> TransportUse<'l> {
    fn add(&mut self, group: usize, process: &'l Process, link: &Link) {
        let last = self.processes.last();
        if !last.is_some_and(|last| std::ptr::eq(*last, process)) {
            self.processes.push(process);
        }
        self.pairs.insert((group, link.from, link.to));
    }

    fn len(&self) -> usize {
        self.pairs.len()
    }

    fn examples(&self) -> String {
        let pairs = self.pairs.iter().take(4);
        let pairs: Vec<_> = pairs
            .map(|(_, from, to)| format!("{from} to {to}"))
            .collect();
        let more = if self.len() > pairs.len() {
            ", …"
        } else {
            ""
        };
        format!("{}{more}", pairs.join(", "))
    }
}

fn why_not_direct(processes: &[&Process]) -> String {
    for name in ["NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"] {
        let value = processes.iter().find_map(|process| process.variable(name));
        if let Some(value) = value.filter(|value| *value != "0" || name == "NCCL_P2P_LEVEL") {
            return format!(
                "{name}={value} asks for that: unset it to see what the devices can do"
            );
        }
    }
    let reason = processes
        .iter()
        .find_map(|process| process.no_peer_access.first());
    let reason = reason.map_or(String::new(), |text| format!("NCCL says {text:?}; "));
    format!(
        "{reason}nvidia-smi topo -p2p r shows which devices reach each other; PCIe devices behind different CPUs, and \
         most consumer ones, do not; in virtual machines and with PCIe ACS on they cannot; containers need one IPC \
         namespace"
    )
}

/// Adapters that read data from host memory, not from device memory.
pub(super) fn direct_rdma(view: &LogView<'_>, findings: &mut Vec<Finding>) {
    let (mut with, mut without) = (0, 0);
    let mut processes: Vec<&Process> = Vec::new();
    let mut adapters: BTreeSet<&str> = BTreeSet::new();
    for (process, one) in view.groups.iter().flat_map(|group| &group.members) {
        for link in one.links.keys() {
            let Transport::Net { net, adapter, gdr } = &link.via else {
                continue;
            };
            // Sockets never can, and this line says nothing about other plugins.
            if !["IB", "Libfabric", "AWS Libfabric", "UCX"]
                .iter()
                .any(|known| net.starts_with(known))
            {
                continue;
            }
            if *gdr {
                with += 1;
                continue;
            }
            without += 1;
            let name = adapter
                .parse()
                .ok()
                .and_then(|number: usize| process.adapters.get(number));
            adapters.insert(name.unwrap_or(adapter));
            if !processes
                .last()
                .is_some_and(|last| std::ptr::eq(*last, *process))
            {
                processes.push(process);
            }
        }
    }
    // Since 2.32 NCCL writes this line for socket interfaces, too.
    let uses_sockets = |process: &Process| {
        let mut networks = process
            .communicators
            .iter()
            .map(|one| one.network.as_deref());
        networks.any(|network| network == Some("Socket"))
    };
    let others = view.processes().iter();
    for process in others.filter(|process| !uses_sockets(process)) {
        for (adapter, _) in process.direct_rdma.iter().filter(|(_, enabled)| !**enabled) {
            adapters.insert(adapter);
            if without > 0 || with == 0 {
                processes.push(process);
            }
        }
    }
    processes.sort_by_key(|process| std::ptr::from_ref(*process));
    processes.dedup_by_key(|process| std::ptr::from_ref(*process));
    if without == 0 && (with > 0 || processes.is_empty()) {
        if with > 0 {
            let what = "all connections between hosts use GPU Direct RDMA at both ends";
            findings.push(Finding::ok("log-direct-rdma", what));
        }
        return;
    }
    let adapters: Vec<_> = adapters.into_iter().take(8).collect();
    let what = format!(
        "{}: {without} of {} ends of connections between hosts do without GPU Direct RDMA, at {}",
        who(&processes),
        with + without,
        adapters.join(", ")
    );
    let set = [
        "NCCL_NET_GDR_LEVEL",
        "NCCL_IB_CUDA_SUPPORT",
        "NCCL_NET_GDR_READ",
    ]
    .iter()
    .find_map(|name| {
        let value = processes
            .iter()
            .find_map(|process| process.variable(name))?;
        Some(format!("; here {name}={value} is set"))
    });
    let fix = format!(
        "load nvidia-peermem (lsmod), or have a kernel and open driver with DMA-BUF (5.12 and later); \
         NCCL_NET_GDR_LEVEL=SYS allows it for adapters far from the device, too{}",
        set.unwrap_or_default()
    );
    findings.push(about(
        Finding::warning("log-direct-rdma", what).fix(fix),
        &processes,
    ));
}

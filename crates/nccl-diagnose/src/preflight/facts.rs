//! What a rank reports to rank 0 about itself and its host.

use std::net::IpAddr;
use std::str::SplitAsciiWhitespace;

use super::check_input::{CheckInput, Loaded};
use super::device::{self, Device};
use super::interfaces::{self, Address, InterfaceSettings, Rule};
use super::rdma::{self, Port};
use nccl_base::system::System;
use nccl_base::system::env_drift::DriftedVariable;
use nccl_base::system::limits::{self, Limits};
use nccl_base::system::variables::{self, Variable};
use nccl_control::Own;
use serde::{Deserialize, Serialize};

/// The version of the facts' encoding; ranks need the same one to read each other's facts.
pub(super) const PROTOCOL: u64 = 6;

/// The facts of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Facts {
    pub(super) protocol: u64,
    /// Whether this rank requests no checks.
    pub(super) off: bool,
    /// The code of the launch mode that this rank requests.
    pub(super) launch_mode: u64,
    /// `None` for a rank that is a thread of the same process as an earlier rank.
    pub(super) process: Option<ProcessFacts>,
    pub(super) library: Option<Loaded>,
    pub(super) device: Option<Device>,
}

/// A process and its host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessFacts {
    pub(super) host: String,
    pub(super) pid: u64,
    pub(super) architecture: String,
    pub(super) little_endian: bool,
    /// The same for all processes of a machine until it reboots.
    pub(super) boot: String,
    pub(super) namespaces: Namespaces,
    pub(super) variables: Vec<Variable>,
    /// Variables that NCCL has read in this process and that have other values now.
    pub(super) late: Vec<DriftedVariable>,
    /// The value of `NCCL_CONF_FILE`, when that file does not exist.
    pub(super) missing_file: Option<String>,
    pub(super) visible_devices: Option<String>,
    pub(super) addresses: Vec<Address>,
    /// This rank's address of the connection to rank 0.
    pub(super) control: Option<IpAddr>,
    /// The interface that the program named for that connection.
    pub(super) interface: Option<String>,
    /// The address of the name in `NCCL_COMM_ID`, if `/etc/hosts` has one.
    pub(super) meeting: Option<IpAddr>,
    pub(super) loopback_names: Vec<LoopbackName>,
    /// Whether the loaded NCCL is older than 2.28.3, which takes libvirt's interfaces as well.
    pub(super) takes_virtual: bool,
    pub(super) ports: Vec<Port>,
    pub(super) limits: Limits,
}

/// The namespaces of a process, as the kernel numbers them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Namespaces {
    pub(super) network: String,
    pub(super) ipc: String,
    pub(super) pid: String,
    pub(super) user: String,
}

/// A name that `/etc/hosts` resolves to the loopback.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LoopbackName {
    pub(super) name: String,
    pub(super) address: String,
    /// The line of `/etc/hosts`, from 1.
    pub(super) line: u64,
}

/// The connection of this process to the other ranks beside NCCL.
#[derive(Clone, Debug, Default)]
pub(crate) struct ControlConnection {
    pub(crate) address: Option<IpAddr>,
    pub(crate) interface: Option<String>,
}

impl Facts {
    /// The facts of a rank that requests no checks, or whose facts cannot be decoded.
    pub(super) fn off(protocol: u64, host: &str) -> Self {
        Self {
            protocol,
            off: true,
            process: Some(ProcessFacts {
                host: host.to_owned(),
                ..ProcessFacts::default()
            }),
            ..Self::default()
        }
    }

    /// The facts of the rank itself; those of its process are added by the caller.
    pub(super) fn of_rank(input: &CheckInput) -> Self {
        Self {
            protocol: PROTOCOL,
            launch_mode: input.preference.code().into(),
            library: input.library.clone(),
            device: input.stream.as_ref().and_then(device::gather),
            ..Self::default()
        }
    }
}

impl ProcessFacts {
    pub(super) fn gather(system: &System, own: &[Own], control: &ControlConnection) -> Self {
        let namespace = |kind: &str| {
            let link = system.link(format!("/proc/self/ns/{kind}"));
            link.unwrap_or_default()
        };
        let host = system.text("/proc/sys/kernel/hostname");
        let host = host.unwrap_or_else(|| String::from("unknown host"));
        let variables = variables::gather(system);
        let mut names = vec![host.clone()];
        let meeting = variables.iter().find(|v| v.name == "NCCL_COMM_ID");
        let meeting = meeting.and_then(|v| interfaces::meeting_host(&v.value));
        names.extend(meeting.map(str::to_owned));
        names.extend(system.variable("MASTER_ADDR").map(str::to_owned));
        names.dedup();
        let hosts = system.text("/etc/hosts").unwrap_or_default();
        Self {
            meeting: meeting.and_then(|name| only_address(&hosts, name)),
            loopback_names: loopback_names(&hosts, &names),
            host,
            pid: u64::from(std::process::id()),
            architecture: std::env::consts::ARCH.to_owned(),
            little_endian: cfg!(target_endian = "little"),
            boot: system
                .text("/proc/sys/kernel/random/boot_id")
                .unwrap_or_default(),
            namespaces: Namespaces {
                network: namespace("net"),
                ipc: namespace("ipc"),
                pid: namespace("pid"),
                user: namespace("user"),
            },
            missing_file: variables::missing_file(system),
            variables,
            late: Vec::new(),
            visible_devices: system.variable("CUDA_VISIBLE_DEVICES").map(str::to_owned),
            addresses: own.iter().map(Address::of).collect(),
            control: control.address,
            interface: control.interface.clone(),
            takes_virtual: false,
            ports: rdma::gather(system),
            limits: limits::gather(system),
        }
    }

    /// Adds the facts that depend on the library that will be used.
    pub(super) fn with(mut self, input: &CheckInput) -> Self {
        self.takes_virtual = input.takes_virtual;
        for (name, value) in &input.set_variables {
            if self.variable(name).is_none() {
                self.variables.push(Variable {
                    name: name.clone(),
                    value: value.clone(),
                    file: String::from("the interface of the rendezvous"),
                });
            }
        }
        self.variables.sort_by(|a, b| a.name.cmp(&b.name));
        self
    }

    pub(super) fn variable(&self, name: &str) -> Option<&Variable> {
        self.variables.iter().find(|variable| variable.name == name)
    }

    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.variable(name).map(|variable| &variable.value[..])
    }

    /// Whether a variable is a number other than 0.
    pub(super) fn is_on(&self, name: &str) -> bool {
        let number = self.value(name).and_then(variables::number);
        number.is_some_and(|number| number != 0)
    }

    /// The settings by which NCCL chooses an interface.
    pub(super) fn interface_settings(&self) -> InterfaceSettings<'_> {
        InterfaceSettings {
            names: self.value("NCCL_SOCKET_IFNAME"),
            family: self.value("NCCL_SOCKET_FAMILY"),
            meeting: self.value("NCCL_COMM_ID"),
            resolved: self.meeting,
            virtual_too: self.takes_virtual,
        }
    }

    /// The address that NCCL takes on this host.
    pub(super) fn choice(&self) -> Option<(&Address, Rule)> {
        interfaces::choose(&self.addresses, self.interface_settings())
    }

    /// The interface through which this process talks to rank 0.
    pub(super) fn control_interface(&self) -> Option<&Address> {
        let control = self.control?;
        self.addresses.iter().find(|own| own.address == control)
    }

    /// A text that is equal for processes that NCCL takes for processes of one host.
    pub(super) fn nccl_host(&self) -> String {
        match self.value("NCCL_HOSTID") {
            Some(id) => format!("id {id}"),
            None => format!("{} {}", self.host, self.boot),
        }
    }

    /// A text that is equal for processes with the same network.
    pub(super) fn network(&self) -> String {
        format!("{} {}", self.boot, self.namespaces.network)
    }
}

/// The entries of `/etc/hosts`: the line from 1, the address and the names.
fn entries(hosts: &str) -> impl Iterator<Item = (u64, &str, SplitAsciiWhitespace<'_>)> {
    hosts.lines().zip(1..).filter_map(|(line, number)| {
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_ascii_whitespace();
        Some((number, words.next()?, words))
    })
}

/// The address of a name in `/etc/hosts`; `None` also for several, from which the system chooses by its routes.
fn only_address(hosts: &str, name: &str) -> Option<IpAddr> {
    let mut found = entries(hosts).filter_map(|(_, address, mut names)| {
        let is_named = names.any(|own| own.eq_ignore_ascii_case(name));
        let address = address.split('%').next()?.parse::<IpAddr>();
        address.ok().filter(|_| is_named)
    });
    let first = found.next()?;
    found.all(|other| other == first).then_some(first)
}

/// The `names` that `/etc/hosts` resolves to a loopback address.
fn loopback_names(hosts: &str, names: &[String]) -> Vec<LoopbackName> {
    let mut found: Vec<LoopbackName> = Vec::new();
    for (line, address, words) in entries(hosts) {
        let is_loopback = address
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback());
        for word in words {
            let known = found.iter().any(|other| other.name == word);
            // `localhost` is meant to be a loopback address.
            let meant = names.iter().any(|name| name == word) && word != "localhost";
            if is_loopback && meant && !known {
                found.push(LoopbackName {
                    name: word.to_owned(),
                    address: address.to_owned(),
                    line,
                });
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use nccl_base::wire;

    use super::*;
    use crate::preflight::tests::Tree;

    #[test]
    fn a_made_up_machine_is_told_as_it_is() {
        let tree = Tree::new();
        tree.write("proc/sys/kernel/hostname", "node-a\n");
        tree.write("proc/sys/kernel/random/boot_id", "b007\n");
        tree.link("proc/self/ns/net", "net:[7]");
        tree.link("proc/self/ns/ipc", "ipc:[8]");
        tree.write(
            "etc/hosts",
            "127.0.0.1 localhost\n# x\n127.0.1.1 node-a.lan node-a # me\n",
        );
        let variables = [
            ("NCCL_COMM_ID", "localhost:99"),
            ("CUDA_VISIBLE_DEVICES", "3"),
        ];
        let system = System::fake(tree.path(), &variables);
        let process = ProcessFacts::gather(&system, &[], &ControlConnection::default());
        assert_eq!((&process.host[..], &process.boot[..]), ("node-a", "b007"));
        assert_eq!(process.namespaces.network, "net:[7]");
        assert_eq!(process.visible_devices.as_deref(), Some("3"));
        let [name] = &process.loopback_names[..] else {
            panic!("{:?}", process.loopback_names);
        };
        assert_eq!(
            (&name.name[..], &name.address[..], name.line),
            ("node-a", "127.0.1.1", 3)
        );
    }

    #[test]
    fn the_name_of_the_meeting_place_is_looked_up_in_the_hosts_file() {
        let tree = Tree::new();
        tree.write(
            "etc/hosts",
            "127.0.0.1 localhost\n::1 localhost\n# 10.0.0.1 head\n10.0.0.2 head.lan Head # 10.0.0.3\n\
             fe80::1%eth0 near\n10.0.0.2 head\n",
        );
        for (value, expected) in [
            ("head:99", Some("10.0.0.2")),
            ("near:99", Some("fe80::1")),
            // Which of its two addresses the system prefers is not in the file.
            ("localhost:99", None),
            ("elsewhere:99", None),
            ("10.0.0.2:99", None),
        ] {
            let system = System::fake(tree.path(), &[("NCCL_COMM_ID", value)]);
            let process = ProcessFacts::gather(&system, &[], &ControlConnection::default());
            let expected = expected.map(|address| address.parse::<IpAddr>().unwrap());
            assert_eq!(process.meeting, expected, "{value}");
            assert_eq!(process.interface_settings().resolved, expected, "{value}");
        }
    }

    #[test]
    fn what_nccl_is_given_by_the_process_counts_unless_it_is_exported() {
        let tree = Tree::new();
        let input = CheckInput {
            set_variables: vec![
                ("NCCL_SOCKET_IFNAME".into(), "=eth1".into()),
                ("NCCL_SOCKET_FAMILY".into(), "AF_INET".into()),
            ],
            ..CheckInput::default()
        };
        let exported = [("NCCL_SOCKET_FAMILY", "AF_INET6")];
        let system = System::fake(tree.path(), &exported);
        let process = ProcessFacts::gather(&system, &[], &ControlConnection::default());
        let process = process.with(&input);
        assert_eq!(process.value("NCCL_SOCKET_FAMILY"), Some("AF_INET6"));
        let interface = process.variable("NCCL_SOCKET_IFNAME").unwrap();
        assert_eq!(interface.value, "=eth1");
        assert_eq!(interface.origin(), "the interface of the rendezvous");
    }

    #[test]
    fn facts_come_back_as_they_were_and_only_whole() {
        let facts = Facts {
            process: Some(ProcessFacts::gather(
                &System::real(),
                &[],
                &ControlConnection::default(),
            )),
            ..Facts::of_rank(&CheckInput::default())
        };
        let bytes = wire::encode(&facts);
        assert_eq!(wire::decode::<Facts>(&bytes), Ok(facts));
        for end in 0..bytes.len() {
            assert!(wire::decode::<Facts>(&bytes[..end]).is_err(), "{end}");
        }
        let more = [&bytes[..], &[0]].concat();
        assert!(wire::decode::<Facts>(&more).is_err());
    }
}

//! Which address of this host NCCL takes, by NCCL's own rules.

use std::net::{IpAddr, SocketAddr};

use nccl_control::{Own, is_within};
use serde::{Deserialize, Serialize};

/// One address of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Address {
    pub(super) interface: String,
    pub(super) address: IpAddr,
    pub(super) prefix: u64,
    pub(super) scope: u64,
    pub(super) up: bool,
}

impl Address {
    pub(super) fn of(own: &Own) -> Self {
        Self {
            interface: own.name.clone(),
            address: own.address,
            prefix: own.prefix.into(),
            scope: own.scope.into(),
            up: own.up,
        }
    }

    /// Whether `other` is in the subnet of this address.
    pub(super) fn is_near(&self, other: IpAddr) -> bool {
        let most = if self.address.is_ipv4() { 32 } else { 128 };
        let prefix = u8::try_from(self.prefix).unwrap_or(most).min(most);
        is_within(self.address, other, prefix)
    }

    pub(super) fn socket(&self, port: u16) -> SocketAddr {
        match self.address {
            IpAddr::V4(_) => SocketAddr::new(self.address, port),
            IpAddr::V6(address) => {
                let scope = u32::try_from(self.scope).unwrap_or_default();
                std::net::SocketAddrV6::new(address, port, 0, scope).into()
            }
        }
    }
}

/// The settings by which NCCL chooses an interface.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InterfaceSettings<'v> {
    /// `NCCL_SOCKET_IFNAME`.
    pub(super) names: Option<&'v str>,
    /// `NCCL_SOCKET_FAMILY`.
    pub(super) family: Option<&'v str>,
    /// `NCCL_COMM_ID`.
    pub(super) meeting: Option<&'v str>,
    /// The address of the name in `NCCL_COMM_ID`, if that is a name, and its address is known.
    pub(super) resolved: Option<IpAddr>,
    /// Releases before 2.28.3 take libvirt's interfaces for ordinary ones.
    pub(super) virtual_too: bool,
}

impl InterfaceSettings<'_> {
    /// The address in whose subnet NCCL starts, if `NCCL_COMM_ID` decides, and its address is known.
    fn meeting_address(&self) -> Option<IpAddr> {
        meeting_address(self.meeting?).or(self.resolved)
    }

    /// Whether NCCL will look up a name whose address is not known here, so that its choice is not known either.
    pub(super) fn is_open(&self) -> bool {
        let host = self.meeting.and_then(meeting_host);
        host.is_some_and(|host| !host.is_empty()) && self.meeting_address().is_none()
    }
}

/// The rule by which an address was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    Named,
    InfiniBand,
    Meeting,
    First,
    Docker,
    Loopback,
    Virtual,
    /// What the other rules give, where `NCCL_COMM_ID` decides and its address is not known.
    Guess,
}

impl Rule {
    pub(super) fn why(self) -> &'static str {
        match self {
            Self::Named => "named by NCCL_SOCKET_IFNAME",
            Self::InfiniBand => "the first whose name begins with ib",
            Self::Meeting => "in the subnet of NCCL_COMM_ID",
            Self::First => "the first that is neither docker's, libvirt's nor the loopback",
            Self::Docker => "docker's, because there is no other",
            Self::Loopback => "the loopback, because there is no other",
            Self::Virtual => "libvirt's, because there is no other",
            Self::Guess => "a guess: /etc/hosts has no single address of the name in NCCL_COMM_ID",
        }
    }
}

/// The address at which NCCL will listen, if there is one.
pub(super) fn choose<'a>(
    all: &'a [Address],
    interface_settings: InterfaceSettings<'_>,
) -> Option<(&'a Address, Rule)> {
    // NCCL listens in the subnet of `NCCL_COMM_ID`, and nowhere else.
    if let Some(meeting) = interface_settings.meeting_address() {
        let near = |address: &&Address| address.up && address.is_near(meeting);
        return Some((all.iter().find(near)?, Rule::Meeting));
    }
    let (address, rule) = choose_by_name(all, interface_settings)?;
    let is_open = interface_settings.is_open();
    Some((address, if is_open { Rule::Guess } else { rule }))
}

/// The address at which NCCL will listen without `NCCL_COMM_ID`.
fn choose_by_name<'a>(
    all: &'a [Address],
    interface_settings: InterfaceSettings<'_>,
) -> Option<(&'a Address, Rule)> {
    let family = |address: &&Address| match interface_settings.family {
        Some("AF_INET") => address.address.is_ipv4(),
        Some("AF_INET6") => address.address.is_ipv6(),
        _ => true,
    };
    let usable = |address: &&Address| {
        address.up && !(address.address.is_ipv6() && address.address.is_loopback())
    };
    let first = |list: &str| {
        let list = List::parse(list);
        let mut found = all.iter().filter(usable).filter(family);
        found.find(|address| list.matches(&address.interface))
    };
    // NCCL ignores a value of one letter.
    if let Some(names) = interface_settings.names.filter(|names| names.len() > 1) {
        return Some((first(names)?, Rule::Named));
    }
    let others = match interface_settings.virtual_too {
        true => "^docker,lo",
        false => "^docker,lo,virbr",
    };
    [
        ("ib", Rule::InfiniBand),
        (others, Rule::First),
        ("docker", Rule::Docker),
        ("lo", Rule::Loopback),
        ("virbr", Rule::Virtual),
    ]
    .into_iter()
    .find_map(|(list, rule)| Some((first(list)?, rule)))
}

/// The address of `ADDRESS:PORT` or `[IPV6]:PORT`; `None` for a name, whose lookup can take long.
fn meeting_address(text: &str) -> Option<IpAddr> {
    let host = meeting_host(text)?;
    host.split('%').next()?.parse().ok()
}

pub(super) fn meeting_host(text: &str) -> Option<&str> {
    match text.strip_prefix('[') {
        Some(rest) => Some(rest.split_once(']')?.0),
        None => text.split([':', ',']).next(),
    }
}

/// NCCL's lists of names: `eth,ib` for beginnings, `=eth0` for whole names, `^docker` for all others, each
/// with a port behind a colon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct List {
    not: bool,
    whole: bool,
    names: Vec<(String, Option<u64>)>,
}

impl List {
    pub(super) fn parse(text: &str) -> Self {
        let (not, text) = match text.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (whole, text) = match text.strip_prefix('=') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let names = text.split(',').filter_map(|entry| {
            let mut parts = entry.split(':');
            let name = parts.next().filter(|name| !name.is_empty())?;
            let port = parts.next().and_then(|port| port.parse().ok());
            Some((name.to_owned(), port))
        });
        Self {
            not,
            whole,
            names: names.collect(),
        }
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        self.matches_port(name, None)
    }

    /// Whether the list has the port of that adapter. An empty list has all.
    pub(super) fn matches_port(&self, name: &str, port: Option<u64>) -> bool {
        let found = self.names.is_empty()
            || self.names.iter().any(|(wanted, wanted_port)| {
                let named = match self.whole {
                    true => name == wanted,
                    false => name.starts_with(&wanted[..]),
                };
                named && (port.is_none() || wanted_port.is_none() || port == *wanted_port)
            });
        found != self.not
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(all: &[(&str, &str, bool)]) -> Vec<Address> {
        all.iter()
            .map(|&(interface, address, up)| Address {
                interface: interface.to_owned(),
                address: address.parse().unwrap(),
                prefix: 24,
                scope: 0,
                up,
            })
            .collect()
    }

    fn chosen(all: &[Address], names: Option<&str>, meeting: Option<&str>) -> Option<String> {
        let interface_settings = InterfaceSettings {
            names,
            meeting,
            ..InterfaceSettings::default()
        };
        choose(all, interface_settings)
            .map(|(address, _)| format!("{} {}", address.interface, address.address))
    }

    #[test]
    fn an_interface_is_chosen_in_nccls_order() {
        let all = host(&[
            ("lo", "127.0.0.1", true),
            ("docker0", "172.17.0.1", true),
            ("virbr0", "192.168.122.1", true),
            ("eno1", "10.0.0.1", false),
            ("eno2", "10.1.0.1", true),
            ("ib0", "10.9.0.1", true),
        ]);
        let take = |all: &[Address]| chosen(all, None, None).unwrap();
        assert_eq!(take(&all), "ib0 10.9.0.1");
        assert_eq!(take(&all[..5]), "eno2 10.1.0.1");
        assert_eq!(take(&all[..4]), "docker0 172.17.0.1");
        assert_eq!(take(&[all[0].clone(), all[2].clone()]), "lo 127.0.0.1");
        assert_eq!(take(&all[2..4]), "virbr0 192.168.122.1");
        assert_eq!(chosen(&all[3..4], None, None), None);
    }

    #[test]
    fn older_releases_take_libvirts_interfaces_as_well() {
        let all = host(&[("lo", "127.0.0.1", true), ("virbr0", "192.168.122.1", true)]);
        let take = |virtual_too| {
            let interface_settings = InterfaceSettings {
                virtual_too,
                ..InterfaceSettings::default()
            };
            choose(&all, interface_settings)
                .unwrap()
                .0
                .interface
                .clone()
        };
        assert_eq!(
            (take(false), take(true)),
            ("lo".to_owned(), "virbr0".to_owned())
        );
    }

    #[test]
    fn names_are_beginnings_unless_they_are_whole_or_excluded() {
        let all = host(&[
            ("lo", "127.0.0.1", true),
            ("eth1", "10.1.0.1", true),
            ("eth10", "10.2.0.1", true),
            ("ens3", "10.3.0.1", true),
        ]);
        for (names, expected) in [
            ("eth", Some("eth1 10.1.0.1")),
            ("=eth10", Some("eth10 10.2.0.1")),
            ("=eth", None),
            ("^eth,lo", Some("ens3 10.3.0.1")),
            ("^=eth1,lo", Some("eth10 10.2.0.1")),
            ("ib,ens", Some("ens3 10.3.0.1")),
            ("ens3:7", Some("ens3 10.3.0.1")),
            ("nope", None),
            // One letter is ignored.
            ("e", Some("eth1 10.1.0.1")),
            ("", Some("eth1 10.1.0.1")),
        ] {
            assert_eq!(
                chosen(&all, Some(names), None).as_deref(),
                expected,
                "{names:?}"
            );
        }
    }

    #[test]
    fn the_meeting_place_decides_before_everything_else() {
        let all = host(&[("ib0", "10.9.0.1", true), ("eth0", "10.1.0.7", true)]);
        let at = |meeting| chosen(&all, Some("ib0"), Some(meeting));
        assert_eq!(at("10.1.0.200:4000").as_deref(), Some("eth0 10.1.0.7"));
        assert_eq!(at("10.2.0.200:4000"), None);
        assert_eq!(meeting_address("[fe80::1%eth0]:99"), "fe80::1".parse().ok());
        assert_eq!(meeting_host("node-a:99"), Some("node-a"));
    }

    #[test]
    fn a_meeting_place_by_name_decides_once_its_address_is_known_and_is_a_guess_before() {
        let all = host(&[("ib0", "10.9.0.1", true), ("eth0", "10.1.0.7", true)]);
        let take = |meeting, resolved: &str| {
            let interface_settings = InterfaceSettings {
                names: Some("ib0"),
                meeting: Some(meeting),
                resolved: resolved.parse().ok(),
                ..InterfaceSettings::default()
            };
            choose(&all, interface_settings).map(|(address, rule)| (&address.interface[..], rule))
        };
        assert_eq!(
            take("head:4000", "10.1.0.200"),
            Some(("eth0", Rule::Meeting))
        );
        assert_eq!(take("head:4000", "10.2.0.200"), None);
        assert_eq!(take("head:4000", ""), Some(("ib0", Rule::Guess)));
        // An address needs no lookup, and an empty value names no host.
        assert_eq!(take("10.1.0.200:4000", ""), Some(("eth0", Rule::Meeting)));
        assert_eq!(take("", ""), Some(("ib0", Rule::Named)));
    }

    #[test]
    fn the_family_and_the_loopback_of_ipv6_are_looked_at() {
        let all = host(&[
            ("lo", "::1", true),
            ("eth0", "10.1.0.7", true),
            ("eth0", "fd00::7", true),
        ]);
        let family = |family| {
            let interface_settings = InterfaceSettings {
                family: Some(family),
                ..InterfaceSettings::default()
            };
            choose(&all, interface_settings)
                .unwrap()
                .0
                .address
                .to_string()
        };
        assert_eq!(family("AF_INET6"), "fd00::7");
        assert_eq!(family("AF_INET"), "10.1.0.7");
        // NCCL ignores unknown families.
        assert_eq!(family("inet6"), "10.1.0.7");
        assert_eq!(chosen(&all[..1], None, None), None);
    }
}

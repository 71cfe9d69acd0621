//! The address at which a process of a job listens, and its form as text.

use std::fmt;
use std::path::PathBuf;

use super::discovery::DiscoveryHandle;
use super::tcp;

/// The advice in errors about an address that cannot be parsed.
pub(super) const FORMS: &str =
    "write unix:PATH, unix:@NAME, tcp:HOST:PORT, tcp:HOST:FIRST-LAST or tcp:[IPV6]:PORT";

/// An address at which rank 0 listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Path(PathBuf),
    /// A name in the abstract namespace, which disappears with its last socket.
    Abstract(String),
    Tcp(tcp::HostPorts),
}

impl Address {
    /// Parses `unix:PATH`, `unix:@NAME`, `tcp:HOST:PORT` and so on.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if let Some(host_ports) = text.strip_prefix("tcp:").and_then(tcp::HostPorts::parse) {
            return Some(Self::Tcp(host_ports));
        }
        match text.strip_prefix("unix:")? {
            "" | "@" => None,
            name if name.starts_with('@') => Some(Self::Abstract(name[1..].to_owned())),
            path => Some(Self::Path(PathBuf::from(path))),
        }
    }

    /// Returns the interface that was configured for this address.
    pub(super) fn interface(&self) -> Option<String> {
        match self {
            Self::Tcp(host_ports) => host_ports.interface.as_ref().map(ToString::to_string),
            Self::Path(_) | Self::Abstract(_) => None,
        }
    }

    /// Whether the address belongs to this host.
    pub(super) fn is_here(&self) -> bool {
        match self {
            Self::Tcp(host_ports) => host_ports.is_here(),
            Self::Path(_) | Self::Abstract(_) => true,
        }
    }

    /// Returns where the coordinator's address is published, if anywhere.
    pub(super) fn discovery(&self) -> Option<&DiscoveryHandle> {
        match self {
            Self::Tcp(host_ports) => host_ports.discovery.as_ref(),
            Self::Path(_) | Self::Abstract(_) => None,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "unix:{}", path.display()),
            Self::Abstract(name) => write!(f, "unix:@{name}"),
            Self::Tcp(host_ports) => host_ports.fmt(f),
        }
    }
}

/// Returns the first address of a list that no rank could parse.
#[doc(hidden)]
pub fn find_wrong_address(list: &str) -> Option<&str> {
    split(list).find(|one| Address::parse(one).is_none())
}

/// Splits a list of addresses: a comma is a separator only if the following text begins like an address.
#[doc(hidden)]
pub fn split(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let list = rest?;
        let ends = [",tcp:", ",unix:"]
            .into_iter()
            .filter_map(|end| list.find(end));
        match ends.min() {
            Some(at) => {
                rest = Some(&list[at + 1..]);
                Some(&list[..at])
            }
            None => rest.take(),
        }
    })
}

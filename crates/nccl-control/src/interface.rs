//! Choosing one of this host's addresses.

use std::fmt;
use std::io;
use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;

use crate::error::{Error, Result};

/// A selection as configured by the user: an interface, the beginning of its name, a subnet, an address, or all
/// addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Interface {
    Any,
    Address(IpAddr),
    Subnet(IpAddr, u8),
    Name(String),
}

/// One address of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Own {
    pub name: String,
    pub address: IpAddr,
    /// The length of its subnet prefix in bits.
    pub prefix: u8,
    /// The interface index, which a link-local IPv6 address needs.
    pub scope: u32,
    pub up: bool,
}

impl Interface {
    /// Parses `*`, `10.0.0.5`, `10.0.0.0/8`, `fd00::/8`, `eth0` or `eth`.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::rendezvous(format!(
                "interface {text:?} is not understood ({why}): write a name (eth0), the beginning of \
                 one (eth), a subnet (10.0.0.0/8), an address, or * for all"
            ))
        };
        if text == "*" {
            return Ok(Self::Any);
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        if let Some((address, length)) = text.split_once('/') {
            let address: IpAddr = address.parse().map_err(|_| wrong("no address"))?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            let length = length.parse().ok().filter(|&length| length <= most);
            let length = length.ok_or_else(|| wrong("no length of a prefix"))?;
            return Ok(Self::Subnet(address, length));
        }
        if text.is_empty() || text.contains(char::is_whitespace) {
            return Err(wrong("no name"));
        }
        Ok(Self::Name(text.to_owned()))
    }

    /// Chooses the address to listen at, among `own`. Exact names take precedence over prefixes of names, interfaces
    /// that are up over others, IPv4 over IPv6, and all others over link-local addresses.
    pub fn choose<'o>(&self, own: &'o [Own]) -> Result<&'o Own> {
        let rank = |own: &&Own| {
            let exact = matches!(self, Self::Name(name) if *name == own.name);
            (
                !exact,
                !own.up,
                is_link_local(own.address),
                own.address.is_ipv6(),
            )
        };
        let matching = own.iter().filter(|own| self.matches(own)).min_by_key(rank);
        let chosen = matching.ok_or_else(|| {
            Error::rendezvous(format!(
                "no interface of this host matches {self}: it has {}",
                list(own)
            ))
        })?;
        if chosen.up {
            return Ok(chosen);
        }
        Err(Error::rendezvous(format!(
            "interface {} ({}), which matches {self}, is down: bring it up (ip link set {} up), or \
             choose another; this host has {}",
            chosen.name,
            chosen.address,
            chosen.name,
            list(own)
        )))
    }

    fn matches(&self, own: &Own) -> bool {
        match self {
            Self::Any => true,
            Self::Address(address) => *address == own.address,
            Self::Subnet(subnet, length) => is_within(own.address, *subnet, *length),
            Self::Name(name) => own.name.starts_with(&name[..]),
        }
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Address(address) => write!(f, "{address}"),
            Self::Subnet(address, length) => write!(f, "{address}/{length}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// Lists the addresses of this host, for messages.
pub(crate) fn list(own: &[Own]) -> String {
    let texts: Vec<_> = own
        .iter()
        .map(|own| {
            let down = if own.up { "" } else { " (down)" };
            format!("{} {}{down}", own.name, own.address)
        })
        .collect();
    if texts.is_empty() {
        return String::from("none with an address");
    }
    texts.join(", ")
}

pub(crate) fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.segments()[0] & 0xffc0 == 0xfe80,
    }
}

#[doc(hidden)]
pub fn is_within(address: IpAddr, subnet: IpAddr, length: u8) -> bool {
    let (a, b, width) = match (address, subnet) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(a.to_bits()), u128::from(b.to_bits()), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
        _ => return false,
    };
    let drop = width - u32::from(length);
    a.checked_shr(drop).unwrap_or(0) == b.checked_shr(drop).unwrap_or(0)
}

/// Returns every address of this host's interfaces in this process's network namespace.
pub fn own() -> io::Result<Vec<Own>> {
    let running = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING;
    let found = getifaddrs().map_err(io::Error::from)?.filter_map(|entry| {
        let (address, scope) = read(entry.address.as_ref())?;
        let mask = read(entry.netmask.as_ref());
        Some(Own {
            name: entry.interface_name,
            address,
            prefix: mask.map_or(0, |(mask, _)| ones(mask)),
            scope,
            up: entry.flags.contains(running),
        })
    });
    Ok(found.collect())
}

/// Reads an IPv4 or IPv6 address, with its scope.
fn read(address: Option<&SockaddrStorage>) -> Option<(IpAddr, u32)> {
    let address = address?;
    if let Some(address) = address.as_sockaddr_in() {
        return Some((IpAddr::V4(address.ip()), 0));
    }
    let address = address.as_sockaddr_in6()?;
    Some((IpAddr::V6(address.ip()), address.scope_id()))
}

/// Returns the length of the prefix of a network mask.
fn ones(mask: IpAddr) -> u8 {
    let bits = match mask {
        IpAddr::V4(mask) => mask.to_bits().leading_ones(),
        IpAddr::V6(mask) => mask.to_bits().leading_ones(),
    };
    bits as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Vec<Own> {
        [
            ("lo", "127.0.0.1", true),
            ("docker0", "172.17.0.1", true),
            ("eth0", "fe80::1", true),
            ("eth0", "10.1.0.7", true),
            ("eth1", "fd00::7", true),
            ("eth10", "192.168.3.4", true),
            ("ib0", "10.9.0.7", false),
        ]
        .map(|(name, address, up)| Own {
            name: name.to_owned(),
            address: address.parse().unwrap(),
            prefix: 24,
            scope: 0,
            up,
        })
        .to_vec()
    }

    #[test]
    fn an_interface_is_chosen_by_name_beginning_subnet_or_address() {
        for (text, address) in [
            ("eth0", "10.1.0.7"),
            ("eth1", "fd00::7"),
            ("eth", "10.1.0.7"),
            ("doc", "172.17.0.1"),
            ("192.168.0.0/16", "192.168.3.4"),
            ("fd00::/8", "fd00::7"),
            ("0.0.0.0/0", "127.0.0.1"),
            ("127.0.0.1", "127.0.0.1"),
        ] {
            let own = host();
            let chosen = Interface::parse(text).unwrap().choose(&own).unwrap();
            assert_eq!(chosen.address.to_string(), address, "{text}");
        }
    }

    #[test]
    fn what_does_not_match_or_is_down_is_said_with_what_there_is() {
        for (text, words) in [
            ("eth2", &["eth2", "eth0 10.1.0.7", "docker0"][..]),
            ("ib0", &["ib0 (10.9.0.7)", "is down", "ip link set ib0 up"]),
            ("11.0.0.0/8", &["11.0.0.0/8", "no interface"]),
        ] {
            let own = host();
            let error = Interface::parse(text).unwrap().choose(&own);
            let error = error.unwrap_err().to_string();
            for word in words {
                assert!(error.contains(word), "{word:?} in {error:?}");
            }
        }
        for text in ["", "a b", "10.0.0.0/33", "x/8", "fd00::/129"] {
            assert!(Interface::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn this_host_has_a_loopback() {
        let own = own().unwrap();
        let loopback = own.iter().find(|own| own.address.is_loopback()).unwrap();
        assert!([8, 128].contains(&loopback.prefix), "{loopback:?}");
    }
}

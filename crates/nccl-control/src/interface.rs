//! Which of this host's addresses to use.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::error::{Error, Result};

/// What a person names: an interface, the beginning of its name, a subnet, an address, or all of them.
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
    /// How many bits of it are those of its subnet.
    pub prefix: u8,
    /// The number of the interface, which a link-local address of IPv6 needs.
    pub scope: u32,
    pub up: bool,
}

impl Interface {
    /// `*`, `10.0.0.5`, `10.0.0.0/8`, `fd00::/8`, `eth0` or `eth`.
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

    /// The address to listen at, among `own`. A whole name counts before the beginning of one, an
    /// interface that is up before one that is not, IPv4 before IPv6, and anything before a link-local
    /// address.
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

/// The addresses of this host, for sentences.
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

/// Every address of this host's interfaces, as this process's network namespace has them.
pub fn own() -> io::Result<Vec<Own>> {
    let mut first = std::ptr::null_mut();
    // SAFETY: `first` is a valid out-pointer.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: null, or an entry of the list that is freed below.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: the system gives every entry a name.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        // SAFETY: null or a valid address of the entry.
        let Some((address, scope)) = (unsafe { read(entry.ifa_addr) }) else {
            continue;
        };
        // SAFETY: likewise.
        let mask = unsafe { read(entry.ifa_netmask) };
        let running = (libc::IFF_UP | libc::IFF_RUNNING) as u32;
        found.push(Own {
            name: name.to_string_lossy().into_owned(),
            address,
            prefix: mask.map_or(0, |(mask, _)| ones(mask)),
            scope,
            up: entry.ifa_flags & running == running,
        });
    }
    // SAFETY: the list from above, and nothing refers to it any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

/// An address of one of the internet's families, with its scope.
///
/// # Safety
/// `address` is null or points to an address of the family that it begins with.
unsafe fn read(address: *const libc::sockaddr) -> Option<(IpAddr, u32)> {
    // SAFETY: the caller's promise.
    match i32::from(unsafe { address.as_ref() }?.sa_family) {
        libc::AF_INET => {
            // SAFETY: an address of this family has this layout.
            let address = unsafe { &*address.cast::<libc::sockaddr_in>() };
            let address = Ipv4Addr::from_bits(u32::from_be(address.sin_addr.s_addr));
            Some((IpAddr::V4(address), 0))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let address = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            let scope = address.sin6_scope_id;
            Some((Ipv6Addr::from(address.sin6_addr.s6_addr).into(), scope))
        }
        _ => None,
    }
}

/// The length of the prefix that a mask leaves.
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

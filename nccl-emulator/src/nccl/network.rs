//! NCCL's checks of the network before ranks meet. Ranks of one host need no network here, but on a host where NCCL refuses to
//! start, the emulator does so as well.

use std::ffi::CStr;
use std::io;
use std::net::{SocketAddr, TcpListener};

use super::debug::{info, subsystem, warn};
use super::environment;
use crate::code::{INVALID_USAGE, Result, SYSTEM};

/// Checks that `NCCL_SOCKET_IFNAME` selects at least one interface.
pub(crate) fn check_interfaces() -> Result {
    let Some(wanted) = environment::text("NCCL_SOCKET_IFNAME").filter(|text| !text.is_empty())
    else {
        return Ok(());
    };
    info!(
        subsystem::ENV,
        "NCCL_SOCKET_IFNAME set by environment to {wanted}"
    );
    let names = interfaces().map_err(|error| {
        warn!("Bootstrap : the interfaces cannot be listed: {error}");
        SYSTEM
    })?;
    if names.iter().any(|name| is_wanted(&wanted, name)) {
        return Ok(());
    }
    warn!("Bootstrap : no socket interface found");
    Err(INVALID_USAGE)
}

/// Checks that the network named by `NCCL_NET` exists: only sockets do.
pub(crate) fn check_network() -> Result {
    match environment::text("NCCL_NET").filter(|name| !name.is_empty()) {
        Some(name) if !name.eq_ignore_ascii_case("socket") => {
            warn!("Failed to initialize any NET plugin");
            Err(INVALID_USAGE)
        }
        _ => Ok(()),
    }
}

/// Checks that the root can use this address of `NCCL_COMM_ID`: it must belong to this host.
pub(crate) fn check_root(address: SocketAddr) -> Result {
    match TcpListener::bind((address.ip(), 0)) {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            warn!("Call to bind failed: Cannot assign requested address");
            Err(SYSTEM)
        }
        _ => Ok(()),
    }
}

/// Returns the interfaces that have an address.
fn interfaces() -> io::Result<Vec<String>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: the call writes one pointer.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut names = Vec::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: an entry of the list, which is freed below; its name is a C string, and its address is null or valid.
        let (name, family, next) = unsafe {
            let family = match (*at).ifa_addr.is_null() {
                true => 0,
                false => i32::from((*(*at).ifa_addr).sa_family),
            };
            (CStr::from_ptr((*at).ifa_name), family, (*at).ifa_next)
        };
        if matches!(family, libc::AF_INET | libc::AF_INET6) {
            names.push(name.to_string_lossy().into_owned());
        }
        at = next;
    }
    // SAFETY: the list from above, to which no references remain.
    unsafe { libc::freeifaddrs(list) };
    Ok(names)
}

/// Matches NCCL's list: prefixes of names, after `=` whole names; after `^` the excluded ones.
fn is_wanted(list: &str, name: &str) -> bool {
    let (list, exclude) = match list.strip_prefix('^') {
        Some(rest) => (rest, true),
        None => (list, false),
    };
    let (list, exact) = match list.strip_prefix('=') {
        Some(rest) => (rest, true),
        None => (list, false),
    };
    let mut entries = list.split(',').filter(|entry| !entry.is_empty());
    let named = entries.any(|entry| {
        let entry = entry.split(':').next().unwrap_or_default();
        match exact {
            true => name == entry,
            false => name.starts_with(entry),
        }
    });
    named != exclude
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_chosen_as_nccl_chooses_them() {
        for (list, name, wanted) in [
            ("eth", "eth0", true),
            ("=eth", "eth0", false),
            ("=eth0,ib0", "ib0", true),
            ("^eth", "eth0", false),
            ("^docker,lo", "eth0", true),
            ("^=eth", "eth0", true),
            ("eth0:1", "eth0", true),
            ("nope", "eth0", false),
        ] {
            assert_eq!(is_wanted(list, name), wanted, "{list} {name}");
        }
    }

    #[test]
    fn this_machine_has_the_loopback_interface() {
        assert!(interfaces().unwrap().contains(&"lo".to_owned()));
    }

    #[test]
    fn a_root_is_on_this_host() {
        assert_eq!(check_root("127.0.0.1:4000".parse().unwrap()), Ok(()));
        assert_eq!(check_root("192.0.2.1:4000".parse().unwrap()), Err(SYSTEM));
    }
}

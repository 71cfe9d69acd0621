//! Who holds a port that cannot be had, as far as the system tells.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A socket that stands in the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    local: SocketAddr,
    remote: SocketAddr,
    state: u8,
    uid: u32,
    inode: u64,
    process: Option<(u32, String)>,
}

const ESTABLISHED: u8 = 1;
const TIME_WAIT: u8 = 6;
const LISTEN: u8 = 10;

/// Everybody who stands in the way of listening at `wanted`.
pub(super) fn holders(wanted: SocketAddr) -> Vec<Holder> {
    let mut found = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = std::fs::read_to_string(table).unwrap_or_default();
        found.extend(
            text.lines()
                .skip(1)
                .filter_map(parse)
                .filter(|holder| conflicts(holder.local, wanted)),
        );
    }
    // Who listens is what to know first; connections that it accepted follow from it.
    found.sort_by_key(|holder| holder.state != LISTEN);
    found.truncate(4);
    for holder in &mut found {
        holder.process = process(holder.inode);
    }
    found
}

/// One line of `/proc/net/tcp` or `tcp6`.
pub(super) fn parse(line: &str) -> Option<Holder> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let local = socket_address(words.next()?)?;
    let remote = socket_address(words.next()?)?;
    let state = u8::from_str_radix(words.next()?, 16).ok()?;
    let mut words = words.skip(3);
    let uid = words.next()?.parse().ok()?;
    let inode = words.nth(1)?.parse().ok()?;
    Some(Holder {
        local,
        remote,
        state,
        uid,
        inode,
        process: None,
    })
}

/// `0100007F:C350`: words of 32 bits in the order of the machine, and a port.
fn socket_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    if !address.is_ascii() {
        return None;
    }
    let word = |at: usize| {
        let text = address.get(at * 8..at * 8 + 8)?;
        Some(u32::from_str_radix(text, 16).ok()?.to_ne_bytes())
    };
    let address = match address.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (at, chunk) in bytes.chunks_mut(4).enumerate() {
                chunk.copy_from_slice(&word(at)?);
            }
            let address = Ipv6Addr::from(bytes);
            address
                .to_ipv4_mapped()
                .map_or(IpAddr::V6(address), IpAddr::V4)
        }
        _ => return None,
    };
    Some(SocketAddr::new(address, port))
}

fn conflicts(held: SocketAddr, wanted: SocketAddr) -> bool {
    let both = (held.ip(), wanted.ip());
    let same = match both {
        (a, b) if a == b => true,
        (IpAddr::V4(a), IpAddr::V4(b)) => a.is_unspecified() || b.is_unspecified(),
        // The wildcard of IPv6 takes IPv4, too, unless it was told not to, which nobody can see.
        (IpAddr::V6(a), _) => a.is_unspecified() || wanted.ip().is_unspecified(),
        (IpAddr::V4(_), IpAddr::V6(_)) => false,
    };
    held.port() == wanted.port() && same
}

/// The process that has the socket open, where this user may see it.
fn process(inode: u64) -> Option<(u32, String)> {
    if inode == 0 {
        return None;
    }
    let link = format!("socket:[{inode}]");
    let processes = std::fs::read_dir("/proc").ok()?;
    for entry in processes.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let Ok(descriptors) = std::fs::read_dir(entry.path().join("fd")) else {
            continue;
        };
        let has = descriptors
            .flatten()
            .filter_map(|entry| std::fs::read_link(entry.path()).ok())
            .any(|target| target.as_os_str() == link.as_str());
        if has {
            let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            return Some((pid, name.trim().to_owned()));
        }
    }
    None
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = if self.local.ip().is_unspecified() {
            " (all addresses)"
        } else {
            ""
        };
        let owner = match &self.process {
            Some((pid, name)) => format!("pid {pid} ({name})"),
            None => format!(
                "a process of user {} that cannot be seen from here",
                self.uid
            ),
        };
        match self.state {
            LISTEN => write!(
                f,
                "{owner} listens at {}{all}: end it, or choose another port",
                self.local
            ),
            TIME_WAIT => write!(
                f,
                "an ended connection from {} to {} waits there (TIME_WAIT) for up to 60 s: wait, or \
                 choose another port",
                self.local, self.remote
            ),
            ESTABLISHED => write!(
                f,
                "{owner} has a connection from {} to {} there: choose a port outside of \
                 net.ipv4.ip_local_port_range, from which outgoing connections take theirs",
                self.local, self.remote
            ),
            state => write!(
                f,
                "{owner} has a connection from {} to {} there (state {state:02X}): choose another port",
                self.local, self.remote
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_system_are_read() {
        let line = "   0: 0100007F:C350 00000000:0000 0A 00000000:00000000 00:00000000 00000000  \
                    1000        0 4711 1 0000000000000000 100 0 0 10 0";
        let holder = parse(line).unwrap();
        assert_eq!(holder.local, "127.0.0.1:50000".parse().unwrap());
        assert_eq!(
            (holder.state, holder.uid, holder.inode),
            (LISTEN, 1000, 4711)
        );
        let line = "   0: 00000000000000000000000001000000:1F90 \
                    00000000000000000000000000000000:0000 06 0:0 00:0 0 0 0 0 1 0";
        let holder = parse(line).unwrap();
        assert_eq!(holder.local, "[::1]:8080".parse().unwrap());
        assert_eq!(holder.state, TIME_WAIT);
        for broken in [
            "",
            "0:",
            "0: zz:1 0:0 0A",
            "0: 0100007F:C350 00000000:0000 0A 0 0 0 x 0 y",
        ] {
            assert_eq!(parse(broken), None, "{broken}");
        }
    }

    #[test]
    fn who_listens_is_found_with_its_process() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let found = holders(address);
        let text = found[0].to_string();
        let expected = format!("pid {} (", std::process::id());
        assert!(
            text.contains(&expected) && text.contains("listens"),
            "{text}"
        );
        drop(listener);
        assert_eq!(holders(address), []);
    }
}

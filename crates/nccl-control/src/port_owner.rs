//! Which sockets and processes occupy a port that cannot be bound, as far as the system shows.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use procfs::net::{TcpNetEntry, TcpState, tcp, tcp6};
use procfs::process::{FDTarget, Process, all_processes};

/// A socket that prevents binding a port.
#[derive(Clone, Debug)]
pub(super) struct PortOwner {
    socket: TcpNetEntry,
    process: Option<(i32, String)>,
}

/// Returns up to 4 sockets that prevent listening at `wanted`.
pub(super) fn port_owners(wanted: SocketAddr) -> Vec<PortOwner> {
    let tables = [tcp(), tcp6()];
    let sockets = tables.into_iter().flatten().flatten();
    let mut found: Vec<_> = sockets
        .filter(|socket| conflicts(canonical(socket.local_address), wanted))
        .collect();
    // Listeners come first; connections that they accepted follow from them.
    found.sort_by_key(|socket| socket.state != TcpState::Listen);
    found.truncate(4);
    let holder = |socket: TcpNetEntry| {
        let process = process(socket.inode);
        PortOwner { socket, process }
    };
    found.into_iter().map(holder).collect()
}

/// Converts an IPv4-mapped address of an IPv6 socket to its IPv4 form.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn conflicts(held: SocketAddr, wanted: SocketAddr) -> bool {
    let both = (held.ip(), wanted.ip());
    let same = match both {
        (a, b) if a == b => true,
        (IpAddr::V4(a), IpAddr::V4(b)) => a.is_unspecified() || b.is_unspecified(),
        // The IPv6 wildcard includes IPv4 unless IPV6_V6ONLY is set, which another process cannot see.
        (IpAddr::V6(a), _) => a.is_unspecified() || wanted.ip().is_unspecified(),
        (IpAddr::V4(_), IpAddr::V6(_)) => false,
    };
    held.port() == wanted.port() && same
}

/// Returns the process that has the socket open, if this user may see it.
fn process(inode: u64) -> Option<(i32, String)> {
    if inode == 0 {
        return None;
    }
    let has = |process: &Process| {
        let descriptors = process.fd().into_iter().flatten().flatten();
        descriptors
            .map(|descriptor| descriptor.target)
            .any(|target| matches!(target, FDTarget::Socket(found) if found == inode))
    };
    let process = all_processes().ok()?.flatten().find(has)?;
    let name = process.stat().map(|stat| stat.comm);
    Some((process.pid, name.unwrap_or_default()))
}

impl fmt::Display for PortOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let local = canonical(self.socket.local_address);
        let remote = canonical(self.socket.remote_address);
        let all = if local.ip().is_unspecified() {
            " (all addresses)"
        } else {
            ""
        };
        let owner = match &self.process {
            Some((pid, name)) => format!("pid {pid} ({name})"),
            None => format!(
                "a process of user {} that cannot be seen from here",
                self.socket.uid
            ),
        };
        match &self.socket.state {
            TcpState::Listen => write!(
                f,
                "{owner} listens at {local}{all}: end it, or choose another port"
            ),
            TcpState::TimeWait => write!(
                f,
                "an ended connection from {local} to {remote} waits there (TIME_WAIT) for up to 60 s: \
                 wait, or choose another port"
            ),
            TcpState::Established => write!(
                f,
                "{owner} has a connection from {local} to {remote} there: choose a port outside of \
                 net.ipv4.ip_local_port_range, from which outgoing connections take theirs"
            ),
            state => write!(
                f,
                "{owner} has a connection from {local} to {remote} there (state {state:?}): choose \
                 another port"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_listens_is_found_with_its_process() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let found = port_owners(address);
        let text = found[0].to_string();
        let expected = format!("pid {} (", std::process::id());
        assert!(
            text.contains(&expected) && text.contains("listens"),
            "{text}"
        );
        drop(listener);
        assert!(port_owners(address).is_empty());
    }
}

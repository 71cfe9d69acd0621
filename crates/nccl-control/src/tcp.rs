//! The rendezvous over TCP. Rank 0 listens at one address; it listens at all addresses only if configured to.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};

use super::discovery::DiscoveryHandle;
use super::interface::{self, Interface, Own};
use super::port_owner::port_owners;
use super::reactor::poll;
use crate::error::{Error, Result};

/// The source of the name of rank 0's host, which determines the advice when it does not resolve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameOrigin {
    /// A caller, or `NCCL_RUN_RENDEZVOUS`.
    Configured,
    /// From this list of nodes.
    Slurm { list: &'static str },
    /// `MASTER_ADDR`.
    Torchrun,
    /// `NCCL_RUN_SERVICE`.
    Kubernetes,
}

impl NameOrigin {
    /// Whether the name either resolves from the start of the job, or never does. In contrast, a pod's name resolves
    /// once the pod runs.
    fn is_static(self) -> bool {
        matches!(self, Self::Slurm { .. })
    }
}

/// Where rank 0 listens, and how the other ranks find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostPorts {
    pub(super) host: String,
    pub(super) origin: NameOrigin,
    /// The first and the last port to try; 0 means any port, and requires publishing.
    pub(super) ports: (u16, u16),
    pub(super) interface: Option<Interface>,
    /// Whether some ranks are known to be on other hosts.
    pub(super) across: bool,
    /// Where rank 0 publishes its address, and the other ranks find it.
    pub(super) discovery: Option<DiscoveryHandle>,
}

/// The timeout of one TCP connect: an answer arrives within milliseconds, or not at all.
const TCP_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum segment size in bytes, which fits into any IPv6 path (RFC 8200, section 5: 1280 bytes with all headers). A path
/// that silently drops larger packets would otherwise make a live host look dead.
const SEGMENT: u32 = 1220;

/// The maximum number of ports that an error describes.
const MAX_LISTED_PORTS: usize = 8;

impl HostPorts {
    pub(super) fn new(host: impl Into<String>, ports: (u16, u16)) -> Self {
        Self {
            host: host.into(),
            origin: NameOrigin::Configured,
            ports,
            interface: None,
            across: false,
            discovery: None,
        }
    }

    /// Parses `HOST:PORT`, `HOST:FIRST-LAST` or `[IPV6]:PORT`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (host, ports) = match text.strip_prefix('[') {
            Some(rest) => rest.split_once("]:")?,
            None => text.rsplit_once(':')?,
        };
        let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
        let ports: (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
        let ambiguous = !text.starts_with('[') && host.contains(':');
        if host.is_empty() || ambiguous || ports.0 > ports.1 || (ports.0 == 0 && ports.1 != 0) {
            return None;
        }
        Some(Self::new(host, ports))
    }

    /// Whether there are several ports; other programs may listen at some of them.
    pub(super) fn is_range(&self) -> bool {
        self.ports.0 != self.ports.1
    }

    /// Whether its host is this one.
    pub(super) fn is_here(&self) -> bool {
        let own = interface::own().unwrap_or_default();
        let here =
            |at: &SocketAddr| at.ip().is_loopback() || own.iter().any(|own| own.address == at.ip());
        resolve(self, 0).is_ok_and(|resolved| resolved.iter().any(here))
    }

    fn ports(&self) -> impl Iterator<Item = u16> {
        self.ports.0..=self.ports.1
    }
}

impl fmt::Display for HostPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "tcp:[{}]:{}", self.host, self.ports.0)?;
        } else {
            write!(f, "tcp:{}:{}", self.host, self.ports.0)?;
        }
        if self.is_range() {
            write!(f, "-{}", self.ports.1)?;
        }
        if let Some(interface) = &self.interface {
            write!(f, " on interface {interface}")?;
        }
        match &self.discovery {
            Some(DiscoveryHandle(discovery)) => write!(f, " (published in {})", discovery.name()),
            None => Ok(()),
        }
    }
}

/// Returns the address at which to listen, without its port, and the name of its interface. Looking up a name may take
/// seconds.
pub(super) fn address_to_listen_at(host_ports: &HostPorts) -> Result<(SocketAddr, String)> {
    let own = interface::own().map_err(Error::io("looking at this host's interfaces"))?;
    let (at, name) = own_address(host_ports, &own)?;
    if host_ports.ports.0 == 0 && host_ports.discovery.is_none() {
        return Err(Error::rendezvous(format!(
            "{host_ports} has no port: the others would not find it; give one, or a file to publish it in"
        )));
    }
    if let Some(why) = unreachable_name(host_ports, at) {
        if host_ports.across {
            let own = interface::list(&own);
            return Err(Error::rendezvous(format!(
                "rank 0 is to listen at {host_ports}, and {why}; this host has {own}"
            )));
        }
        tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "address", why, "{why}");
    }
    Ok((at, name))
}

/// Listens at the first available port of the range, at the result of [`address_to_listen_at`].
pub(super) fn listen(
    host_ports: &HostPorts,
    (at, name): (SocketAddr, String),
) -> Result<(OwnedFd, SocketAddr)> {
    let mut refused_ports = Vec::new();
    let mut tried = 0;
    for port in host_ports.ports() {
        let wanted = with_port(at, port);
        tried += 1;
        match bind(wanted) {
            Ok(socket) => {
                let found = local_address(&socket).map_err(Error::io("asking for a port"))?;
                return Ok((socket, found));
            }
            Err(Errno::ADDRINUSE) => {
                if refused_ports.len() < MAX_LISTED_PORTS {
                    let port_owners: Vec<_> = port_owners(wanted)
                        .iter()
                        .map(ToString::to_string)
                        .collect();
                    let who = if port_owners.is_empty() {
                        String::from(
                            "no owner can be seen; perhaps it was let go just now, or belongs to another \
                             user",
                        )
                    } else {
                        port_owners.join("; ")
                    };
                    refused_ports.push(format!("port {port} on {name} ({}): {who}", at.ip()));
                }
            }
            Err(error) => {
                let error = io::Error::from(error);
                return Err(Error::io(format!("listening at {wanted} on {name}"))(error));
            }
        }
    }
    let more = match tried - refused_ports.len() {
        0 => String::new(),
        more => format!("; and {more} more ports are taken"),
    };
    Err(Error::rendezvous(format!(
        "rank 0 cannot listen at {host_ports}: {}{more}",
        refused_ports.join("; ")
    )))
}

/// Listens at any port of the local address of `connection`, which is the address that is used towards rank 0.
pub(super) fn listen_beside(connection: impl AsFd) -> io::Result<(OwnedFd, SocketAddr)> {
    let at = rustix::net::getsockname(connection)?;
    let at = SocketAddr::try_from(at).map_err(io::Error::from)?;
    let socket = bind(with_port(at, 0))?;
    let at = local_address(&socket)?;
    Ok((socket, at))
}

/// Returns the address at which to listen, with its interface.
fn own_address(host_ports: &HostPorts, own: &[Own]) -> Result<(SocketAddr, String)> {
    if let Some(interface) = &host_ports.interface {
        if *interface == Interface::Any {
            let v6 = host_ports
                .host
                .parse::<IpAddr>()
                .is_ok_and(|ip| ip.is_ipv6());
            let all: IpAddr = if v6 {
                [0u16; 8].into()
            } else {
                [0u8; 4].into()
            };
            return Ok((SocketAddr::new(all, 0), String::from("all interfaces")));
        }
        let chosen = interface.choose(own)?;
        return Ok((scoped(chosen), chosen.name.clone()));
    }
    let resolved = resolve(host_ports, 0)
        .map_err(Error::io(format!("rank 0 is to listen at {host_ports}")))?;
    for address in &resolved {
        if address.ip().is_unspecified() {
            return Err(Error::rendezvous(format!(
                "{host_ports} names no address that others could reach: name one of {}, or choose an \
                 interface, or * for all of them",
                interface::list(own)
            )));
        }
        if let Some(own) = own.iter().find(|own| own.address == address.ip()) {
            return Ok((scoped(own), own.name.clone()));
        }
        // All of 127.0.0.0/8 is this host.
        if address.ip().is_loopback() {
            return Ok((*address, String::from("lo")));
        }
    }
    let resolved: Vec<_> = resolved.iter().map(|at| at.ip().to_string()).collect();
    Err(Error::rendezvous(format!(
        "rank 0 is to listen at {host_ports}, and {} is not an address of this host, which has {}: start \
         rank 0 there, or name this host",
        resolved.join(", "),
        interface::list(own)
    )))
}

fn scoped(own: &Own) -> SocketAddr {
    match own.address {
        IpAddr::V4(_) => SocketAddr::new(own.address, 0),
        IpAddr::V6(address) => SocketAddrV6::new(address, 0, 0, own.scope).into(),
    }
}

fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

fn resolve(host_ports: &HostPorts, port: u16) -> io::Result<Vec<SocketAddr>> {
    let HostPorts { host, origin, .. } = host_ports;
    let unresolved = |why: io::Error| {
        let kind = why.kind();
        let (host, origin) = (host.clone(), *origin);
        io::Error::new(kind, Unresolved { host, origin, why })
    };
    let found = (&host[..], port).to_socket_addrs().map_err(unresolved)?;
    Ok(found.collect())
}

/// The host name of rank 0 has no address on this host.
#[derive(Debug)]
struct Unresolved {
    host: String,
    origin: NameOrigin,
    why: io::Error,
}

impl std::error::Error for Unresolved {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.why)
    }
}

impl fmt::Display for Unresolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, origin, why } = self;
        write!(f, "the host {host:?} has no address on this host ({why}); ")?;
        match origin {
            NameOrigin::Configured => f.write_str("name one that every host knows, or an address"),
            NameOrigin::Slurm { list } => write!(
                f,
                "it is the first of {list}: give it one in DNS or in /etc/hosts of all nodes, or set \
                 NCCL_RUN_RENDEZVOUS=tcp:ADDRESS:PORT with the NodeAddr of `scontrol show node {host}`"
            ),
            NameOrigin::Torchrun => f.write_str(
                "it is MASTER_ADDR: set that to an address, or NCCL_RUN_RENDEZVOUS=tcp:ADDRESS:PORT",
            ),
            NameOrigin::Kubernetes => f.write_str(
                "it is that of the first pod in the service NCCL_RUN_SERVICE, which has to exist, with \
                 publishNotReadyAddresses: true",
            ),
        }
    }
}

/// Whether an attempt to connect failed because the host's name has no address.
pub(super) fn is_unresolved(error: &io::Error) -> bool {
    unresolved(error).is_some()
}

/// The same, for a name that will not get an address while the job runs.
pub(super) fn is_unresolved_for_good(error: &io::Error) -> bool {
    unresolved(error).is_some_and(|unresolved| unresolved.origin.is_static())
}

fn unresolved(error: &io::Error) -> Option<&Unresolved> {
    error.get_ref()?.downcast_ref()
}

fn new_socket(to: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if to.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    // If this fails, ordinary paths are not affected.
    let _ = socket2::SockRef::from(&socket).set_tcp_mss(SEGMENT);
    Ok(socket)
}

fn bind(at: SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = new_socket(at)?;
    // Remnants of ended connections do not prevent binding; a listener still does.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if at.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, !at.ip().is_unspecified())?;
    }
    rustix::net::bind(&socket, &at)?;
    rustix::net::listen(&socket, 4096)?;
    Ok(socket)
}

fn local_address(socket: &OwnedFd) -> io::Result<SocketAddr> {
    let address = rustix::net::getsockname(socket)?;
    SocketAddr::try_from(address).map_err(io::Error::from)
}

pub(super) fn publish(DiscoveryHandle(discovery): &DiscoveryHandle, at: SocketAddr) -> Result<()> {
    let name = discovery.name();
    let published = discovery.publish(at);
    published.map_err(Error::io(format!("publishing the address in {name}")))
}

/// Makes one attempt to connect; `attempt_number` selects one of several ports.
pub(super) fn dial(
    host_ports: &HostPorts,
    attempt_number: usize,
    deadline: Instant,
) -> io::Result<OwnedFd> {
    let targets = match &host_ports.discovery {
        Some(DiscoveryHandle(discovery)) => vec![discovery.find()?],
        None => {
            let count = usize::from(host_ports.ports.1 - host_ports.ports.0) + 1;
            let port = host_ports.ports.0 + (attempt_number % count) as u16;
            resolve(host_ports, port)?
        }
    };
    let mut last = io::Error::other(format!("{:?} has no address", host_ports.host));
    for target in targets {
        match connect(target, deadline.min(Instant::now() + TCP_CONNECT_TIMEOUT)) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = at(target, &error),
        }
    }
    Err(last)
}

/// No packet at all arrived from there within the timeout of an attempt.
#[derive(Debug)]
struct Unanswered(SocketAddr);

impl std::error::Error for Unanswered {}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(target) = self;
        write!(
            f,
            "{target}: no answer at all; a firewall may drop it, or the host is down"
        )
    }
}

/// Whether an attempt to connect failed because no packet arrived, rather than because of a report that the address is
/// unreachable.
pub(super) fn is_unanswered(error: &io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(|inner| inner.is::<Unanswered>())
}

/// Adds the address to the error of an attempt to connect to `target`.
fn at(target: SocketAddr, error: &io::Error) -> io::Error {
    match is_unanswered(error) {
        true => io::Error::new(error.kind(), Unanswered(target)),
        false => io::Error::new(error.kind(), format!("{target}: {error}")),
    }
}

fn connect(to: SocketAddr, deadline: Instant) -> io::Result<OwnedFd> {
    let socket = new_socket(to)?;
    match rustix::net::connect(&socket, &to) {
        Ok(()) => {}
        Err(Errno::INPROGRESS) => {
            if !poll(&socket, PollFlags::OUT, deadline)? {
                return Err(io::Error::new(io::ErrorKind::TimedOut, Unanswered(to)));
            }
            if let Err(error) = sockopt::socket_error(&socket)? {
                return Err(explained(error));
            }
        }
        Err(error) => return Err(explained(error)),
    }
    let socket = refuse_itself(socket, to)?;
    prepare(&socket)?;
    Ok(socket)
}

/// Refuses a connection to itself: on this host, the system may choose the target port as the connection's own port.
/// The connection is reset, because an orderly close would keep the port from a later listener for a minute.
fn refuse_itself(socket: OwnedFd, to: SocketAddr) -> io::Result<OwnedFd> {
    if local_address(&socket)? != to {
        return Ok(socket);
    }
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    Err(io::ErrorKind::ConnectionRefused.into())
}

/// Explains why a connection cannot be made, where the system's error does not.
fn explained(error: Errno) -> io::Error {
    let why = match error {
        Errno::HOSTUNREACH => "a router or a firewall refuses it, or the host is down",
        Errno::NETUNREACH => "this host has no route there",
        Errno::ACCESS | Errno::PERM => "a route or a firewall of this host forbids it",
        Errno::INVAL => "a route of this host drops it (type blackhole)",
        _ => return error.into(),
    };
    let error = io::Error::from(error);
    // The rule may have changed before another attempt.
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput => io::ErrorKind::Other,
        kind => kind,
    };
    io::Error::new(kind, format!("{error}; {why}"))
}

/// Returns why other ranks cannot reach the address at which rank 0 listens, if the cause is how rank 0's own host
/// resolves its name.
fn unreachable_name(host_ports: &HostPorts, at: SocketAddr) -> Option<String> {
    let HostPorts { host, .. } = host_ports;
    let literal = host.parse::<IpAddr>().is_ok() || host.starts_with("localhost");
    if literal || host_ports.interface.is_some() || !at.ip().is_loopback() {
        return None;
    }
    let hosts = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
    let line = hosts.lines().position(|line| {
        let mut words = line
            .split('#')
            .next()
            .unwrap_or_default()
            .split_whitespace();
        words.next() == Some(&at.ip().to_string()) && words.any(|word| word == host)
    });
    let by = line.map_or_else(String::new, |line| {
        format!(" by line {} of /etc/hosts", line + 1)
    });
    Some(format!(
        "{host:?} is {} on rank 0's host{by}, which no other host can reach: name an address of rank 0, or \
         choose an interface",
        at.ip()
    ))
}

/// Returns why other ranks may not reach rank 0, although it listens at `at`.
pub(super) fn unreachable(host_ports: &HostPorts, at: SocketAddr) -> Option<String> {
    let own = interface::own().unwrap_or_default();
    let down = own.iter().find(|own| own.address == at.ip() && !own.up);
    unreachable_name(host_ports, at).or_else(|| {
        let Own { name, address, .. } = down?;
        Some(format!(
            "interface {name} ({address}), at which rank 0 listens, is down: bring it up (ip link set {name} \
             up), choose another, or meet at a Unix socket if all ranks are on one host"
        ))
    })
}

/// Configures the socket to send small frames at once, and lets the kernel detect a failed host without help from that
/// host's processes.
pub(super) fn prepare(socket: impl AsFd) -> io::Result<()> {
    let socket = socket.as_fd();
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(1))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(socket, 2)?;
    sockopt::set_tcp_user_timeout(socket, 2000)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_to_its_own_port_is_refused_and_leaves_the_port_free() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let socket = new_socket(any).unwrap();
        rustix::net::bind(&socket, &any).unwrap();
        let own = local_address(&socket).unwrap();
        match rustix::net::connect(&socket, &own) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => panic!("{error}"),
        }
        let soon = Instant::now() + Duration::from_secs(5);
        assert!(poll(&socket, PollFlags::OUT, soon).unwrap());
        let refused = refuse_itself(socket, own).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        bind(own).expect("nothing is left there");
    }

    #[test]
    fn a_name_without_an_address_is_an_error_with_what_to_do() {
        let unresolved = |origin| {
            let host_ports = HostPorts {
                origin,
                ..HostPorts::new("n1.invalid", (20_000, 20_015))
            };
            let listening = own_address(&host_ports, &[]).unwrap_err().to_string();
            let dialling = dial(&host_ports, 0, Instant::now()).unwrap_err();
            assert!(is_unresolved(&dialling));
            assert_eq!(is_unresolved_for_good(&dialling), origin.is_static());
            assert_eq!(
                listening,
                format!("rank 0 is to listen at {host_ports}: {dialling}")
            );
            listening
        };
        let list = "SLURM_STEP_NODELIST";
        for (origin, words) in [
            (NameOrigin::Configured, "name one that every host knows"),
            (NameOrigin::Torchrun, "it is MASTER_ADDR"),
            (NameOrigin::Kubernetes, "publishNotReadyAddresses: true"),
            (
                NameOrigin::Slurm { list },
                "the first of SLURM_STEP_NODELIST",
            ),
            (
                NameOrigin::Slurm { list },
                "set NCCL_RUN_RENDEZVOUS=tcp:ADDRESS:PORT",
            ),
            (
                NameOrigin::Slurm { list },
                "`scontrol show node n1.invalid`",
            ),
        ] {
            let said = unresolved(origin);
            assert!(said.contains(words), "{words:?} in {said:?}");
        }
    }

    #[test]
    fn a_host_that_does_not_answer_is_told_apart_from_one_to_which_there_is_no_way() {
        let target: SocketAddr = ([10, 0, 0, 1], 4000).into();
        let silent = at(
            target,
            &io::Error::new(io::ErrorKind::TimedOut, Unanswered(target)),
        );
        assert_eq!(
            silent.to_string(),
            "10.0.0.1:4000: no answer at all; a firewall may drop it, or the host is down"
        );
        assert!(is_unanswered(&silent) && silent.kind() == io::ErrorKind::TimedOut);
        let refused = at(target, &explained(Errno::HOSTUNREACH));
        assert!(!is_unanswered(&refused), "{refused}");
        assert!(refused.to_string().starts_with("10.0.0.1:4000: "));
    }
}

//! The address at which ranks meet: listening there, and connecting to it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::address::Address;
use super::discovery::DiscoveryHandle;
use super::endpoint::Endpoint;
use super::tcp;
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// A listening socket, which removes its file when dropped.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) socket: OwnedFd,
    path: Option<(PathBuf, Option<(u64, u64)>)>,
    /// The discovery in which the address is published.
    published: Option<DiscoveryHandle>,
    /// The address it was asked to listen at; `None` for [`listen_beside`] over TCP.
    of: Option<Address>,
    /// The actual address.
    pub(super) at: String,
    /// The actual address over TCP.
    address: Option<std::net::SocketAddr>,
    /// The endpoint of all connections of this listener, for a Unix socket.
    endpoint: Option<Endpoint>,
}

impl Listener {
    /// Returns the local endpoint of `socket`, which this listener accepted.
    pub(super) fn end_of(&self, socket: impl AsFd) -> io::Result<Endpoint> {
        match &self.endpoint {
            Some(endpoint) => Ok(endpoint.clone()),
            None => Endpoint::of_accepted(socket),
        }
    }

    /// Whether this listener serves `address`.
    pub(super) fn is_at(&self, address: &Address) -> bool {
        self.of.as_ref() == Some(address)
    }

    /// Whether another listener serves the same address of the job.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.of.is_some() && self.of == other.of
    }

    /// Returns where to publish the address of this listener as that of `address`, and the address, if `address` has a
    /// discovery.
    pub(super) fn to_publish(
        &self,
        address: &Address,
    ) -> Option<(DiscoveryHandle, std::net::SocketAddr)> {
        match address {
            Address::Tcp(host_ports) => Some((host_ports.discovery.clone()?, self.address?)),
            Address::Path(_) | Address::Abstract(_) => None,
        }
    }

    /// Records where its address was published: it is withdrawn there when the listener is dropped.
    pub(super) fn set_published(&mut self, discovery: DiscoveryHandle) {
        self.published = Some(discovery);
    }

    /// Whether dropping this listener withdraws its address, which may block.
    pub(super) fn is_published(&self) -> bool {
        self.published.is_some()
    }
}

/// Returns the device and inode of the file at `path`, which distinguish it from the file of a later job at the same path.
fn inode(path: &Path) -> Option<(u64, u64)> {
    let file = std::fs::symlink_metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // The file is removed before the socket is closed: a later listener takes over the path only after that.
        if let Some((path, own)) = &self.path
            && inode(path) == *own
        {
            let _ = std::fs::remove_file(path);
        }
        if let (Some(DiscoveryHandle(discovery)), Some(at)) = (&self.published, self.address) {
            discovery.withdraw(at);
        }
    }
}

fn unix_address(address: &Address) -> io::Result<SocketAddr> {
    match address {
        Address::Path(path) => SocketAddr::from_pathname(path),
        Address::Abstract(name) => SocketAddr::from_abstract_name(name.as_bytes()),
        Address::Tcp(_) => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// How often a path is tried again that was in use and then was not.
const MAX_TAKEOVERS: usize = 8;

/// Held while a listener is created. Otherwise, two worlds of this process that start to listen at one path at the same
/// time would both find no listener, and the second would remove the file of the first.
static LISTENING: Mutex<()> = Mutex::new(());

/// Listens at `address` as rank 0; replaces a socket file that has no listener.
/// Publishes the address in the discovery of `address`, if there is one.
pub(super) fn listen(address: &Address) -> Result<Listener> {
    let mut listener = listen_and(address, |listener| listener)?;
    if let Some((discovery, at)) = listener.to_publish(address) {
        tcp::publish(&discovery, at)?;
        listener.set_published(discovery);
    }
    Ok(listener)
}

/// Like [`listen`] without publishing, and passes the listener to `keep` before another world of this process can listen:
/// no other world finds the address in use because of a listener that `keep` drops.
pub(super) fn listen_and<T>(address: &Address, keep: impl FnOnce(Listener) -> T) -> Result<T> {
    let Address::Tcp(host_ports) = address else {
        let _alone = LISTENING.lock();
        let listener = listen_unix(address, |holder| {
            format!(
                "another process{holder} is rank 0 at {address} already: give each job an address of its own, or end \
                 the job that holds this one"
            )
        });
        return listener.map(keep);
    };
    let own = tcp::address_to_listen_at(host_ports)?;
    let _alone = LISTENING.lock();
    let (socket, at) = tcp::listen(host_ports, own)?;
    Ok(keep(Listener {
        socket,
        path: None,
        published: None,
        of: Some(address.clone()),
        at: format!("tcp:{at}"),
        address: Some(at),
        endpoint: None,
    }))
}

/// Listens at a Unix socket, with [`LISTENING`] held. `taken` makes the error for an address where another process
/// listens; its argument is ` (pid 7)` if that process is known.
fn listen_unix(address: &Address, taken: impl FnOnce(&str) -> String) -> Result<Listener> {
    let failed = |error| Error::io(format!("listening at {address}"))(error);
    let target = unix_address(address).map_err(failed)?;
    let mut attempts = 0..MAX_TAKEOVERS;
    let listener = loop {
        let in_use = match UnixListener::bind_addr(&target) {
            Ok(listener) => break listener,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => error,
            Err(error) => return Err(failed(error)),
        };
        if attempts.next().is_none() {
            return Err(failed(in_use));
        }
        match (UnixStream::connect_addr(&target), address) {
            // A file of another kind also refuses, but must not be removed.
            (Err(error), Address::Path(path))
                if error.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) =>
            {
                match std::fs::remove_file(path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(failed(error));
                    }
                    _ => {}
                }
            }
            // The process that listened there has removed its file meanwhile.
            (Err(error), Address::Path(_)) if error.kind() == io::ErrorKind::NotFound => {}
            (Ok(stream), _) => {
                let holder =
                    peer(&stream).map_or_else(String::new, |(pid, _)| format!(" (pid {pid})"));
                return Err(Error::rendezvous(taken(&holder)));
            }
            (Err(error), _) => return Err(failed(error)),
        }
    };
    // Many ranks connect at once; the system limits the backlog.
    rustix::net::listen(&listener, 4096).map_err(|error| failed(error.into()))?;
    listener.set_nonblocking(true).map_err(failed)?;
    let path = match address {
        Address::Path(path) => Some((path.clone(), inode(path))),
        Address::Abstract(_) | Address::Tcp(_) => None,
    };
    Ok(Listener {
        socket: listener.into(),
        path,
        published: None,
        of: Some(address.clone()),
        at: address.to_string(),
        address: None,
        endpoint: Endpoint::unix(address),
    })
}

/// Returns why other ranks may not reach rank 0 although it listens, if there is a reason.
pub(super) fn unreachable(address: &Address, listener: &Listener) -> Option<String> {
    match address {
        Address::Tcp(host_ports) => tcp::unreachable(host_ports, listener.address?),
        _ => None,
    }
}

/// Listens for a rank other than 0, which is connected to rank 0 at `address`. `name` is unique to the rank
/// and the generation.
pub(super) fn listen_beside(
    address: &Address,
    name: &str,
    connection: BorrowedFd<'_>,
) -> Result<Listener> {
    // Rank 0 may not yet have registered the process that it admitted first.
    let taken = |holder: &str| {
        format!(
            "rank {name} has joined already, as another process{holder} of this host, and two processes cannot be one rank"
        )
    };
    match address {
        Address::Path(path) => {
            let mut path = path.as_os_str().to_owned();
            path.push(format!(".{name}"));
            let _alone = LISTENING.lock();
            listen_unix(&Address::Path(path.into()), taken)
        }
        Address::Abstract(host_ports) => {
            let _alone = LISTENING.lock();
            listen_unix(&Address::Abstract(format!("{host_ports}.{name}")), taken)
        }
        Address::Tcp(_) => {
            let listening = tcp::listen_beside(connection);
            let (socket, at) = listening.map_err(Error::io("listening on the way to rank 0"))?;
            Ok(Listener {
                socket,
                path: None,
                published: None,
                of: None,
                at: format!("tcp:{at}"),
                address: Some(at),
                endpoint: None,
            })
        }
    }
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}

/// Makes one attempt to connect; `attempt_number` counts the attempts.
pub(super) fn dial(
    address: &Address,
    attempt_number: usize,
    deadline: Instant,
) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let target = match address {
        Address::Path(path) => SocketAddrUnix::new(path),
        Address::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
        Address::Tcp(host_ports) => return tcp::dial(host_ports, attempt_number, deadline),
    }?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &target)?;
    // Any process of this host can take an abstract name and hand out the tokens of another world.
    same_user(&socket).map_err(|reason| io::Error::new(io::ErrorKind::PermissionDenied, reason))?;
    Ok(socket)
}

/// Checks whether data of an accepted connection may be read at all.
pub(super) fn admit(stream: impl AsFd) -> Result<(), String> {
    let stream = stream.as_fd();
    if tcp_peer(stream).is_some() {
        return tcp::prepare(stream).map_err(|error| error.to_string());
    }
    same_user(stream)
}

fn tcp_peer(stream: BorrowedFd<'_>) -> Option<std::net::SocketAddr> {
    rustix::net::getpeername(stream).ok()??.try_into().ok()
}

/// Describes where the peer is, for messages.
pub(super) fn describe_peer(stream: impl AsFd) -> String {
    if let Some(peer) = tcp_peer(stream.as_fd()) {
        return peer.to_string();
    }
    match peer(stream) {
        Some((pid, _)) => format!("process {pid}"),
        None => String::from("somebody"),
    }
}

/// Checks that the peer is a process of this user; otherwise the error names its user.
pub(super) fn same_user(stream: impl AsFd) -> Result<(), String> {
    let user = rustix::process::geteuid().as_raw();
    match peer(stream) {
        Some((_, other)) if other == user => Ok(()),
        Some((pid, other)) => Err(format!(
            "process {pid} at the other end belongs to user {other}, this one to user {user}"
        )),
        None => Err(String::from(
            "the system does not say who is at the other end",
        )),
    }
}

/// Returns the process id and the user id of the peer.
fn peer(stream: impl AsFd) -> Option<(i32, u32)> {
    let peer = rustix::net::sockopt::socket_peercred(stream).ok()?;
    Some((peer.pid.as_raw_nonzero().get(), peer.uid.as_raw()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_file_that_is_no_socket_is_not_removed() {
        let path = std::env::temp_dir().join(format!("nccl-file-{}", std::process::id()));
        std::fs::write(&path, "precious").unwrap();
        let error = listen(&Address::Path(path.clone())).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Io { .. }), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_second_process_of_a_rank_is_told_which_rank_is_taken() {
        let (connection, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let host_ports = format!("nccl-taken-{}", std::process::id());
        let address = Address::Abstract(host_ports);
        let listen = || listen_beside(&address, "1", connection.as_fd());
        let first = listen().unwrap();
        let error = listen().map(drop).unwrap_err().to_string();
        assert!(error.contains("rank 1 has joined already"), "{error}");
        let pid = format!("(pid {})", std::process::id());
        assert!(error.contains(&pid), "{error}");
        drop(first);
    }

    #[test]
    fn a_socket_that_nobody_listens_at_is_replaced_and_taken_away_at_the_end() {
        let path = std::env::temp_dir().join(format!("nccl-stale-{}", std::process::id()));
        drop(UnixListener::bind(&path).unwrap());
        drop(listen(&Address::Path(path.clone())).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn the_file_of_a_later_listener_is_not_taken_away_by_an_earlier_one() {
        let path = std::env::temp_dir().join(format!("nccl-later-{}", std::process::id()));
        let early = listen(&Address::Path(path.clone())).unwrap();
        std::fs::remove_file(&path).unwrap();
        let late = listen(&Address::Path(path.clone())).unwrap();
        drop(early);
        assert!(path.exists());
        drop(late);
        assert!(!path.exists());
    }

    #[test]
    fn a_place_that_is_given_up_at_the_same_time_is_taken_or_said_to_be_held() {
        let path = std::env::temp_dir().join(format!("nccl-given-up-{}", std::process::id()));
        let place = Address::Path(path);
        for _ in 0..2000 {
            let early = listen(&place).unwrap();
            let begin = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    begin.wait();
                    drop(early);
                });
                begin.wait();
                if let Err(error) = listen(&place) {
                    let error = error.to_string();
                    assert!(error.contains("already"), "{error}");
                }
            });
        }
    }

    #[test]
    fn of_several_who_come_for_a_place_of_nobody_one_has_it_and_can_be_found() {
        let path = std::env::temp_dir().join(format!("nccl-several-{}", std::process::id()));
        let host_ports = Address::Path(path.clone());
        for _ in 0..200 {
            drop(UnixListener::bind(&path).unwrap());
            let begin = std::sync::Barrier::new(4);
            let come = || {
                begin.wait();
                listen(&host_ports).ok()
            };
            let held: Vec<Listener> = std::thread::scope(|scope| {
                let coming: Vec<_> = (0..4).map(|_| scope.spawn(come)).collect();
                let came = coming.into_iter().filter_map(|one| one.join().unwrap());
                came.collect()
            });
            assert_eq!(held.len(), 1);
            drop(UnixStream::connect(&path).unwrap());
        }
    }
}

//! Whether hosts reach each other at the addresses that NCCL takes.
//!
//! One rank of each network opens a [`ProbeListener`]: it listens at the address that NCCL will take, at a port that the system
//! gives, and sends every prober a token, then enough bytes to fill packets of the largest size. Every other such rank
//! connects, all at once, and keeps the system's error where that fails. A prober that receives the token, and not the
//! rest, is behind a path that loses large packets. All of it ends within [`PROBE_TIMEOUT`].

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use serde::{Deserialize, Serialize};

use super::facts::ProcessFacts;

/// How long a connection may take: the kernel retries after one second.
pub(super) const PROBE_TIMEOUT: Duration = Duration::from_millis(2500);

/// The most listeners that one rank probes, and the most at once.
const MAX_PROBES: usize = 128;

const TOKEN: usize = 16;

/// Bytes behind the token: two packets of the largest usual MTU, 9000 bytes.
const LARGE: usize = 18 * 1024;

/// Where a rank listens, and the token that it sends to each prober.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProbeListener {
    pub(super) rank: usize,
    pub(super) interface: String,
    /// The socket's address, as text; empty where the listener could not be opened.
    pub(super) at: String,
    pub(super) token: String,
    /// Why the listener could not be opened.
    pub(super) failed: String,
    /// The MTU of the interface, in bytes; 0 if unknown.
    pub(super) mtu: u64,
}

/// A probe that failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    pub(super) from: usize,
    pub(super) to: usize,
    /// This side's address, if the system had one for the connection.
    pub(super) source: String,
    /// The system's error number; 0 when no answer came at all.
    pub(super) error: u64,
    /// Whether another program answered.
    pub(super) stranger: bool,
    /// Whether the system accepted the connection, and nothing came.
    pub(super) silent: bool,
    /// Whether the token came, and the bytes of the large packets did not.
    pub(super) large: bool,
}

/// An open listener, until it is dropped.
pub(super) struct OpenListener {
    pub(super) listener: ProbeListener,
    stop: Arc<AtomicBool>,
    at: Option<SocketAddr>,
    thread: Option<JoinHandle<()>>,
}

impl OpenListener {
    /// Opens a listener where NCCL will listen.
    pub(super) fn new(rank: usize, process: &ProcessFacts) -> Self {
        let mut listener = ProbeListener {
            rank,
            ..ProbeListener::default()
        };
        let stop = Arc::new(AtomicBool::new(false));
        let opened = match process.choice() {
            None => Err(io::Error::other("NCCL finds no interface")),
            Some((address, _)) => {
                listener.interface.clone_from(&address.interface);
                listener.mtu = mtu(&address.interface);
                listen(address.socket(0))
            }
        };
        let opened = opened.and_then(|(socket, at)| {
            let mut token = [0u8; TOKEN / 2];
            rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())?;
            let token: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
            listener.token.clone_from(&token);
            listener.at = at.to_string();
            let stop = Arc::clone(&stop);
            let thread = std::thread::Builder::new()
                .name(String::from("nccl-preflight"))
                .spawn(move || serve(&socket, token.as_bytes(), &stop))?;
            Ok((thread, at))
        });
        let (thread, at) = match opened {
            Ok((thread, at)) => (Some(thread), Some(at)),
            Err(error) => {
                listener.failed = error.to_string();
                listener.at.clear();
                (None, None)
            }
        };
        Self {
            listener,
            stop,
            at,
            thread,
        }
    }
}

impl Drop for OpenListener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let (Some(thread), Some(at)) = (self.thread.take(), self.at) {
            // Wakes the thread up; otherwise it checks `stop` a moment later.
            let _ = start(at);
            let _ = thread.join();
        }
    }
}

fn mtu(interface: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/sys/class/net/{interface}/mtu"));
    text.ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

fn family(at: SocketAddr) -> AddressFamily {
    match at {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    }
}

fn socket(at: SocketAddr) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family(at), SocketType::STREAM, flags, Some(ipproto::TCP))
}

fn listen(at: SocketAddr) -> io::Result<(OwnedFd, SocketAddr)> {
    let socket = socket(at)?;
    rustix::net::bind(&socket, &at)?;
    rustix::net::listen(&socket, 1024)?;
    let at = SocketAddr::try_from(rustix::net::getsockname(&socket)?).map_err(io::Error::from)?;
    Ok((socket, at))
}

/// Sends the token, and the rest, to every prober.
fn serve(listener: &OwnedFd, token: &[u8], stop: &AtomicBool) {
    let large = [0u8; LARGE];
    while !stop.load(Ordering::Relaxed) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(listener, flags) {
            Ok(guest) => {
                // The token goes in a small packet of its own. All of it fits into the socket's buffer, whether the
                // prober reads it or not; the system sends it after `guest` is dropped.
                let _ = sockopt::set_socket_send_buffer_size(&guest, 4 * LARGE);
                let _ = sockopt::set_tcp_nodelay(&guest, true);
                for bytes in [token, &large] {
                    let _ = rustix::net::send(&guest, bytes, rustix::net::SendFlags::NOSIGNAL);
                }
            }
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::AGAIN) => {
                let mut wait = [PollFd::new(listener, PollFlags::IN)];
                let _ = poll(&mut wait, Some(&timespec(Duration::from_millis(200))));
            }
            // Without descriptors, for instance: probers get no answer, and report that.
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs().cast_signed(),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// Begins to connect, and returns at once.
fn start(to: SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = socket(to)?;
    // A reset instead of a lingering close: a host has ports enough for the world, but not for TIME_WAIT of all these.
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// A connection to a listener that has not ended yet.
struct ProbeConnection<'d> {
    listener: &'d ProbeListener,
    socket: OwnedFd,
    source: String,
    connected: bool,
    /// The bytes of the token received so far.
    heard: Vec<u8>,
}

/// How a probe ended: with the token, with an error number, or with bytes that are not the token.
enum ProbeOutcome {
    Reached,
    Error(u64),
    OtherProgram,
}

/// Probes the listeners of other ranks; returns the probes that failed.
pub(super) fn probe(rank: usize, listeners: &[ProbeListener], until: Instant) -> Vec<Failure> {
    let mut failures = Vec::new();
    let mut connections: HashMap<usize, ProbeConnection<'_>> = HashMap::new();
    let fail = |listener: &ProbeListener, source: &str, error, stranger| Failure {
        from: rank,
        to: listener.rank,
        source: source.to_owned(),
        error,
        stranger,
        silent: false,
        large: false,
    };
    for listener in chosen(rank, listeners) {
        let Ok(at) = listener.at.parse::<SocketAddr>() else {
            continue;
        };
        match start(at) {
            Ok(socket) => {
                let source = rustix::net::getsockname(&socket).ok();
                let source = source.and_then(|source| SocketAddr::try_from(source).ok());
                let connection = ProbeConnection {
                    listener,
                    socket,
                    source: source.map_or_else(String::new, |source| source.ip().to_string()),
                    connected: false,
                    heard: Vec::new(),
                };
                connections.insert(listener.rank, connection);
            }
            Err(error) => failures.push(fail(listener, "", number(error), false)),
        }
    }
    while !connections.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        let ready = if left.is_zero() {
            Vec::new()
        } else {
            wait(&connections, left)
        };
        for rank in ready {
            let Some(connection) = connections.get_mut(&rank) else {
                continue;
            };
            let Some(end) = connection.go_on() else {
                continue;
            };
            match end {
                ProbeOutcome::Reached => {}
                ProbeOutcome::Error(error) => {
                    failures.push(fail(connection.listener, &connection.source, error, false))
                }
                ProbeOutcome::OtherProgram => {
                    failures.push(fail(connection.listener, &connection.source, 0, true))
                }
            }
            connections.remove(&rank);
        }
        if left.is_zero() {
            failures.extend(connections.drain().map(|(_, connection)| {
                let failure = fail(connection.listener, &connection.source, 0, false);
                // The system connects before the program accepts, so silence does not say which program listens.
                Failure {
                    large: connection.heard.len() == TOKEN,
                    silent: connection.connected && connection.heard.len() < TOKEN,
                    ..failure
                }
            }));
        }
    }
    failures.sort_by_key(|failure| failure.to);
    failures
}

/// The listeners to probe: the next ones in a circle, so that each has the same number of probers.
fn chosen(rank: usize, listeners: &[ProbeListener]) -> impl Iterator<Item = &ProbeListener> {
    let (before, after): (Vec<_>, Vec<_>) = listeners
        .iter()
        .filter(|listener| listener.rank != rank)
        .partition(|listener| listener.rank < rank);
    after.into_iter().chain(before).take(MAX_PROBES)
}

/// Waits until connections can go on, and returns their ranks.
fn wait(connections: &HashMap<usize, ProbeConnection<'_>>, left: Duration) -> Vec<usize> {
    let (ranks, mut fds): (Vec<usize>, Vec<PollFd<'_>>) = connections
        .iter()
        .map(|(rank, connection)| {
            let events = if connection.connected {
                PollFlags::IN
            } else {
                PollFlags::OUT
            };
            (
                *rank,
                PollFd::from_borrowed_fd(connection.socket.as_fd(), events),
            )
        })
        .unzip();
    if poll(&mut fds, Some(&timespec(left))).is_err() {
        return Vec::new();
    }
    let ready = ranks.into_iter().zip(&fds);
    ready
        .filter(|(_, fd)| !fd.revents().is_empty())
        .map(|(rank, _)| rank)
        .collect()
}

fn number(error: Errno) -> u64 {
    u64::from(error.raw_os_error().unsigned_abs())
}

impl ProbeConnection<'_> {
    fn go_on(&mut self) -> Option<ProbeOutcome> {
        if !self.connected {
            match sockopt::socket_error(&self.socket) {
                Ok(Ok(())) => self.connected = true,
                Ok(Err(error)) | Err(error) => return Some(ProbeOutcome::Error(number(error))),
            }
        }
        // The listener closes behind the last byte, so the end of the stream says that all bytes came.
        let mut buffer = [0u8; LARGE];
        match rustix::net::recv(
            &self.socket,
            &mut buffer[..],
            rustix::net::RecvFlags::empty(),
        ) {
            Ok((count, _)) => {
                let missing = TOKEN - self.heard.len();
                self.heard.extend_from_slice(&buffer[..count.min(missing)]);
                let token = self.listener.token.as_bytes();
                match () {
                    () if !token.starts_with(&self.heard) => Some(ProbeOutcome::OtherProgram),
                    () if count > 0 => None,
                    () if self.heard.len() == TOKEN => Some(ProbeOutcome::Reached),
                    () => Some(ProbeOutcome::OtherProgram),
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(error) => Some(ProbeOutcome::Error(number(error))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::tests::{ranks_on, with_addresses};

    fn open(rank: usize) -> OpenListener {
        let mut facts = ranks_on(&["h"]);
        with_addresses(&mut facts[0], &[("lo", "127.0.0.1")]);
        OpenListener::new(rank, facts[0].process.as_ref().unwrap())
    }

    #[test]
    fn doors_that_are_open_are_found_open_by_all() {
        let opened: Vec<OpenListener> = (0..5).map(open).collect();
        let listeners: Vec<ProbeListener> =
            opened.iter().map(|open| open.listener.clone()).collect();
        let until = Instant::now() + PROBE_TIMEOUT;
        for rank in 0..5 {
            assert_eq!(probe(rank, &listeners, until), []);
        }
        // And closed without waiting.
        let begun = Instant::now();
        drop(opened);
        assert!(
            begun.elapsed() < Duration::from_secs(1),
            "{:?}",
            begun.elapsed()
        );
    }

    #[test]
    fn each_reason_is_kept_and_none_takes_longer_than_it_may() {
        let opened = open(1);
        let closed = listen("127.0.0.1:0".parse().unwrap()).unwrap().1;
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let chatty = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let chatty_at = chatty.local_addr().unwrap();
        let narrow = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let narrow_at = narrow.local_addr().unwrap();
        std::thread::spawn(move || {
            use std::io::Write as _;
            let mut guest = narrow.accept().unwrap().0;
            guest.write_all(b"0123456789abcdef").unwrap();
            // The rest is lost on the way.
            std::thread::sleep(4 * PROBE_TIMEOUT);
        });
        std::thread::spawn(move || {
            use std::io::Write as _;
            let _ = chatty
                .accept()
                .unwrap()
                .0
                .write_all(b"SSH-2.0-OpenSSH_9\r\n");
        });
        let listener = |rank, at: &dyn ToString| ProbeListener {
            rank,
            at: at.to_string(),
            token: String::from("0123456789abcdef"),
            ..ProbeListener::default()
        };
        let listeners = [
            opened.listener.clone(),
            listener(2, &closed),
            listener(3, &silent.local_addr().unwrap()),
            listener(4, &chatty_at),
            // Not usable as an address of a host.
            listener(5, &"255.255.255.255:9"),
            listener(6, &narrow_at),
        ];
        // Longer than `PROBE_TIMEOUT`, which `probe` does not use.
        let limit = PROBE_TIMEOUT + Duration::from_millis(1500);
        let begun = Instant::now();
        let failures = probe(0, &listeners, begun + limit);
        let took = begun.elapsed();
        assert!((limit..2 * limit).contains(&took), "{took:?}");
        let brief: Vec<_> = failures
            .iter()
            .map(|f| (f.to, f.error, f.stranger, f.silent, f.large))
            .collect();
        let refused = number(Errno::CONNREFUSED);
        assert_eq!(
            brief[..3],
            [
                (2, refused, false, false, false),
                (3, 0, false, true, false),
                (4, 0, true, false, false)
            ]
        );
        assert_eq!(brief[4], (6, 0, false, false, true));
        assert_eq!(brief[3].0, 5);
        assert_ne!(brief[3].1, 0);
        assert_eq!(failures[0].source, "127.0.0.1");
    }

    #[test]
    fn of_many_doors_each_is_visited_by_as_many() {
        let listeners: Vec<ProbeListener> = (0..300)
            .map(|rank| ProbeListener {
                rank,
                ..ProbeListener::default()
            })
            .collect();
        let mut visits = vec![0; 300];
        for rank in 0..300 {
            chosen(rank, &listeners).for_each(|listener| visits[listener.rank] += 1);
        }
        assert!(visits.iter().all(|&count| count == MAX_PROBES));
    }
}

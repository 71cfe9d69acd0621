//! The way to the store from the other processes of the host: a Unix socket at which rank 0 listens.
//!
//! A connection belongs to one rank and lives as long as its world. Frames are a length and that many
//! bytes; a length beyond [`FRAME`] ends the connection. Both ends talk to processes of their own user
//! alone. A connection that ends without a goodbye is a rank that is gone.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::environment::Address;
use super::store::{Incomplete, LARGEST, Store};
use crate::error::{Error, Result};

/// The largest frame: the parts of a round, with their lengths and what is said about them.
const FRAME: usize = LARGEST + (1 << 20);
const MAGIC: &[u8; 8] = b"ncclrdv1";
const GOODBYE: u64 = u64::MAX;

/// How long a peer may take to say who it is, or to take an answer.
const PATIENCE: Duration = Duration::from_secs(5);

fn socket_address(address: &Address) -> io::Result<SocketAddr> {
    match address {
        Address::Path(path) => SocketAddr::from_pathname(path),
        Address::Abstract(name) => SocketAddr::from_abstract_name(name.as_bytes()),
    }
}

pub(super) fn write_frame(mut to: impl Write, frame: &[u8]) -> io::Result<()> {
    let length = u32::try_from(frame.len())
        .ok()
        .filter(|_| frame.len() <= FRAME);
    let Some(length) = length else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a frame of more than 65 MiB",
        ));
    };
    to.write_all(&length.to_le_bytes())?;
    to.write_all(frame)
}

pub(super) fn read_frame(mut from: impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > FRAME {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a frame of more than 65 MiB",
        ));
    }
    // Grows as bytes arrive, not by what the length promises.
    let mut frame = Vec::new();
    from.take(length as u64).read_to_end(&mut frame)?;
    if frame.len() == length {
        Ok(frame)
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// Reads numbers and byte strings from a frame.
pub(super) struct Fields<'f>(pub(super) &'f [u8]);

impl<'f> Fields<'f> {
    pub(super) fn number(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*bytes))
    }

    pub(super) fn bytes(&mut self) -> Option<&'f [u8]> {
        let length = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }
}

pub(super) fn put_number(frame: &mut Vec<u8>, number: u64) {
    frame.extend_from_slice(&number.to_le_bytes());
}

pub(super) fn put_bytes(frame: &mut Vec<u8>, bytes: &[u8]) {
    put_number(frame, bytes.len() as u64);
    frame.extend_from_slice(bytes);
}

/// Rank 0's side.
pub(super) struct Server {
    stop: Arc<AtomicBool>,
    /// Requests that were read and not answered yet.
    unanswered: Arc<AtomicUsize>,
    accepting: Option<JoinHandle<()>>,
    address: Address,
}

impl Server {
    pub(super) fn start(address: &Address, store: Arc<Store>, size: usize) -> Result<Self> {
        let listener = bind(address)?;
        listener
            .set_nonblocking(true)
            .map_err(Error::io(format!("listening at {address}")))?;
        let stop = Arc::new(AtomicBool::new(false));
        let unanswered = Arc::new(AtomicUsize::new(0));
        let accepting = {
            let door = Door {
                store,
                size,
                stop: Arc::clone(&stop),
                unanswered: Arc::clone(&unanswered),
                joined: (0..size).map(|_| AtomicBool::new(false)).collect(),
            };
            std::thread::Builder::new()
                .name(String::from("nccl-rendezvous"))
                .spawn(move || Arc::new(door).accept(&listener))
                .map_err(Error::io("starting the thread of the rendezvous"))?
        };
        Ok(Self {
            stop,
            unanswered,
            accepting: Some(accepting),
            address: address.clone(),
        })
    }
}

impl Drop for Server {
    /// Lets what is answerable be answered, within bounds, and takes the socket away.
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.unanswered.load(Ordering::Acquire) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Before the listener goes: the next rank 0 may make its own at the same place.
        if let Address::Path(path) = &self.address {
            let _ = std::fs::remove_file(path);
        }
        self.stop.store(true, Ordering::Release);
        if let Some(accepting) = self.accepting.take() {
            // It looks at `stop` every few milliseconds.
            let _ = accepting.join();
        }
    }
}

/// Listens, and removes a socket that nobody listens at any more.
fn bind(address: &Address) -> Result<UnixListener> {
    let failed = |error| Error::io(format!("listening at {address}"))(error);
    let target = socket_address(address).map_err(failed)?;
    match UnixListener::bind_addr(&target) {
        Ok(listener) => return Ok(listener),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
        Err(error) => return Err(failed(error)),
    }
    match (UnixStream::connect_addr(&target), address) {
        // A file of another kind refuses, too, and is not ours to remove.
        (Err(error), Address::Path(path))
            if error.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) =>
        {
            std::fs::remove_file(path).map_err(failed)?;
            UnixListener::bind_addr(&target).map_err(failed)
        }
        (Ok(stream), _) => {
            let holder = peer(&stream).map_or_else(String::new, |(pid, _)| format!(" (pid {pid})"));
            Err(Error::rendezvous(format!(
                "another process{holder} is rank 0 at {address} already: give each job an address of \
                 its own, or end the job that holds this one"
            )))
        }
        (Err(error), _) => Err(failed(error)),
    }
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}

/// Whether the other end is a process of this user; otherwise, who it is.
fn same_user(stream: &UnixStream) -> Result<(), String> {
    // SAFETY: takes no arguments and cannot fail.
    let user = unsafe { libc::geteuid() };
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

/// The process and the user at the other end.
fn peer(stream: &UnixStream) -> Option<(i32, u32)> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: both places are valid for the call, and `length` is the size of the first.
    let code = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    (code == 0).then_some((credentials.pid, credentials.uid))
}

/// What the threads of the server share.
struct Door {
    store: Arc<Store>,
    size: usize,
    stop: Arc<AtomicBool>,
    unanswered: Arc<AtomicUsize>,
    joined: Vec<AtomicBool>,
}

impl Door {
    fn accept(self: Arc<Self>, listener: &UnixListener) {
        while !self.stop.load(Ordering::Acquire) {
            match listener.accept() {
                Ok((stream, _)) => {
                    let door = Arc::clone(&self);
                    let thread = std::thread::Builder::new()
                        .name(String::from("nccl-rendezvous"))
                        .spawn(move || door.serve(stream));
                    if let Err(error) = thread {
                        tracing::error!(target: "nccl", %error, "no thread for a rank that joins");
                    }
                }
                Err(_) => wait_readable(listener, Duration::from_millis(20)),
            }
        }
    }

    fn serve(&self, stream: UnixStream) {
        match self.admit(&stream) {
            Ok(rank) => {
                let reason = self.answer(rank, &stream);
                self.store.leave(rank, reason);
            }
            Err(reason) => {
                tracing::warn!(target: "nccl", reason, "the rendezvous turned a connection away");
                let mut frame = vec![1];
                frame.extend_from_slice(reason.as_bytes());
                let _ = write_frame(&stream, &frame);
            }
        }
    }

    fn admit(&self, stream: &UnixStream) -> Result<usize, String> {
        let prepared = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_read_timeout(Some(PATIENCE)))
            .and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
        prepared.map_err(|error| error.to_string())?;
        same_user(stream)?;
        let hello = read_frame(stream).map_err(|error| format!("no greeting came: {error}"))?;
        let Some(rest) = hello.strip_prefix(MAGIC) else {
            return Err(String::from(
                "the greeting is not one of a rank of this version",
            ));
        };
        let mut fields = Fields(rest);
        let (Some(rank), Some(size)) = (fields.number(), fields.number()) else {
            return Err(String::from("the greeting is too short"));
        };
        if size != self.size as u64 {
            return Err(format!(
                "rank {rank} expects {size} ranks, rank 0 expects {}",
                self.size
            ));
        }
        let index = usize::try_from(rank)
            .ok()
            .filter(|&rank| rank != 0 && rank < self.size);
        let Some(rank) = index else {
            return Err(format!("there is no rank {rank} to join"));
        };
        if self.joined[rank].swap(true, Ordering::AcqRel) {
            return Err(format!(
                "rank {rank} has joined already: two processes say they are it"
            ));
        }
        let accepted = write_frame(stream, &[0]).and_then(|()| stream.set_read_timeout(None));
        match accepted {
            Ok(()) => Ok(rank),
            Err(error) => {
                self.store.leave(rank, "it died while it joined");
                Err(error.to_string())
            }
        }
    }

    /// Serves one rank until it is gone; returns how it went.
    fn answer(&self, rank: usize, mut stream: &UnixStream) -> String {
        loop {
            let request = match read_frame(&mut stream) {
                Ok(request) => request,
                Err(_) => return String::from("its connection closed without goodbye: it died"),
            };
            let mut fields = Fields(&request);
            let id = match fields.number() {
                Some(GOODBYE) => return String::from("it left the world"),
                Some(id) => id,
                None => return String::from("it sent a broken request"),
            };
            self.unanswered.fetch_add(1, Ordering::AcqRel);
            let answered = self.one(rank, id, fields, stream);
            self.unanswered.fetch_sub(1, Ordering::AcqRel);
            if let Err(error) = answered {
                return format!("its connection failed: {error}");
            }
        }
    }

    fn one(&self, rank: usize, id: u64, mut fields: Fields<'_>, to: &UnixStream) -> io::Result<()> {
        let broken = || io::Error::new(io::ErrorKind::InvalidData, "a broken request");
        let round = fields.number().ok_or_else(broken)?;
        let millis = fields.number().ok_or_else(broken)?.min(86_400_000);
        let topic = fields.bytes().ok_or_else(broken)?;
        let part = fields.bytes().ok_or_else(broken)?.to_vec();
        let topic = str::from_utf8(topic).map_err(|_| broken())?;
        let deadline = Instant::now() + Duration::from_millis(millis);
        // A rank that dies while it waits here is not read from, so it is looked after.
        let stopped = || self.stop.load(Ordering::Acquire) || hung_up(to);
        let collected = self
            .store
            .collect(topic, round, rank, part, deadline, stopped);
        let mut frame = Vec::new();
        put_number(&mut frame, id);
        match collected {
            Ok(parts) => {
                put_number(&mut frame, 0);
                for part in parts.iter() {
                    put_bytes(&mut frame, part);
                }
            }
            Err(Incomplete::TimedOut { missing }) => {
                put_number(&mut frame, 1);
                missing
                    .iter()
                    .for_each(|&rank| put_number(&mut frame, rank as u64));
            }
            Err(Incomplete::Gone { rank, reason }) => {
                put_number(&mut frame, 2);
                put_number(&mut frame, rank as u64);
                put_bytes(&mut frame, reason.as_bytes());
            }
            Err(Incomplete::Twice { .. }) => put_number(&mut frame, 3),
            Err(Incomplete::TooLarge { bytes }) => {
                put_number(&mut frame, 5);
                put_number(&mut frame, bytes as u64);
            }
            Err(Incomplete::Interrupted | Incomplete::Busy) => put_number(&mut frame, 4),
        }
        write_frame(to, &frame)
    }
}

fn wait_readable(socket: &impl AsRawFd, limit: Duration) {
    let mut poll = libc::pollfd {
        fd: socket.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let millis = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one valid entry.
    unsafe { libc::poll(&raw mut poll, 1, millis) };
}

/// Whether the other end is gone; does not wait.
fn hung_up(stream: &UnixStream) -> bool {
    let mut poll = libc::pollfd {
        fd: stream.as_raw_fd(),
        events: libc::POLLRDHUP,
        revents: 0,
    };
    // SAFETY: one valid entry, and no wait.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    ready > 0 && poll.revents & (libc::POLLRDHUP | libc::POLLHUP) != 0
}

/// The side of every other process.
#[derive(Debug)]
pub(super) struct Client {
    stream: UnixStream,
    rank: usize,
    next: u64,
}

impl Client {
    pub(super) fn connect(
        address: &Address,
        rank: usize,
        size: usize,
        deadline: Instant,
    ) -> Result<Self> {
        let target =
            socket_address(address).map_err(Error::io(format!("the address {address}")))?;
        let stream = loop {
            match UnixStream::connect_addr(&target) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= deadline => {
                    return Err(Error::rendezvous(format!(
                        "rank 0 does not answer at {address} ({error}): has it been started?"
                    )));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        // Anybody on this host can take an abstract name, and give out tokens of a world of their own.
        same_user(&stream)
            .map_err(|reason| Error::rendezvous(format!("no rank 0 at {address}: {reason}")))?;
        let mut hello = MAGIC.to_vec();
        put_number(&mut hello, rank as u64);
        put_number(&mut hello, size as u64);
        let patience = Some(
            deadline
                .saturating_duration_since(Instant::now())
                .max(PATIENCE),
        );
        let answer = stream
            .set_read_timeout(patience)
            .and_then(|()| stream.set_write_timeout(Some(PATIENCE)))
            .and_then(|()| write_frame(&stream, &hello))
            .and_then(|()| read_frame(&stream))
            .map_err(|error| Error::rendezvous(format!("rank 0 hung up at {address}: {error}")))?;
        match answer.split_first() {
            Some((0, _)) => Ok(Self {
                stream,
                rank,
                next: 0,
            }),
            Some((_, reason)) => Err(Error::rendezvous(format!(
                "rank 0 turned rank {rank} away: {}",
                String::from_utf8_lossy(reason)
            ))),
            None => Err(Error::rendezvous(format!(
                "no answer of a rank 0 came from {address}"
            ))),
        }
    }

    pub(super) fn collect(
        &mut self,
        topic: &str,
        round: u64,
        part: &[u8],
        size: usize,
        deadline: Instant,
        interrupted: impl Fn() -> bool,
    ) -> io::Result<Result<Vec<Vec<u8>>, Incomplete>> {
        if part.len() > LARGEST {
            return Ok(Err(Incomplete::TooLarge { bytes: part.len() }));
        }
        let id = self.next;
        self.next += 1;
        let left = deadline.saturating_duration_since(Instant::now());
        let mut request = Vec::new();
        put_number(&mut request, id);
        put_number(&mut request, round);
        put_number(
            &mut request,
            u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        );
        put_bytes(&mut request, topic.as_bytes());
        put_bytes(&mut request, part);
        write_frame(&self.stream, &request)?;
        // Rank 0 keeps the deadline; this is for the case that it stands still.
        let patience = deadline + PATIENCE;
        loop {
            while !readable(&self.stream)? {
                if interrupted() {
                    return Ok(Err(Incomplete::Interrupted));
                }
                if Instant::now() >= patience {
                    return Ok(Err(Incomplete::TimedOut { missing: vec![0] }));
                }
                wait_readable(&self.stream, Duration::from_millis(20));
            }
            let answer = read_frame(&self.stream)?;
            let mut fields = Fields(&answer);
            let broken = || io::Error::new(io::ErrorKind::InvalidData, "a broken answer");
            // An answer to a request that was given up may still be on its way.
            if fields.number().ok_or_else(broken)? == id {
                return parse(fields, self.rank, size).ok_or_else(broken);
            }
        }
    }

    pub(super) fn goodbye(&self) {
        // A rank 0 that is gone misses nothing.
        let _ = write_frame(&self.stream, &GOODBYE.to_le_bytes());
    }
}

fn readable(stream: &UnixStream) -> io::Result<bool> {
    let mut poll = libc::pollfd {
        fd: stream.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid entry, and no wait.
    match unsafe { libc::poll(&raw mut poll, 1, 0) } {
        -1 => Err(io::Error::last_os_error()),
        ready => Ok(ready > 0),
    }
}

/// The answer to rank `asking` of `size`.
fn parse(
    mut fields: Fields<'_>,
    asking: usize,
    size: usize,
) -> Option<Result<Vec<Vec<u8>>, Incomplete>> {
    Some(match fields.number()? {
        0 => Ok((0..size)
            .map(|_| fields.bytes().map(<[u8]>::to_vec))
            .collect::<Option<_>>()?),
        1 => {
            let missing = std::iter::from_fn(|| fields.number());
            Err(Incomplete::TimedOut {
                missing: missing.map(|rank| rank as usize).collect(),
            })
        }
        2 => {
            let rank = usize::try_from(fields.number()?).ok()?;
            let reason = String::from_utf8_lossy(fields.bytes()?).into_owned();
            Err(Incomplete::Gone { rank, reason })
        }
        3 => Err(Incomplete::Twice { rank: asking }),
        5 => Err(Incomplete::TooLarge {
            bytes: usize::try_from(fields.number()?).ok()?,
        }),
        _ => Err(Incomplete::Interrupted),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_frame_that_promises_too_much_is_refused_and_a_short_one_noticed() {
        let huge = u32::MAX.to_le_bytes();
        assert_eq!(
            read_frame(&huge[..]).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        let mut short = 10u32.to_le_bytes().to_vec();
        short.extend_from_slice(b"123");
        assert_eq!(
            read_frame(&short[..]).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn a_file_that_is_no_socket_is_not_removed() {
        let path = std::env::temp_dir().join(format!("nccl-file-{}", std::process::id()));
        std::fs::write(&path, "precious").unwrap();
        let error = bind(&Address::Path(path.clone())).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Io { .. }), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_socket_that_nobody_listens_at_is_replaced() {
        let path = std::env::temp_dir().join(format!("nccl-stale-{}", std::process::id()));
        drop(UnixListener::bind(&path).unwrap());
        drop(bind(&Address::Path(path.clone())).unwrap());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn no_bytes_make_the_parser_panic() {
        let mut seed = 1u64;
        for length in 0..200 {
            let bytes: Vec<u8> = (0..length)
                .map(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 56) as u8 & 3
                })
                .collect();
            let _ = parse(Fields(&bytes), 1, 3);
        }
    }
}

//! The non-blocking sockets of the RAS thread.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};

use crate::nccl::debug::{Level, enabled, info, print};

/// The subsystem of RAS's log lines.
pub(super) const RAS: u32 = 0x8000;

/// A connection and its pending output.
#[derive(Debug)]
pub(super) struct Stream {
    stream: TcpStream,
    output: Vec<u8>,
    sent: usize,
}

impl Stream {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            output: Vec::new(),
            sent: 0,
        })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// Queues bytes. Returns false if more than `most` bytes would be pending.
    pub(super) fn queue(&mut self, bytes: &[u8], most: usize) -> bool {
        if self.waiting() + bytes.len() > most {
            return false;
        }
        self.output.extend_from_slice(bytes);
        true
    }

    /// Returns the number of pending bytes.
    pub(super) fn waiting(&self) -> usize {
        self.output.len() - self.sent
    }

    /// Sends as much as the socket takes.
    ///
    /// # Errors
    /// The connection is unusable.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while self.waiting() > 0 {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.output.clear();
        self.sent = 0;
        Ok(())
    }

    /// Reads the available bytes; returns `None` at the end.
    ///
    /// # Errors
    /// The connection is unusable.
    pub(super) fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = vec![0; 64 << 10];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(None),
                Ok(count) => {
                    bytes.truncate(count);
                    return Ok(Some(bytes));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Some(Vec::new())),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Listens for clients. On failure RAS has no clients, as in NCCL.
pub(super) fn listen_for_clients(at: &str) -> Option<TcpListener> {
    let listener = listen(at);
    match &listener {
        Ok(_) => info!(RAS, "RAS client listening socket at {at}"),
        Err(error) => info!(
            RAS,
            "RAS failed to establish a client listening socket at {at}: {error}"
        ),
    }
    listener.ok()
}

fn listen(at: &str) -> io::Result<TcpListener> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in at.to_socket_addrs()? {
        match bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Listens at an address that other processes may share.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let family = match address {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    // SAFETY: creates a socket.
    let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    for option in [libc::SO_REUSEADDR, libc::SO_REUSEPORT] {
        let on: libc::c_int = 1;
        // SAFETY: the value is a live integer of this size.
        check(unsafe {
            libc::setsockopt(
                fd,
                libc::SOL_SOCKET,
                option,
                (&raw const on).cast(),
                size_of_val(&on) as libc::socklen_t,
            )
        })?;
    }
    match address {
        SocketAddr::V4(address) => {
            // SAFETY: all-zero is a valid address.
            let mut raw: libc::sockaddr_in = unsafe { std::mem::zeroed() };
            raw.sin_family = libc::AF_INET as libc::sa_family_t;
            raw.sin_port = address.port().to_be();
            raw.sin_addr.s_addr = u32::from_ne_bytes(address.ip().octets());
            let size = size_of_val(&raw) as libc::socklen_t;
            // SAFETY: an address of this size.
            check(unsafe { libc::bind(fd, (&raw const raw).cast(), size) })?;
        }
        SocketAddr::V6(address) => {
            // SAFETY: all-zero is a valid address.
            let mut raw: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
            raw.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            raw.sin6_port = address.port().to_be();
            raw.sin6_addr.s6_addr = address.ip().octets();
            raw.sin6_scope_id = address.scope_id();
            let size = size_of_val(&raw) as libc::socklen_t;
            // SAFETY: an address of this size.
            check(unsafe { libc::bind(fd, (&raw const raw).cast(), size) })?;
        }
    }
    // SAFETY: a bound socket.
    check(unsafe { libc::listen(fd, 128) })?;
    let listener = TcpListener::from(socket);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Accepts a connection, if one waits.
pub(super) fn accept(listener: &TcpListener) -> Option<Stream> {
    let (stream, _) = listener.accept().ok()?;
    Stream::new(stream).ok()
}

/// Prints a line about the network of RAS.
pub(super) fn say(text: &str) {
    if enabled(Level::Info, RAS) {
        print(Level::Info, None, format_args!("RAS {text}"));
    }
}

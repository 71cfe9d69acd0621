//! Abstract Unix sockets that carry whole messages with descriptors, to processes of the same user
//! only.
//!
//! Used by the bootstrap. Abstract names live in the network namespace and vanish with their
//! socket: there is no file to clean up, and no other namespace can connect. Every descriptor is
//! close-on-exec, so that a child process does not hold a rank's connection open.

use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

/// Descriptors that fit into one message (the kernel's limit is 253).
pub(crate) const DESCRIPTORS_PER_MESSAGE: usize = 200;

/// An abstract name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address(Vec<u8>);

impl Address {
    /// Creates an address from a name without the leading NUL, of at most 107 bytes.
    pub(crate) fn new(name: &str) -> Self {
        assert!(
            name.len() <= 107,
            "an abstract socket's name has at most 107 bytes"
        );
        Self(name.as_bytes().to_vec())
    }

    fn raw(&self) -> (libc::sockaddr_un, libc::socklen_t) {
        // SAFETY: all-zero is a valid `sockaddr_un`.
        let mut raw: libc::sockaddr_un = unsafe { mem::zeroed() };
        raw.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in raw.sun_path[1..].iter_mut().zip(&self.0) {
            *to = *from as libc::c_char;
        }
        let len = mem::size_of::<libc::sa_family_t>() + 1 + self.0.len();
        (raw, len as libc::socklen_t)
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    // SAFETY: plain call.
    let fd = check(unsafe {
        libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0)
    })?;
    // SAFETY: the descriptor was just made.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Waits until one of the descriptors can be read (or is closed); `None` waits for ever.
pub(crate) fn wait_readable(
    fds: &mut [libc::pollfd],
    timeout: Option<Duration>,
) -> io::Result<usize> {
    let millis = timeout.map_or(-1, |t| t.as_millis().min(60_000) as libc::c_int);
    // SAFETY: the slice is valid for its length.
    match check(unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, millis) }) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        Err(error) => Err(error),
        Ok(n) => Ok(n as usize),
    }
}

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Listener(OwnedFd);

impl Listener {
    /// Binds the name and listens.
    pub(crate) fn bind(address: &Address) -> io::Result<Self> {
        let fd = new_socket()?;
        let (raw, len) = address.raw();
        // SAFETY: `raw` is a valid address of `len` bytes.
        check(unsafe { libc::bind(fd.as_raw_fd(), ptr::from_ref(&raw).cast(), len) })?;
        // SAFETY: plain call.
        check(unsafe { libc::listen(fd.as_raw_fd(), libc::SOMAXCONN) })?;
        Ok(Self(fd))
    }

    /// Accepts the next connection; call it when the listener is readable. Refuses a process of
    /// another user and returns `None`.
    pub(crate) fn accept(&self) -> io::Result<Option<Socket>> {
        // SAFETY: no address is asked for.
        let fd = check(unsafe {
            libc::accept4(
                self.0.as_raw_fd(),
                ptr::null_mut(),
                ptr::null_mut(),
                libc::SOCK_CLOEXEC,
            )
        })?;
        // SAFETY: the descriptor was just made.
        let socket = Socket(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(socket.same_user()?.then_some(socket))
    }

    pub(crate) fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

/// The result of [`Socket::receive`].
#[derive(Debug)]
pub(crate) enum Received {
    /// A message of this many bytes, and its descriptors.
    Message(usize, Vec<OwnedFd>),
    /// The other end is closed.
    Closed,
}

impl Socket {
    /// Connects, if the other side belongs to the same user.
    pub(crate) fn connect(address: &Address) -> io::Result<Self> {
        let fd = new_socket()?;
        let (raw, len) = address.raw();
        // SAFETY: `raw` is a valid address of `len` bytes.
        check(unsafe { libc::connect(fd.as_raw_fd(), ptr::from_ref(&raw).cast(), len) })?;
        let socket = Self(fd);
        if socket.same_user()? {
            Ok(socket)
        } else {
            Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the other end belongs to another user",
            ))
        }
    }

    fn same_user(&self) -> io::Result<bool> {
        let mut credentials = MaybeUninit::<libc::ucred>::uninit();
        let mut len = mem::size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the buffer has `len` bytes.
        check(unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                credentials.as_mut_ptr().cast(),
                &mut len,
            )
        })?;
        // SAFETY: the call succeeded, so the kernel filled it.
        let credentials = unsafe { credentials.assume_init() };
        // SAFETY: always succeeds.
        Ok(credentials.uid == unsafe { libc::geteuid() })
    }

    pub(crate) fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Ends the connection for both ends, even if a child process holds a copy of the descriptor.
    pub(crate) fn hang_up(&self) {
        // SAFETY: plain call; it may fail if the other end is closed already.
        unsafe { libc::shutdown(self.0.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// Sends one message with at most [`DESCRIPTORS_PER_MESSAGE`] descriptors.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        assert!(
            fds.len() <= DESCRIPTORS_PER_MESSAGE,
            "too many descriptors for one message"
        );
        let mut part = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let mut control = ControlBuffer::new();
        // SAFETY: all-zero is a valid `msghdr`.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        if !fds.is_empty() {
            let data = mem::size_of_val(fds) as u32;
            message.msg_control = control.0.as_mut_ptr().cast();
            // SAFETY: pure arithmetic.
            message.msg_controllen = unsafe { libc::CMSG_SPACE(data) } as _;
            // SAFETY: the control buffer is large enough for one header and `data` bytes, and
            // aligned.
            unsafe {
                let header = libc::CMSG_FIRSTHDR(&message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(data) as _;
                let to = libc::CMSG_DATA(header).cast::<RawFd>();
                for (i, fd) in fds.iter().enumerate() {
                    ptr::write_unaligned(to.add(i), fd.as_raw_fd());
                }
            }
        }
        loop {
            // SAFETY: `message` points to live buffers.
            let sent = unsafe { libc::sendmsg(self.0.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
            if sent >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Receives one message into `buffer`; blocks unless the socket is readable.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut part = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        let mut control = ControlBuffer::new();
        // SAFETY: all-zero is a valid `msghdr`.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = mem::size_of_val(&control.0) as _;
        let received = loop {
            // SAFETY: `message` points to live buffers.
            let n =
                unsafe { libc::recvmsg(self.0.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) };
            if n >= 0 {
                break n as usize;
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::ConnectionReset => return Ok(Received::Closed),
                _ => return Err(error),
            }
        };
        let mut fds = Vec::new();
        // SAFETY: the kernel wrote well-formed headers into the control buffer; each descriptor is
        // new and ours.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(&message);
            while !header.is_null() {
                if (*header).cmsg_level == libc::SOL_SOCKET
                    && (*header).cmsg_type == libc::SCM_RIGHTS
                {
                    let data = libc::CMSG_DATA(header).cast::<RawFd>();
                    let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                    for i in 0..bytes / mem::size_of::<RawFd>() {
                        fds.push(OwnedFd::from_raw_fd(ptr::read_unaligned(data.add(i))));
                    }
                }
                header = libc::CMSG_NXTHDR(&message, header);
            }
        }
        if message.msg_flags & libc::MSG_CTRUNC != 0 {
            // The buffer holds the most descriptors of a message, so the process is out of
            // descriptors.
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "this process may not open as many files as it needs: raise its limit (ulimit -n)",
            ));
        }
        if message.msg_flags & libc::MSG_TRUNC != 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the message is larger than expected",
            ));
        }
        if received == 0 && fds.is_empty() {
            Ok(Received::Closed)
        } else {
            Ok(Received::Message(received, fds))
        }
    }
}

/// Room for one SCM_RIGHTS header, aligned as the kernel wants it.
struct ControlBuffer([u64; (DESCRIPTORS_PER_MESSAGE * mem::size_of::<RawFd>() + 64) / 8]);

impl ControlBuffer {
    fn new() -> Self {
        Self([0; (DESCRIPTORS_PER_MESSAGE * mem::size_of::<RawFd>() + 64) / 8])
    }
}

//! An address for NCCL's RAS service that no other process takes.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use rustix::net::sockopt::{set_socket_reuseaddr, set_socket_reuseport};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};

/// A port of the loopback interface, reserved while this value lives. The socket is bound but does not listen: NCCL
/// sets `SO_REUSEPORT` as this socket does, binds the same port, and gets every connection.
#[derive(Debug)]
pub struct AddressReservation {
    _socket: OwnedFd,
    address: SocketAddr,
}

impl AddressReservation {
    /// Returns the address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Reserves an address.
///
/// # Errors
/// The system has no free socket or port.
pub fn reserve_address() -> io::Result<AddressReservation> {
    let socket = socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    set_socket_reuseaddr(&socket, true)?;
    set_socket_reuseport(&socket, true)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    let address = SocketAddr::try_from(getsockname(&socket)?)?;
    Ok(AddressReservation {
        _socket: socket,
        address,
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use rustix::net::{accept, listen};

    use super::*;

    #[test]
    fn a_reserved_port_is_given_to_no_other_and_can_be_listened_at() {
        let one = reserve_address().unwrap();
        let other = reserve_address().unwrap();
        assert_ne!(one.address(), other.address());
        assert!(TcpStream::connect(one.address()).is_err());
        // As NCCL does it.
        let socket = socket_with(
            AddressFamily::INET,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        set_socket_reuseport(&socket, true).unwrap();
        set_socket_reuseaddr(&socket, true).unwrap();
        bind(&socket, &one.address()).unwrap();
        listen(&socket, 16).unwrap();
        for _ in 0..20 {
            let _client = TcpStream::connect(one.address()).unwrap();
            accept(&socket).unwrap();
        }
    }
}

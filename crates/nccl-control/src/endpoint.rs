//! The target address of a connection, in a form that both ends derive themselves: the connecting side from the address
//! it dialled, the listening side from its own socket.
//!
//! A handshake message is bound to this address, so that the message is valid at no other address: a process that
//! listens elsewhere cannot relay it.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::address::Address;

/// The address of a listener in canonical form: no scope, no IPv4 in IPv6, no symbolic link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Endpoint(String);

/// The maximum length of an endpoint in bytes, because it is part of a handshake message. Of a longer path, only the
/// end is compared.
const LONGEST: usize = 1024;

impl Endpoint {
    /// Returns the endpoint of `socket`, which was connected to `address`.
    pub(super) fn dialled(address: &Address, socket: impl AsFd) -> io::Result<Self> {
        if let Some(unix) = Self::unix(address) {
            return Ok(unix);
        }
        let peer = rustix::net::getpeername(socket)?;
        let peer = peer.ok_or(io::ErrorKind::NotConnected)?;
        Ok(Self::tcp(SocketAddr::try_from(peer)?))
    }

    /// Returns the address at which `socket`, accepted over TCP, was dialled, unless that was changed on the way.
    pub(super) fn of_accepted(socket: impl AsFd) -> io::Result<Self> {
        let own = rustix::net::getsockname(socket)?;
        Ok(Self::tcp(SocketAddr::try_from(own)?))
    }

    /// Returns the endpoint of a Unix socket that already exists.
    pub(super) fn unix(address: &Address) -> Option<Self> {
        match address {
            Address::Path(path) => Some(Self::path(path)),
            Address::Abstract(name) => Some(Self::new(format!("unix:@{name}"))),
            Address::Tcp(_) => None,
        }
    }

    fn path(path: &Path) -> Self {
        let whole = path.canonicalize().or_else(|_| std::path::absolute(path));
        let whole = whole.unwrap_or_else(|_| path.to_owned());
        Self::new(format!("unix:{}", whole.display()))
    }

    fn tcp(address: SocketAddr) -> Self {
        let plain = SocketAddr::new(address.ip().to_canonical(), address.port());
        Self::new(format!("tcp:{plain}"))
    }

    fn new(mut text: String) -> Self {
        if let Some(more) = text.len().checked_sub(LONGEST) {
            let cut = (more..text.len()).find(|at| text.is_char_boundary(*at));
            text.drain(..cut.unwrap_or(text.len()));
        }
        Self(text)
    }

    #[cfg(test)]
    pub(super) fn written(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::sanitize::name(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_one_form() {
        let tcp = |text: &str| Endpoint::tcp(text.parse().unwrap()).0;
        assert_eq!(tcp("10.0.0.5:4000"), "tcp:10.0.0.5:4000");
        assert_eq!(tcp("[::ffff:10.0.0.5]:4000"), "tcp:10.0.0.5:4000");
        assert_eq!(tcp("[fe80::1%3]:4000"), "tcp:[fe80::1]:4000");
        let directory = tempfile::tempdir().unwrap();
        let real = directory.path().canonicalize().unwrap();
        std::fs::create_dir(real.join("a")).unwrap();
        std::os::unix::fs::symlink(real.join("a"), real.join("b")).unwrap();
        std::fs::write(real.join("a/socket"), "").unwrap();
        let unix = |path: &str| Endpoint::unix(&Address::Path(real.join(path))).unwrap();
        assert_eq!(unix("b/socket"), unix("a/../a/socket"));
        assert_ne!(unix("b/socket"), unix("a/other"));
    }

    #[test]
    fn the_end_of_a_path_that_is_too_long_counts() {
        let long = |end: &str| Endpoint::new(format!("unix:/{}{end}", "ä/".repeat(900)));
        assert!(long("one").0.len() <= LONGEST);
        assert_eq!(long("one"), long("one"));
        assert_ne!(long("one"), long("two"));
    }
}

//! Unique ids: where the ranks of a communicator meet.
//!
//! As in NCCL, an id is a random number and a socket address: here the abstract Unix socket of the thread that
//! [`bootstrap::root`](super::bootstrap) runs in the process that created the id. The name of the socket contains the machine,
//! its boot and the network namespace, so that a rank that cannot reach the socket reports it immediately.

use std::fs;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use nccl_sys::{NCCL_UNIQUE_ID_BYTES, ncclUniqueId};

use super::debug::warn;
use super::environment;
use crate::code::{INVALID_ARGUMENT, INVALID_USAGE, Result, SYSTEM};
use crate::transport::Address;

const FAMILY: [u8; 2] = (libc::AF_UNIX as u16).to_ne_bytes();
const PREFIX: &str = "nccl-emulator/";
/// The magic of ids made from `NCCL_COMM_ID`: the same on every rank.
const FIXED_MAGIC: u64 = 0x0280_0280_0280_0280;

/// The contents of an `ncclUniqueId` of the emulator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UniqueId {
    /// Random; a connection with another magic belongs to another job.
    pub(crate) magic: u64,
    name: String,
}

/// Returns random bytes from the kernel.
pub(crate) fn random() -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is valid for its length.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    assert_eq!(got, 8, "getrandom gives 8 bytes at once");
    u64::from_ne_bytes(bytes)
}

/// The hash that NCCL computes of strings and ids (and prints as `commId`).
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(5381, |hash: u64, &byte| {
        (hash << 5).wrapping_add(hash) ^ u64::from(byte)
    })
}

/// Combines numbers into one from which they cannot be derived.
pub(crate) fn mix(numbers: &[u64]) -> u64 {
    numbers
        .iter()
        .fold(0x9e37_79b9_7f4a_7c15, |state, &number| {
            let x = (state ^ number).wrapping_mul(0xff51_afd7_ed55_8ccd);
            let x = (x ^ x >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
            x ^ x >> 29
        })
}

/// Returns the inode of one of this process's namespaces, 0 if the kernel does not provide it.
pub(crate) fn namespace(kind: &str) -> u64 {
    fs::metadata(format!("/proc/self/ns/{kind}")).map_or(0, |metadata| metadata.ino())
}

/// Identifies the machine, its last boot, and the network namespace.
fn here() -> &'static str {
    static HERE: OnceLock<String> = OnceLock::new();
    HERE.get_or_init(|| {
        let boot = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        format!(
            "{:08x}.{:x}",
            hash(boot.trim_ascii()) as u32,
            namespace("net")
        )
    })
}

/// Returns the id of `NCCL_COMM_ID`, if it is set and resolves to an address.
pub(crate) fn fixed() -> Result<Option<UniqueId>> {
    let Some(text) = environment::text("NCCL_COMM_ID") else {
        return Ok(None);
    };
    let Some(address) = address_of(&text) else {
        warn!(
            "Invalid NCCL_COMM_ID, please use format: <ipv4>:<port> or [<ipv6>]:<port> or <hostname>:<port>"
        );
        return Err(INVALID_ARGUMENT);
    };
    let address = address.to_string();
    // SAFETY: always succeeds.
    let user = unsafe { libc::geteuid() };
    let name = format!(
        "{PREFIX}{}/{user}/{:016x}",
        here(),
        hash(address.as_bytes())
    );
    Ok(Some(UniqueId {
        magic: FIXED_MAGIC,
        name,
    }))
}

/// Returns the address of `NCCL_COMM_ID`.
pub(crate) fn fixed_address() -> Option<SocketAddr> {
    environment::text("NCCL_COMM_ID").and_then(|text| address_of(&text))
}

/// Resolves a text of the form HOST:PORT or [IPv6]:PORT; of a list the first. As in NCCL, a missing port counts as -1, and of a
/// port that is too large only the low half counts.
fn address_of(text: &str) -> Option<SocketAddr> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            (host, leading_number(rest.strip_prefix(':').unwrap_or(rest)))
        }
        None => match text.split(',').next()?.split_once(':') {
            None => (text.split(',').next()?, -1),
            Some((host, "")) => (host, -1),
            Some((host, port)) => (host, leading_number(port)),
        },
    };
    if host.is_empty() {
        return None;
    }
    (host, port as u16).to_socket_addrs().ok()?.next()
}

/// Like `atoi`.
fn leading_number(text: &str) -> i64 {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let end = digits
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(digits.len());
    let number = digits[..end].parse().unwrap_or(0);
    if digits.len() < text.len() {
        -number
    } else {
        number
    }
}

impl UniqueId {
    /// Creates a new id.
    pub(crate) fn new() -> Self {
        let name = format!(
            "{PREFIX}{}/{}/{:016x}",
            here(),
            std::process::id(),
            random()
        );
        Self {
            magic: random(),
            name,
        }
    }

    /// Returns the id that all ranks with the same numbers derive; one of the numbers is their secret.
    pub(crate) fn derived(purpose: &str, numbers: &[u64]) -> Self {
        let magic = mix(numbers);
        let place = mix(&[magic, numbers.len() as u64]);
        Self {
            magic,
            name: format!("{PREFIX}{}/{purpose}/{place:016x}", here()),
        }
    }

    /// Returns the address of the socket.
    pub(crate) fn address(&self) -> Address {
        Address::new(&self.name)
    }

    /// Returns the name of the socket, for messages.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Encodes the id for C: the magic, then a `sockaddr_un`, then zeros.
    pub(crate) fn to_c(&self) -> ncclUniqueId {
        let mut bytes = [0u8; NCCL_UNIQUE_ID_BYTES];
        bytes[..8].copy_from_slice(&self.magic.to_ne_bytes());
        bytes[8..10].copy_from_slice(&FAMILY);
        bytes[11..11 + self.name.len()].copy_from_slice(self.name.as_bytes());
        ncclUniqueId {
            internal: bytes.map(|byte| byte as std::ffi::c_char),
        }
    }

    /// Decodes an id, and refuses one whose socket cannot be reached from here.
    pub(crate) fn from_c(id: &ncclUniqueId) -> Result<Self> {
        let bytes = id.internal.map(|byte| byte as u8);
        let name = bytes[11..]
            .split(|&byte| byte == 0)
            .next()
            .unwrap_or_default();
        let name = std::str::from_utf8(name)
            .ok()
            .filter(|name| bytes[8..10] == FAMILY && name.starts_with(PREFIX));
        let Some(name) = name else {
            warn!(
                "The unique id was not made by this emulator's ncclGetUniqueId: all ranks must use the same library"
            );
            return Err(INVALID_USAGE);
        };
        let place = name[PREFIX.len()..].split('/').next().unwrap_or_default();
        if place != here() {
            warn!(
                "The unique id was made on another host or in another network namespace ({place}, this is {}), which \
                 nccl-emulator cannot reach yet",
                here()
            );
            return Err(SYSTEM);
        }
        let magic = u64::from_ne_bytes(bytes[..8].try_into().expect("eight bytes"));
        Ok(Self {
            magic,
            name: name.to_owned(),
        })
    }
}

/// Returns the hash of a communicator, which NCCL prints as `commId`.
pub(crate) fn id_hash(id: &ncclUniqueId) -> u64 {
    hash(&id.internal.map(|byte| byte as u8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_the_way_through_c() {
        let id = UniqueId::new();
        assert_eq!(UniqueId::from_c(&id.to_c()), Ok(id.clone()));
        assert_ne!(id, UniqueId::new());
    }

    #[test]
    fn an_address_is_read_as_nccl_reads_it() {
        // Addresses as NVIDIA's library stores them in its unique ids.
        for (text, address) in [
            ("127.0.0.1:23456", "127.0.0.1:23456"),
            ("127.0.0.1", "127.0.0.1:65535"),
            ("127.0.0.1:", "127.0.0.1:65535"),
            ("127.0.0.1:-1", "127.0.0.1:65535"),
            ("127.0.0.1:1:2", "127.0.0.1:1"),
            ("127.0.0.1:x", "127.0.0.1:0"),
            ("127.0.0.1:99999", "127.0.0.1:34463"),
            ("127.0.0.1:80,10.0.0.1:3", "127.0.0.1:80"),
            ("[::1]:5", "[::1]:5"),
            ("[::1]", "[::1]:0"),
        ] {
            let found = address_of(text).map(|address| address.to_string());
            assert_eq!(found.as_deref(), Some(address), "{text}");
        }
        for text in ["", ":80", "[::1", "[]:5"] {
            assert_eq!(address_of(text), None, "{text}");
        }
    }

    #[test]
    fn ids_from_elsewhere_are_refused_with_a_reason() {
        assert_eq!(
            UniqueId::from_c(&ncclUniqueId::default()),
            Err(INVALID_USAGE)
        );
        let mut elsewhere = UniqueId::new();
        elsewhere.name = format!("{PREFIX}00000000.1/1/2");
        assert_eq!(UniqueId::from_c(&elsewhere.to_c()), Err(SYSTEM));
    }
}

//! Where this process's RAS thread is, and what it says of itself.

use std::net::Ipv4Addr;

use crate::nccl::unique_id::hash;
use crate::nccl::{debug, environment};

/// The version of CUDA that RAS reports.
pub(super) const CUDA: i32 = 13000;

/// The address of a process's RAS thread; all zero without one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) address: u32,
    pub(crate) gossip: u16,
    pub(crate) query: u16,
}

/// Returns the address of the emulated host.
pub(super) fn host() -> Ipv4Addr {
    match environment::text("NCCL_HOSTID") {
        Some(id) => {
            let [a, b, c, ..] = hash(id.as_bytes())
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .to_be_bytes();
            // Never the loopback address itself, nor a broadcast address.
            Ipv4Addr::new(127, 1 + a % 250, b, 1 + c % 250)
        }
        None => Ipv4Addr::LOCALHOST,
    }
}

/// Returns the time, formatted for people.
pub(super) fn timestamp() -> String {
    debug::timestamp(c"%F %T")
}

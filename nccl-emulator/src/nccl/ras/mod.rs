//! RAS: a thread of each process that reports the state of a job's ranks (NCCL 2.24 and newer).
//!
//! Clients connect to `NCCL_RAS_ADDR` (`localhost:28028`) of any process. That process queries all others, and answers for all
//! of them. `NCCL_RAS_ENABLE=0` turns RAS off. As in NCCL, the thread starts with the first communicator and runs until the
//! process ends.
//!
//! | module | contents |
//! |---|---|
//! | `service` | the thread: sockets and clock |
//! | `client` | the protocol of clients, as a value |
//! | `network` | keep-alives between processes, as a value |
//! | `peers` | the processes of a job |
//! | `report` | what a process tells of its communicators, and all of them together |
//! | `wire` | messages between processes |
//! | `text`, `json` | the answer |
//!
//! The processes find each other by their ports, which the bootstrap exchanges. NCCL passes a query on around a ring; here the
//! queried process connects to all others. A host that `NCCL_HOSTID` names has a separate address, `127.x.y.z`.

mod client;
mod json;
mod network;
mod peers;
mod query;
mod report;
mod service;
mod socket;
mod text;
mod wire;

use std::net::Ipv4Addr;
use std::sync::Arc;

use super::communicator::Communicator;
use super::environment;
use super::unique_id::hash;
use crate::transport::RankInfo;
use crate::version;
use peers::{Devices, Peer};

/// The version of CUDA that RAS reports.
const CUDA: i32 = 13000;

/// The address of a process's RAS thread; all zero without one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) address: u32,
    pub(crate) gossip: u16,
    pub(crate) query: u16,
}

/// Returns the address of this process's RAS thread, and starts the thread if necessary.
pub(crate) fn place() -> Place {
    let is_on = || environment::integer("NCCL_RAS_ENABLE").is_none_or(|value| value == 1);
    match version::is_at_least(2, 24, 0) && is_on() {
        true => service::place().unwrap_or_default(),
        false => Place::default(),
    }
}

/// Adds a communicator, whose ranks have met, to RAS.
pub(crate) fn join(communicator: &Arc<Communicator>) {
    let Some(session) = communicator.session() else {
        return;
    };
    report::add(communicator);
    service::add(session.infos().iter().filter_map(peer_of));
}

/// Removes a destroyed communicator from RAS.
pub(crate) fn leave(communicator: &Communicator) {
    report::remove(communicator);
}

/// Returns the process of a rank, if it has a RAS thread.
fn peer_of(info: &RankInfo) -> Option<Peer> {
    let (address, [gossip, query]) = (info.ras_address, info.ras_ports);
    let (mut cuda, mut nvml) = (Devices::default(), Devices::default());
    cuda.add(info.device);
    nvml.add((info.bus_id >> 12) as i32 - 1);
    (gossip != 0).then_some(Peer {
        process: info.process,
        address: Ipv4Addr::from_bits(address),
        gossip,
        query,
        pid: info.pid,
        cuda,
        nvml,
    })
}

/// Returns the address of the emulated host.
fn host() -> Ipv4Addr {
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

/// Returns the release, in RAS's format.
fn release() -> String {
    version::banner().replace("NCCL version ", "")
}

/// Returns the time, formatted for people.
fn timestamp() -> String {
    super::debug::timestamp(c"%F %T")
}

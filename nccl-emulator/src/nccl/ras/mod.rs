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
//! | `place` | where this process's RAS thread is, and what it says of itself |
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
mod place;
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
use crate::transport::RankInfo;
use crate::version;
use peers::{Devices, Peer};
pub(crate) use place::Place;

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

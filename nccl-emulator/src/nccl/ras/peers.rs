//! The processes of a job, as one of their RAS threads knows them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};

/// The number of a process: random, and the same for all of its ranks.
pub(super) type ProcessId = u64;

/// The devices of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Devices(pub(super) [u64; 4]);

impl Devices {
    /// Adds a device.
    pub(super) fn add(&mut self, device: i32) {
        if let Ok(device) = usize::try_from(device)
            && let Some(word) = self.0.get_mut(device / 64)
        {
            *word |= 1 << (device % 64);
        }
    }

    /// Adds the devices of another set.
    fn merge(&mut self, other: &Self) {
        for (word, other) in self.0.iter_mut().zip(other.0) {
            *word |= other;
        }
    }

    /// Returns the number of devices.
    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns the devices, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.0.len() * 64).filter(|device| self.0[device / 64] >> (device % 64) & 1 != 0)
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, device) in self.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(f, "{comma}{device}")?;
        }
        Ok(())
    }
}

/// A process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) process: ProcessId,
    pub(super) address: Ipv4Addr,
    /// The port of its datagrams.
    pub(super) gossip: u16,
    /// The port at which it answers queries of other processes.
    pub(super) query: u16,
    pub(super) pid: u32,
    /// Its devices, as CUDA counts them in that process and as NVML counts them on the host.
    pub(super) cuda: Devices,
    pub(super) nvml: Devices,
}

impl Peer {
    /// Returns where its datagrams go.
    pub(super) fn gossip_address(&self) -> SocketAddrV4 {
        SocketAddrV4::new(self.address, self.gossip)
    }

    /// Returns where it answers queries.
    pub(super) fn query_address(&self) -> SocketAddrV4 {
        SocketAddrV4::new(self.address, self.query)
    }
}

/// As RAS describes a process.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            pid,
            address,
            cuda,
            nvml,
            ..
        } = self;
        let plural = if cuda.count() > 1 { "s" } else { "" };
        write!(
            f,
            "Process {pid} on node {address} managing GPU{plural} {cuda}"
        )?;
        match cuda == nvml {
            true => Ok(()),
            false => write!(f, " (NVML {nvml})"),
        }
    }
}

/// All processes that were ever met, and those that are considered dead.
#[derive(Debug, Clone, Default)]
pub(super) struct Peers {
    pub(super) all: BTreeMap<ProcessId, Peer>,
    pub(super) dead: BTreeSet<ProcessId>,
}

/// The most processes of a job. More are not taken in.
const MOST: usize = 4096;

impl Peers {
    /// Adds a process, or devices of a known one. Returns what changed.
    pub(super) fn add(&mut self, peer: Peer) -> Change {
        if let Some(known) = self.all.get_mut(&peer.process) {
            let before = (known.cuda, known.nvml);
            known.cuda.merge(&peer.cuda);
            known.nvml.merge(&peer.nvml);
            return match before == (known.cuda, known.nvml) {
                true => Change::None,
                false => Change::Devices,
            };
        }
        if self.all.len() >= MOST {
            return Change::None;
        }
        self.all.insert(peer.process, peer);
        Change::New
    }

    /// Returns a number that differs between different sets of processes.
    pub(super) fn hash(&self) -> u64 {
        let of_peer = |peer: &Peer| {
            let words = peer.cuda.0.into_iter().chain(peer.nvml.0);
            words.fold(peer.process, |hash, word| hash.rotate_left(7) ^ word)
        };
        let alive = self.all.values().map(of_peer);
        let dead = self.dead.iter().map(|process| process.wrapping_add(1));
        alive.chain(dead).fold(0, |hash: u64, number| {
            hash.wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .wrapping_add(number)
        })
    }

    /// Returns the processes that are not considered dead, in the order of the ring: by host and process.
    pub(super) fn ring(&self) -> Vec<ProcessId> {
        let mut ring: Vec<&Peer> = self.all.values().collect();
        ring.retain(|peer| !self.dead.contains(&peer.process));
        ring.sort_by_key(|peer| (peer.address, peer.pid, peer.process));
        ring.into_iter().map(|peer| peer.process).collect()
    }
}

/// What an addition changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    None,
    /// A known process has more devices.
    Devices,
    /// A process was not known.
    New,
}

//! Memory of peers that a rank's device loads from and stores to (LSA: load/store accessible), and the teams of ranks for which
//! that holds.

use std::ffi::c_void;
use std::sync::Arc;

use cuda_emulator::memory::ipc;
use nccl_sys::{ncclComm_t, ncclTeam_t, ncclWindow_t};

use super::nodes::nodes;
use super::state::{Communicator, peek};
use super::window::{WINDOWS, Window};
use crate::code::{INTERNAL, INVALID_ARGUMENT, Result, UNHANDLED_CUDA};
use crate::nccl::debug::warn;

/// A set of ranks: `rank + n * stride` in the communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Team {
    /// All ranks.
    World,
    /// The ranks whose memory this rank's device can access: those of its node.
    Lsa,
    /// The ranks of the same place in their nodes.
    Rail,
}

impl Communicator {
    /// Returns a team, as this rank sees it.
    pub(crate) fn team(&self, team: Team) -> ncclTeam_t {
        let lsa = self.lsa_size();
        match team {
            Team::World => ncclTeam_t {
                nRanks: self.ranks,
                rank: self.rank,
                stride: 1,
            },
            Team::Lsa => ncclTeam_t {
                nRanks: lsa,
                rank: self.rank % lsa,
                stride: 1,
            },
            Team::Rail => ncclTeam_t {
                nRanks: self.ranks / lsa,
                rank: self.rank / lsa,
                stride: lsa,
            },
        }
    }

    /// Returns the number of ranks of a node if all nodes have as many ranks, which follow each other; else 1.
    fn lsa_size(&self) -> i32 {
        let Some(session) = self.session() else {
            return 1;
        };
        let nodes = nodes(session);
        let first = nodes.iter().take_while(|&&node| node == 0).count();
        let regular = nodes.len().is_multiple_of(first.max(1))
            && (nodes.iter().enumerate()).all(|(rank, &node)| node == rank / first.max(1));
        if regular { first as i32 } else { 1 }
    }
}

fn found(handle: ncclWindow_t) -> Result<(Arc<Communicator>, Arc<Window>)> {
    let window = WINDOWS.get(handle.cast::<c_void>());
    let communicator = |window: &Arc<Window>| {
        let handle: ncclComm_t = std::ptr::with_exposed_provenance_mut(window.communicator);
        peek(handle)
    };
    let found = window.and_then(|window| Some((communicator(&window)?, window)));
    found.ok_or_else(|| {
        warn!("Device object does not exist in shadow pool.");
        INTERNAL
    })
}

/// Returns the address at which the window's device reaches the part of a rank of its LSA team.
pub(crate) fn lsa_pointer(handle: ncclWindow_t, offset: u64, lsa_rank: i32) -> Result<u64> {
    let (communicator, window) = found(handle)?;
    let team = communicator.team(Team::Lsa);
    if !(0..team.nRanks).contains(&lsa_rank) {
        warn!(
            "The provided lsaRank {lsa_rank} is not in the valid lsaSize of [0,{}] for the provided window {handle:p}.",
            team.nRanks
        );
        return Err(INVALID_ARGUMENT);
    }
    let rank = communicator.rank - team.rank + lsa_rank;
    Ok(window.reach(&communicator, rank as usize)? + offset)
}

/// As [`lsa_pointer`], for a rank of the communicator; 0 for one of another team.
pub(crate) fn peer_pointer(handle: ncclWindow_t, offset: u64, peer: i32) -> Result<u64> {
    let (communicator, window) = found(handle)?;
    if !(0..communicator.ranks).contains(&peer) {
        warn!(
            "peer {peer} is not within valid range of ranks {}.",
            communicator.ranks
        );
        return Err(INVALID_ARGUMENT);
    }
    let team = communicator.team(Team::Lsa);
    let first = communicator.rank - team.rank;
    if !(first..first + team.nRanks).contains(&peer) {
        return Ok(0);
    }
    Ok(window.reach(&communicator, peer as usize)? + offset)
}

impl Window {
    /// Returns the address of a rank's part, for this rank's device. It is there for as long as the window is.
    fn reach(&self, communicator: &Communicator, rank: usize) -> Result<u64> {
        if rank == communicator.rank as usize {
            return Ok(self.address);
        }
        let session = communicator.session().ok_or(INTERNAL)?;
        let mut reached = self.reached.lock();
        if let Some(part) = reached.get(&rank) {
            return Ok(part.address());
        }
        let pool = (session.info(rank).pid, session.shared_pool(rank));
        let opened = ipc::open_part(pool, self.parts[rank], communicator.device);
        let part = opened.map_err(|error| {
            warn!("Cuda failure {} for the window of rank {rank}", error.0);
            UNHANDLED_CUDA
        })?;
        let address = part.address();
        reached.insert(rank, part);
        Ok(address)
    }
}

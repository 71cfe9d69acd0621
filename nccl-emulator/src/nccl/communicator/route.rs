//! The route of the data between two ranks in NCCL: see [`super::peers`].

use std::sync::OnceLock;

use crate::nccl::environment;
use crate::transport::RankInfo;

/// The route of the data between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// Into the memory of the other device.
    PeerToPeer,
    /// Through memory of the host.
    SharedMemory,
    /// Over sockets.
    Network,
}

/// Returns the routes from a rank to all ranks of a communicator. In NCCL the environments of two ranks decide their
/// route inside a host; here this process's environment stands for both.
pub(super) fn routes(infos: &[RankInfo], own: usize) -> Box<[Route]> {
    static SWITCHED_OFF: OnceLock<[bool; 2]> = OnceLock::new();
    let [p2p, shared_memory] = *SWITCHED_OFF
        .get_or_init(|| ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"].map(environment::switch));
    let to = |info: &RankInfo| match () {
        () if !share_a_host(&infos[own], info) => Route::Network,
        () if !p2p => Route::PeerToPeer,
        () if !shared_memory => Route::SharedMemory,
        () => Route::Network,
    };
    infos.iter().map(to).collect()
}

/// Whether two ranks run on one host.
pub(super) fn share_a_host(one: &RankInfo, other: &RankInfo) -> bool {
    one.host_hash == other.host_hash
}

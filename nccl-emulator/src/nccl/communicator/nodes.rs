//! The nodes of the ranks.

use super::session::Session;

/// Returns the node of each rank, numbered by first appearance.
pub(super) fn nodes(session: &Session) -> Vec<usize> {
    let mut hosts: Vec<u64> = Vec::new();
    let node = |info: &crate::transport::RankInfo| {
        hosts
            .iter()
            .position(|&host| host == info.host_hash)
            .unwrap_or_else(|| {
                hosts.push(info.host_hash);
                hosts.len() - 1
            })
    };
    session.infos().iter().map(node).collect()
}

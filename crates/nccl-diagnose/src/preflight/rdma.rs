//! Network adapters with RDMA, as the kernel shows them.

use nccl_base::system::System;
use serde::{Deserialize, Serialize};

/// One port of an adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Port {
    pub(super) adapter: String,
    pub(super) port: u64,
    pub(super) active: bool,
    pub(super) ethernet: bool,
    /// The indices of its addresses (GIDs) that are not all zero.
    pub(super) gids: Vec<u64>,
}

const WHERE: &str = "/sys/class/infiniband";

/// The most GIDs of a port that are read: the tables for RoCE have up to 256, most of them empty.
const MOST_GIDS: usize = 256;

pub(super) fn gather(system: &System) -> Vec<Port> {
    let mut found = Vec::new();
    for adapter in system.names(WHERE) {
        let ports = format!("{WHERE}/{adapter}/ports");
        for port in system.names(&ports) {
            let path = format!("{ports}/{port}");
            let Ok(number) = port.parse() else { continue };
            // `4: ACTIVE`.
            let state = system.text(format!("{path}/state")).unwrap_or_default();
            let link = system.text(format!("{path}/link_layer"));
            let gids = format!("{path}/gids");
            let is_set = |index: &u64| {
                let gid = system.text(format!("{gids}/{index}")).unwrap_or_default();
                gid.contains(|c: char| c.is_ascii_hexdigit() && c != '0')
            };
            let mut numbers: Vec<u64> = system
                .names(&gids)
                .iter()
                .filter_map(|name| name.parse().ok())
                .collect();
            numbers.sort_unstable();
            numbers.truncate(MOST_GIDS);
            numbers.retain(is_set);
            found.push(Port {
                adapter: adapter.clone(),
                port: number,
                active: state.ends_with("ACTIVE") && !state.contains("_"),
                ethernet: link.as_deref() == Some("Ethernet"),
                gids: numbers,
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::tests::Tree;

    #[test]
    fn adapters_are_found_with_their_ports_and_addresses() {
        let tree = Tree::new();
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        tree.write(&format!("{port}/state"), "4: ACTIVE\n");
        tree.write(&format!("{port}/link_layer"), "Ethernet\n");
        tree.write(
            &format!("{port}/gids/0"),
            "fe80:0000:0000:0000:0e42:a1ff:fe00:0001\n",
        );
        tree.write(
            &format!("{port}/gids/1"),
            "0000:0000:0000:0000:0000:0000:0000:0000\n",
        );
        tree.write(
            &format!("{port}/gids/3"),
            "0000:0000:0000:0000:0000:ffff:0a00:0001\n",
        );
        tree.write("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n");
        let found = gather(&System::fake(tree.path(), &[]));
        assert_eq!(found.len(), 2);
        assert!(found[0].active && found[0].ethernet && !found[1].active);
        assert_eq!(found[0].gids, [0, 3]);
    }

    #[test]
    fn an_address_at_the_end_of_a_long_table_is_found() {
        let tree = Tree::new();
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        tree.write(&format!("{port}/state"), "4: ACTIVE\n");
        for index in 0..256 {
            let last = u8::from(index == 255);
            tree.write(
                &format!("{port}/gids/{index}"),
                &format!("0000:0000:0000:0000:0000:0000:0000:000{last}\n"),
            );
        }
        let found = gather(&System::fake(tree.path(), &[]));
        assert_eq!(found[0].gids, [255]);
    }
}

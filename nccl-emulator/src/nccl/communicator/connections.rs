//! The connections of a rank: see [`super::connect`].

use crate::transport::Direction;

/// Bits of [`RankBlock::algorithms`](crate::transport::RankBlock::algorithms).
pub(crate) mod algorithm {
    /// The ring, which every collective uses here.
    pub(crate) const RING: u32 = 1;
}

/// The connections of this rank.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    /// By peer: bit 0 for sending, bit 1 for receiving.
    pub(super) peers: Vec<u8>,
    pub(super) algorithms: u32,
}

/// Returns the bit of a direction.
pub(super) fn bit(direction: Direction) -> u8 {
    match direction {
        Direction::Send => 1,
        Direction::Receive => 2,
    }
}

impl Connections {
    /// Whether a message can be exchanged with `peer` without waiting.
    pub(crate) fn has(&self, peer: usize, direction: Direction) -> bool {
        self.peers
            .get(peer)
            .is_some_and(|bits| bits & bit(direction) != 0)
    }

    /// Whether a collective can run without waiting.
    pub(crate) fn has_algorithm(&self, algorithm: u32) -> bool {
        self.algorithms & algorithm != 0
    }
}

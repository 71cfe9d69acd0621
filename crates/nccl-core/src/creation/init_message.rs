//! The first message that each rank sends when a communicator is to be made.

use nccl_base::wire::{self, bytes, clean};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::peers::InitSupervisor;

/// The first message of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InitMessage {
    #[serde(deserialize_with = "clean")]
    pub(super) failed: Option<String>,
    /// The encoded fault of a rank that failed.
    #[serde(with = "bytes")]
    pub(super) fault: Vec<u8>,
    /// The rank's preference for a launch mode.
    pub(super) mode: u8,
    /// The number of tokens.
    pub(super) roots: u64,
    /// The obstacle to `BlockingChild` on this rank.
    #[serde(deserialize_with = "clean")]
    pub(super) obstacle: Option<String>,
    /// The sealed token of rank 0, if it has one already.
    #[serde(with = "bytes")]
    pub(super) token: Vec<u8>,
    /// The communicator that the rank passes to be grown: its key and its number of ranks.
    pub(super) parent: Option<(String, usize)>,
    /// Why this rank cannot use `ncclCommGrow`.
    #[serde(deserialize_with = "clean")]
    pub(super) cannot_grow: Option<String>,
}

impl InitMessage {
    /// Returns the message of a rank that cannot take part.
    pub(super) fn failed(error: &Error, init_supervisor: &dyn InitSupervisor) -> Self {
        Self {
            failed: Some(error.kind().to_string()),
            fault: init_supervisor.encode_failure(error),
            ..Self::default()
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        wire::encode(self)
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        wire::decode(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_says_survives_the_way_through_bytes() {
        for parent in [None, Some((String::from("0f"), 3))] {
            let messages = InitMessage {
                failed: Some(String::from("no memory")),
                fault: vec![4, 5],
                mode: 1,
                roots: 2,
                token: vec![1, 2, 3],
                parent,
                cannot_grow: Some(String::from("it is too old")),
                obstacle: Some(String::from("a variable")),
            };
            let bytes = messages.encode();
            assert_eq!(InitMessage::decode(&bytes).as_ref(), Some(&messages));
            assert_eq!(InitMessage::decode(&bytes[..bytes.len() - 1]), None);
        }
    }
}

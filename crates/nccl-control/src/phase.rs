//! The phase of a rank, set by its program (`World::phase`).

use nccl_base::wire::Clean;
use serde::{Deserialize, Serialize};

/// The phase of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    /// The rank has joined, and has set no phase yet.
    Joined,
    /// The phase that the rank has set.
    Named(String),
}

impl Phase {
    /// Returns the name for messages.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Joined => "joined",
            Self::Named(name) => name,
        }
    }
}

impl Clean for Phase {
    fn clean(&mut self) {
        if let Self::Named(name) = self {
            name.clean();
        }
    }
}

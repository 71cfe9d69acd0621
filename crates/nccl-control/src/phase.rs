//! What a rank's program says that it does (`World::phase`).

use nccl_base::wire::Clean;
use serde::{Deserialize, Serialize};

/// What a rank does, as far as it has said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    /// It has come, and has said nothing yet.
    Joined,
    /// This.
    Said(String),
}

impl Phase {
    /// As people are told.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Joined => "joined",
            Self::Said(name) => name,
        }
    }
}

impl Clean for Phase {
    fn clean(&mut self) {
        if let Self::Said(name) = self {
            name.clean();
        }
    }
}

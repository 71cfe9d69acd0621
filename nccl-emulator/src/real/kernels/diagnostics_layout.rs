//! Where the fields of the structures of NCCL's diagnostics are: see [`super::diagnostics`].

use super::asked::{Asked, Field, Mismatch, Types, fields};

fields! {
    /// `ncclDiagP2pSlot`.
    Slot {
        written = "writeValue" word,
        verified = "verifyValue" word,
        pattern = "readPattern" word,
    }
}

fields! {
    /// `ncclDiagP2pRemoteOp`: an access to a peer's slot.
    Access {
        slots = "remoteSlots" word,
        source = "srcRank" half,
        destination = "dstRank" half,
        index = "srcSlot" half,
    }
}

/// Where the fields are; none before 2.32.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub(super) slot: Slot,
    pub(super) access: Access,
}

impl Layout {
    pub(super) fn new(types: &dyn Types) -> Result<Option<Self>, Mismatch> {
        if types.size_of("ncclDiagP2pSlot").is_err() {
            return Ok(None);
        }
        Ok(Some(Self {
            slot: Slot::ask(types, "ncclDiagP2pSlot")?,
            access: Access::ask(types, "ncclDiagP2pRemoteOp")?,
        }))
    }
}

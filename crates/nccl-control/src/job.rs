//! What all ranks of one launch have in common.

use super::secret::Secret;

/// What all ranks of one launch have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) epoch: u64,
    pub(super) secret: Option<Secret>,
    /// Addresses are translated on the way, and tell nothing.
    pub(super) translated: bool,
}

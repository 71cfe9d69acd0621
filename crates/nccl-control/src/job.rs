//! What all ranks of one launch have in common.

use super::limits;
use super::secret::Secret;
use crate::error::{Error, Result};

/// What all ranks of one launch have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) epoch: u64,
    pub(super) secret: Option<Secret>,
    /// Addresses are translated on the way, and tell nothing.
    pub(super) translated: bool,
}

impl Job {
    pub(super) fn check(&self) -> Result<()> {
        if let Some(own) = &self.secret {
            limits::secret("the job's secret", own.bytes()).map_err(Error::rendezvous)?;
        }
        limits::job(&self.name, self.epoch).map_err(Error::rendezvous)
    }
}

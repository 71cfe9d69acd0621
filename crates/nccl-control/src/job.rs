//! The common settings of all ranks of one launch.

use super::limits;
use super::secret::Secret;
use crate::error::{Error, Result};

/// The common settings of all ranks of one launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) generation: u64,
    pub(super) secret: Option<Secret>,
    /// Whether addresses are translated on the way and therefore not compared.
    pub(super) translated: bool,
}

impl Job {
    pub(super) fn check(&self) -> Result<()> {
        if let Some(own) = &self.secret {
            limits::secret("the job's secret", own.bytes()).map_err(Error::rendezvous)?;
        }
        limits::job(&self.name, self.generation).map_err(Error::rendezvous)
    }
}

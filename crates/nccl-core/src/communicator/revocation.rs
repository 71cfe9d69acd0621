//! The state of a revocation.

use std::sync::atomic::AtomicBool;

use super::handle::RawComm;
use crate::sync::Mutex;

/// The state of a communicator's revocation.
#[derive(Default)]
pub(crate) struct Revocation {
    /// Whether this rank's program asked for it.
    pub(super) wanted: AtomicBool,
    /// NCCL's pointer to the revoked communicator.
    pub(super) kept: Mutex<Option<RawComm>>,
}

//! Whether a communicator was revoked.

use std::sync::atomic::AtomicBool;

use super::handle::RawComm;
use crate::sync::Mutex;

/// What a communicator knows of its revocation.
#[derive(Default)]
pub(crate) struct Revocation {
    /// This rank's program wants it.
    pub(super) wanted: AtomicBool,
    /// What is left of it for NCCL.
    pub(super) kept: Mutex<Option<RawComm>>,
}

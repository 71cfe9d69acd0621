//! A pool as seen in this process: our own, or a peer's that was imported.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Span;
use crate::violations::Violation;

/// A mapped pool. The memory stays mapped while this lives.
#[derive(Debug)]
pub(crate) struct Mapping {
    data: *mut u8,
}

// SAFETY: the mapping is plain shared memory whose table is read through atomics; the data is only handed out as a raw
// pointer.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Why a peer's pool could not be mapped.
#[derive(Debug, thiserror::Error)]
#[error("a peer's device memory cannot be mapped: {0}")]
pub(crate) struct ImportError(String);

/// Maps a peer's pool, once per process: the same token gives the same mapping, and the token of an own pool gives its
/// own shadow.
///
/// # Errors
/// The descriptor is not a pool of this version of the emulator, or the host refuses to map it.
pub(crate) fn import(fd: OwnedFd, token: u128) -> Result<Arc<Mapping>, ImportError> {
    let _ = (fd, token);
    todo!()
}

impl Mapping {
    /// Where the span lies in this process, if it may be used now: allocated, not freed, inside its allocation.
    ///
    /// # Errors
    /// What is wrong, naming the allocation.
    pub(crate) fn view(&self, span: &Span) -> Result<*mut u8, Violation> {
        let _ = (span, self.data);
        todo!()
    }

    /// Whether the span may still be used: ask after the copy.
    ///
    /// # Errors
    /// What is wrong, naming the allocation.
    pub(crate) fn still_valid(&self, span: &Span) -> Result<(), Violation> {
        let _ = span;
        todo!()
    }
}

//! The first handle of a new communicator, for the program.

use std::sync::Arc;

use crate::communicator::{Communicator, Inner};
use crate::forked::Resident;
use crate::supervision::sentinel;

/// Returns the first handle of a new communicator, which the sentinel watches from now on.
pub(super) fn handed_out(inner: Arc<Inner>) -> Communicator {
    // Fails only for a communicator that was made elsewhere; for others the monitor runs already.
    if let Err(error) = sentinel::watch(&inner) {
        tracing::error!(name: "nccl.no_thread", target: "nccl", what = "that looks for calls that do not come back", comm = &*inner.name, %error, "nobody looks for calls that do not come back");
    }
    Communicator {
        stream: Resident::new(Arc::clone(&inner.stream)),
        timeout: inner.timeouts.operation,
        inner: Resident::new(inner),
    }
}

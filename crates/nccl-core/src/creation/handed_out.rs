//! The first handle of a communicator that was made, for the program.

use std::sync::Arc;

use crate::communicator::{Communicator, Inner};
use crate::forked::Resident;
use crate::supervision::sentinel;

/// The handle of one that was just made, which somebody looks after from now on.
pub(super) fn handed_out(inner: Arc<Inner>) -> Communicator {
    // Its threads run, so that it cannot fail, but for one that was made elsewhere or by a split.
    if let Err(error) = sentinel::watch(&inner) {
        tracing::error!(name: "nccl.no_thread", target: "nccl", what = "that looks for calls that do not come back", comm = &*inner.name, %error, "nobody looks for calls that do not come back");
    }
    Communicator {
        stream: Resident::new(Arc::clone(&inner.stream)),
        limit: inner.timeouts.operation,
        inner: Resident::new(inner),
    }
}

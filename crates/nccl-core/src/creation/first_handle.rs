//! The first handle of a new communicator, for the program.

use std::sync::Arc;

use crate::communicator::{Communicator, Inner};
use crate::forked::ForkGuarded;
use crate::supervision::stuck_call_monitor;

/// Returns the first handle of a new communicator, which the stuck-call monitor watches from now on.
pub(super) fn first_handle(inner: Arc<Inner>) -> Communicator {
    // Fails only for a communicator that was made elsewhere; for others the monitor already runs.
    if let Err(error) = stuck_call_monitor::watch(&inner) {
        tracing::error!(name: "nccl.no_thread", target: "nccl", what = "that monitors stuck calls", comm = &*inner.name, %error, "stuck calls are not found");
    }
    Communicator {
        stream: ForkGuarded::new(Arc::clone(&inner.stream)),
        timeout: inner.timeouts.operation,
        config: None,
        inner: ForkGuarded::new(inner),
    }
}

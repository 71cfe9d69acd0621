//! A group of non-blocking communicators that runs, or waits to run, in the background, as its communicators and the
//! timer see it. `group` has what it is.

use std::sync::Arc;

/// See the module.
pub(crate) trait Background: Send + Sync {
    /// Whether nobody has begun with it.
    fn is_waiting(&self) -> bool;

    /// Moves it on: in this thread if it waits for nothing.
    fn poll(self: Arc<Self>);

    /// Begins with it if it has waited long enough. The timer's.
    fn start_if_due(self: Arc<Self>);

    /// Drops it if nobody has begun; otherwise waits until it is over. What ends one communicator (an
    /// abort, a revoke) ends the whole group, as in NCCL: what one waits for may be what another one
    /// is in. Those that are through with it are left alone.
    fn cancel(&self);
}

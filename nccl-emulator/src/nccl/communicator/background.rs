//! The interface by which communicators and the timer use a background group of non-blocking communicators. `group`
//! implements it.

use std::sync::Arc;

/// See the module.
pub(crate) trait Background: Send + Sync {
    /// Whether the group has not begun.
    fn is_waiting(&self) -> bool;

    /// Starts the group, in this thread if it does not wait.
    fn poll(self: Arc<Self>);

    /// Starts the group if it has waited long enough. Called by the timer.
    fn start_if_due(self: Arc<Self>);

    /// Drops the group if it has not begun; otherwise waits until it is over. The end of one communicator
    /// (an abort, a revoke) ends the whole group, as in NCCL: its communicators may wait for one another.
    /// Communicators that are done with the group are not affected.
    fn cancel(&self);
}

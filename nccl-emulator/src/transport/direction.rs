//! The direction of the data between two ranks.

/// The direction of a message, as seen by the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    /// The owner is the source.
    Send,
    /// The owner is the destination.
    Receive,
}

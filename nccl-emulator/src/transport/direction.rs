//! Which way the data of a pair of ranks goes.

/// Which half of a pair's traffic, as seen by its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    /// The owner is the source.
    Send,
    /// The owner is the destination.
    Receive,
}

//! The result of a shrink.

use std::fmt;

use crate::communicator::Communicator;

/// The result of a shrink.
///
/// ```
/// # fn example(shrunk: nccl::Shrunk) {
/// println!("{} ranks are left: {}", shrunk.communicator.world_size(), shrunk.way);
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Shrunk {
    /// The communicator of the remaining ranks, in their old order.
    pub communicator: Communicator,
    /// How it was made; the same on all ranks.
    pub way: ShrinkWay,
}

/// How a shrink was done.
///
/// ```
/// # fn example(way: &nccl::ShrinkWay) {
/// if let nccl::ShrinkWay::Anew { why, .. } = way {
///     println!("ncclCommShrink was not used: {why}");
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShrinkWay {
    /// By `ncclCommShrink`.
    Native,
    /// As a new communicator, from a token of its own.
    #[non_exhaustive]
    Anew {
        /// Why `ncclCommShrink` was not possible.
        why: String,
    },
}

impl fmt::Display for ShrinkWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native => f.write_str("by ncclCommShrink"),
            Self::Anew { why } => write!(f, "as a new communicator, because {why}"),
        }
    }
}

//! The result of a shrink.

use std::fmt;

use crate::communicator::Communicator;

/// The result of [`Communicator::shrink`] and [`Communicator::grow`].
///
/// ```
/// # fn example(made: nccl::Resized) {
/// println!("{} ranks now: {}", made.communicator.world_size(), made.way);
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Resized {
    /// The new communicator: of the remaining ranks in their old order, or of all ranks of the world.
    pub communicator: Communicator,
    /// How the communicator was made; the same on all ranks.
    pub way: ResizeWay,
}

/// How a communicator was made smaller or larger.
///
/// ```
/// # fn example(way: &nccl::ResizeWay) {
/// if let nccl::ResizeWay::Anew { why, .. } = way {
///     println!("NCCL's own call was not used: {why}");
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResizeWay {
    /// With `ncclCommShrink` or `ncclCommGrow`.
    Native,
    /// As a new communicator, with a token of its own.
    #[non_exhaustive]
    Anew {
        /// Why NCCL's own call was not possible.
        why: String,
    },
}

impl fmt::Display for ResizeWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native => f.write_str("by NCCL's own call"),
            Self::Anew { why } => write!(f, "as a new communicator, because {why}"),
        }
    }
}

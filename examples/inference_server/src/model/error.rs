//! What can go wrong, with the cause and the remedy.

use std::path::PathBuf;

use nccl::cudarc::driver::DriverError;

/// As everywhere.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model cannot be had, or a step not be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file of the weights.
    #[error("{}: {reason}", path.display())]
    Weights {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// A model whose numbers do not fit together.
    #[error("a model with {field} = {value} does not work: {reason}")]
    Config {
        /// The name of the number.
        field: &'static str,
        /// What it is.
        value: usize,
        /// What it has to be.
        reason: String,
    },
    /// A number of ranks that the model cannot be shared by.
    #[error("{ranks} ranks cannot share {parts}: take {works} ranks")]
    Ranks {
        /// How many there are.
        ranks: usize,
        /// What of the model they would have to share: `8 heads and 8 experts`.
        parts: String,
        /// The numbers that work: `1, 2 or 4`.
        works: String,
    },
    /// A step that cannot be taken; nothing was changed, and no other rank was asked for anything.
    #[error("row {row} of a step of {rows}: {reason}")]
    Step {
        /// Which of the rows.
        row: usize,
        /// How many there are.
        rows: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// What cannot be used: settings, a corpus, arguments.
    #[error("{0}")]
    Unusable(String),
    /// An operation of the communicator, with the root cause where there is one.
    #[error(transparent)]
    Nccl(#[from] nccl::Error),
    /// A copy to or from the device.
    #[error("CUDA: {0}")]
    Cuda(#[from] DriverError),
    /// Arithmetic.
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
}

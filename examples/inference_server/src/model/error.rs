//! Errors, with their cause and remedy.

use std::path::PathBuf;

use nccl::cudarc::driver::DriverError;

/// As everywhere.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model cannot be loaded, or a step cannot be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An unusable file of weights.
    #[error("{}: {reason}", path.display())]
    Weights {
        /// The path of the file.
        path: PathBuf,
        /// The problem, and what to do.
        reason: String,
    },
    /// A model with an invalid or inconsistent configuration.
    #[error("a model with {field} = {value} does not work: {reason}")]
    Config {
        /// The name of the field.
        field: &'static str,
        /// The invalid value.
        value: usize,
        /// The requirement.
        reason: String,
    },
    /// A number of ranks that cannot share the model.
    #[error("{ranks} ranks cannot share {parts}: take {works} ranks")]
    Ranks {
        /// The number of ranks.
        ranks: usize,
        /// The parts of the model that the ranks would share: `8 heads and 8 experts`.
        parts: String,
        /// The numbers that work: `1, 2 or 4`.
        works: String,
    },
    /// An invalid step. Nothing has changed, and no message was sent to other ranks.
    #[error("row {row} of a step of {rows}: {reason}")]
    Step {
        /// The index of the row.
        row: usize,
        /// The number of rows.
        rows: usize,
        /// The problem with the row.
        reason: String,
    },
    /// Unusable settings, corpus or arguments.
    #[error("{0}")]
    Unusable(String),
    /// An error of the communicator, with the root cause if there is one.
    #[error(transparent)]
    Nccl(#[from] nccl::Error),
    /// An error of a copy to or from the device.
    #[error("CUDA: {0}")]
    Cuda(#[from] DriverError),
    /// An error of the arithmetic.
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
}

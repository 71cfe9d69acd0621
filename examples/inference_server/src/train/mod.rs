//! The training of `models/tiny.safetensors`: a model of bytes, trained on this repository's own pages.
//!
//! `cargo xtask train-tiny` runs it, on one core, without a GPU. The same seed, pages and machine give the same file: the order
//! of the data is a function of the seed and the step, and candle's arithmetic on the CPU does not depend on time.
//!
//! - [`Corpus`]: the pages; `network`: the model in a form that can be differentiated; [`train`]: the steps.
//!
//! Training has its own code for the model, separate from inference (`crate::model`): it works on whole texts, with candle's
//! own products. `tests/training.rs` tests that both are the same model.

mod corpus;
mod network;
mod steps;

pub use corpus::Corpus;
pub use network::Network;
pub use steps::{Plan, Progress, Report, train};

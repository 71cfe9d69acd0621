//! How `models/tiny.safetensors` came to be: a model of bytes, trained on this repository's own pages.
//!
//! `cargo xtask train-tiny` does it, on one core, without a GPU. The same seed, the same pages and the same machine give the
//! same file: data come in an order that is a function of the seed and the step, and candle's arithmetic on the CPU
//! does not depend on time.
//!
//! - [`Corpus`]: the pages; `network`: the model in a form that can be differentiated; [`train`]: the steps.
//!
//! Training works on other code than inference (`crate::model`): on whole texts, with candle's own products. That both are
//! the same model is tested in `tests/training.rs`.

mod corpus;
mod network;
mod steps;

pub use corpus::Corpus;
pub use network::Network;
pub use steps::{Plan, Progress, Report, train};

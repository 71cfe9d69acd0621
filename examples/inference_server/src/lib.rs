//! A language model served by several ranks.
//!
//! The model is a small decoder with a mixture of experts (attention is split over the ranks by heads, the experts are
//! distributed over them), or SmolLM2, a Llama whose matrices are split. Ranks communicate only through the crate `nccl`.
//! Without a GPU, `nccl` runs on the emulator; the arithmetic always runs on the CPU, on candle's tensors. So this example
//! shows communication, not fast arithmetic.
//!
//! - [`model`]: the model: its file, one rank's part of it, a step of many requests at once.
//! - [`generate`](mod@generate): runs requests to their end, without a server.
//! - [`front`]: the server: HTTP, the scheduler, and the launcher of the ranks; [`rank`]: the processes that hold the model;
//!   [`wire`]: the protocol between them.
//! - [`ranks`]: ranks that are threads of this process.
//! - [`train`]: the training of the repository's model file: `cargo xtask train-tiny`.

pub mod front;
pub mod generate;
pub mod model;
pub mod rank;
pub mod ranks;
pub mod train;
pub mod wire;

pub use model::{Error, Result};

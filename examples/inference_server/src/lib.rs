//! A language model served by several ranks.
//!
//! The model is a small decoder with a mixture of experts (attention is split over the ranks by heads, the experts
//! are dealt out to them), or SmolLM2, a Llama whose matrices are split. Ranks talk over the crate `nccl` alone. Where there is no GPU, that runs on the emulator;
//! the arithmetic runs on the CPU in any case, on candle's tensors. So what is shown here is communication, not speed
//! of arithmetic.
//!
//! - [`model`]: the model: its file, one rank's part of it, a step of many requests at once.
//! - [`generate`](mod@generate): requests to their ends, with no server around.
//! - [`front`]: the server: HTTP, the scheduler, and who starts the ranks; [`rank`]: the processes that have the model;
//!   [`wire`]: what they say to each other.
//! - [`ranks`]: ranks that are threads of this process.
//! - [`train`]: how the file came to be: `cargo xtask train-tiny`.

pub mod front;
pub mod generate;
pub mod model;
pub mod rank;
pub mod ranks;
pub mod train;
pub mod wire;

pub use model::{Error, Result};

//! The architecture of Llama, of which each rank has a part: `--model smollm2`.
//!
//! ```text
//!            all rows, all ranks      own heads           own columns            own columns         own columns
//! x ──norm──▶ q, k, v of own heads ──▶ attention ══▶ output projection ══▶ + x, norm, gate · up ══▶ down ══▶ + x
//!                                                                                            ══▶ all-gather
//! ```
//!
//! Every matrix is split by its output numbers: a rank computes some of the numbers of all rows, each from a whole row of the
//! matrix, and an all-gather collects the results. With three ranks, a rank has a third of all weights, and does a third of the
//! work even for a single row. **No sum is split between ranks**: the logits are bitwise equal to those of one rank.
//! (Megatron's split communicates half as often, but adds up partial sums.) The price is four all-gathers per layer.
//!
//! Embedding and head are one matrix, split by vocabulary: the rank with a token's row sends it to the others, and the logits
//! of all parts of the vocabulary are gathered.
//!
//! - [`LlamaConfig`]: the hyperparameters of a model; [`LlamaFile`]: its GGUF file, of which a rank reads its own rows;
//! - [`Llama`]: one rank's part.

mod config;
mod decoder;
mod file;

pub use config::LlamaConfig;
pub use decoder::Llama;
pub use file::LlamaFile;

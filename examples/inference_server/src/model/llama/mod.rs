//! The architecture of Llama, of which each rank has a part: `--model smollm2`.
//!
//! ```text
//!            all rows, all ranks      own heads           own columns            own columns         own columns
//! x ──norm──▶ q, k, v of own heads ──▶ attention ══▶ output projection ══▶ + x, norm, gate · up ══▶ down ══▶ + x
//!                                                                                            ══▶ all-gather
//! ```
//!
//! Every matrix is split by its output numbers: a rank makes some of the numbers of all rows, each from a whole row of the
//! matrix, and then all ranks give each other what they made. So a rank has a third of all weights where there are three of
//! them, does a third of the work on a single row as well, and still **no sum is split between ranks**: the logits are those of
//! one rank, to the bit. (Megatron's split, which sends half as often, adds up parts of sums.) The price is four
//! all-gathers for each layer.
//!
//! Embedding and head are one matrix, split by vocabulary: who has a token's row tells the others, and the logits of
//! all parts of the vocabulary are gathered.
//!
//! - [`LlamaConfig`]: the numbers of a model; [`LlamaFile`]: its GGUF file, of which a rank reads the rows that it has;
//! - [`Llama`]: one rank's part.

mod config;
mod decoder;
mod file;

pub use config::LlamaConfig;
pub use decoder::Llama;
pub use file::LlamaFile;

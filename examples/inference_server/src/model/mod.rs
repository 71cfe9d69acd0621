//! The models, of which each rank has a part: a decoder with a mixture of experts, and [`Llama`], in `llama`. The decoder:
//!
//! ```text
//!            all rows, all ranks            own heads                own rows, all heads
//! x ──norm──▶ q, k, v of own heads ──▶ attention ──all-to-all──▶ output projection, + x, norm, router
//!                                                                          │ dispatch
//! x of all rows ◀──all-gather── + x ◀──combine── own experts, rows of all ranks
//! ```
//!
//! A [`Decoder`] takes steps. A step has rows of any mix of requests: each row is one token of one request, at its position, in
//! the request's slot of the cache. Every rank gets the same rows. Attention works on all rows, for the rank's heads. The
//! following operations work on the rank's own rows (row `i` belongs to rank `i % ranks`), for the whole model except the
//! experts, which stay on their ranks.
//!
//! **The result of a row is a function of its request's tokens up to that row, and of nothing else**: not of the other rows of
//! the step, of the order of the rows, of how the request was divided into steps, of the slot, or of the number of ranks; to
//! the bit. Otherwise a request that is restarted after the death of a rank would continue with different words. Each number is
//! computed by the same operations in the same order: `batch_invariant` multiplies matrices row by row, without blocking over
//! the batch; ranks exchange numbers, and never partial sums; and the results of the experts are weighted and added in the
//! order of a token's choices.
//!
//! - [`Config`]: the hyperparameters of a model, and the numbers of ranks that can share it; [`WeightsFile`]: the file, of
//!   which a rank reads its part;
//! - `batch_invariant`: products; `attention`, `cache`, `rotary`, `experts`: the parts of a layer; `moving`: the transfer of
//!   experts between ranks;
//! - [`Collectives`]: the communication of the ranks; [`Alone`], for one rank without NCCL, and [`OverNccl`];
//! - [`Decoder`]: one rank's part of the model; [`Elastic`]: the same for ranks that come and go; [`Part`]: the interface that
//!   they share with [`Llama`]; [`ModelFile`]: the file of either architecture; [`Known`]: their names; [`Sampling`]: from
//!   logits to a token; [`tokenizer`]: from text to tokens and back.

mod alone;
mod attention;
mod batch_invariant;
mod cache;
mod collectives;
mod config;
mod decoder;
mod elastic;
mod error;
mod experts;
mod known;
mod llama;
mod moving;
mod opened;
mod over_nccl;
pub(crate) mod random;
mod rotary;
mod sampling;
mod step;
pub mod tokenizer;
mod weights;

pub use alone::Alone;
pub use collectives::{Arrived, Collectives, Shape};
pub use config::{Config, Shard};
pub use decoder::Decoder;
pub use elastic::Elastic;
pub use error::{Error, Result};
pub(crate) use experts::choose;
pub use known::{Known, ModelFile, fetched, tiny};
pub use llama::{Llama, LlamaConfig, LlamaFile};
pub use over_nccl::OverNccl;
pub(crate) use rotary::Rotary;
pub use sampling::Sampling;
pub use step::{AnyPart, Logits, Part, Row, Settings, SlotOwner};
pub use weights::{Tensors, WeightsFile};

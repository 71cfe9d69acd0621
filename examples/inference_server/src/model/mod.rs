//! The models, of which each rank has a part: a decoder with a mixture of experts, and [`Llama`], in `llama`.
//! This is the first:
//!
//! ```text
//!            all rows, all ranks            own heads                own rows, all heads
//! x ──norm──▶ q, k, v of own heads ──▶ attention ──all-to-all──▶ output projection, + x, norm, router
//!                                                                          │ dispatch
//! x of all rows ◀──all-gather── + x ◀──combine── own experts, rows of all ranks
//! ```
//!
//! A [`Decoder`] takes steps. A step has rows, of any mix of requests: each is one token of one request, at its position,
//! for the slot of the cache that the request has. Every rank is given the same rows. Attention works on all rows,
//! for the rank's heads; what follows works on the rows that are the rank's own (row `i` is rank `i % ranks`'s), for all of the
//! model but the experts, which are where they are.
//!
//! **A row's result is a function of the tokens of its request up to it, and of nothing else**: not of the other rows of the
//! step, of its place among them, of how the request was cut into steps, of the slot, or of the number of ranks; to the bit.
//! Otherwise a request that is begun again after a rank died would go on with other words. It holds because each number
//! is computed by the same operations in the same order: products with matrices are made by `batch_invariant`,
//! row by row and without blocking over the batch; ranks exchange numbers, and never add up parts of a sum; and what experts
//! give is weighed in the order of a token's choices.
//!
//! - [`Config`]: the numbers of a model, and by how many ranks it can be shared; [`WeightsFile`]: the file, of which a
//!   rank reads its part;
//! - `batch_invariant`: products; `attention`, `cache`, `rotary`, `experts`: the parts of a layer; `moving`: experts on their way from rank to rank;
//! - [`Collectives`]: what ranks do together; [`Alone`], for one rank without any library, and [`OverNccl`];
//! - [`Decoder`]: all of it; [`Elastic`]: the same for ranks that come and go; [`Part`]: what it and [`Llama`] have in common; [`ModelFile`]: the file of either; [`Known`]: their
//!   names; [`Sampling`]: from logits to a token; [`tokenizer`]: from text to tokens and back.

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

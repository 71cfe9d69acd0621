//! Data that can be recognised anywhere, and counting what is not as it should be.
//!
//! There are no kernels here, so data is made and checked on the host, piece by piece. What a rank sends
//! is a function of (repetition, rank, position) alone: neither side has to keep or exchange anything to
//! know what should arrive, and what comes from the wrong rank, the wrong place or the previous repetition
//! does not match.
//!
//! - [`Source`]: operations that only move bytes. A stream of pseudo-random 8-byte words, cut into elements
//!   of whatever type: every bit pattern is fair, NaNs included;
//! - [`Numbers`]: reductions. Numbers whose result does not depend on the order in which they are reduced;
//! - [`Contents`]: which of these an operation moves, and what each place of a buffer has to hold after it.

mod contents;
mod number;
mod numbers;
mod source;

pub use contents::{Block, Contents, Data};
pub use numbers::Numbers;
pub use source::Source;

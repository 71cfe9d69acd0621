//! Generates recognisable data, and counts wrong elements.
//!
//! There are no kernels here, so data is made and checked on the host, piece by piece. The data of a rank is a function
//! of (repetition, rank, position) alone: neither side has to keep or exchange anything to know the expected result,
//! and data from the wrong rank, the wrong place or the previous repetition does not match.
//!
//! - [`Source`]: operations that only move bytes. A stream of pseudo-random 8-byte words, cut into elements of any
//!   type: any bit pattern may occur, NaNs included;
//! - [`Numbers`]: reductions. Numbers whose result does not depend on the order in which they are reduced;
//! - [`Contents`]: which of these an operation moves, and the expected contents of each place of a buffer after it.

mod contents;
mod number;
mod numbers;
mod source;

pub use contents::{Block, Contents, Data};
pub use numbers::Numbers;
pub use source::Source;

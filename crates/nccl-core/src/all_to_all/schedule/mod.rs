//! What one rank does for an all-to-all: steps of messages, with bytes in between that the device moves.
//!
//! A schedule says that in offsets into buffers that are not there yet, so that it can be made once and used for any
//! buffers of these lengths. Making one is a pure function of who asks, how much goes where, and the algorithm; all ranks
//! make theirs alone, and what fits together is what the tests execute for all ranks at once.
//!
//! - `value`: what it is made from, and of;
//! - `direct`: each block goes straight from sender to receiver: all in one group, in several groups, or with
//!   few peers at a time; NCCL's own call.
//! - `two_level`: blocks are collected inside of a node, and go to each other node together; `two_level_of_parts`: also
//!   where they are not equally long.
//! - `in_place`: blocks change places between pairs of ranks.

mod direct;
mod in_place;
#[cfg(test)]
mod tests;
mod two_level;
mod two_level_of_parts;
mod value;

pub(crate) use direct::{chunked, grouped, native, pairwise};
pub(crate) use in_place::{beside, in_place};
pub(crate) use two_level::{TwoLevel, two_level};
pub(crate) use two_level_of_parts::{Within, together, two_level_of_parts};
pub(crate) use value::{Exchange, Message, Move, Part, Payload, Place, Region, Schedule, Step};

//! The schedule of one rank for an all-to-all: steps of messages, with copies on the device in between.
//!
//! A schedule consists of offsets into buffers, so that it can be made once and used for any buffers of these lengths.
//! It is a pure function of the rank, the parts and the algorithm. Each rank makes its schedule alone; the tests check
//! that the schedules match by executing those of all ranks at once.
//!
//! - `value`: the inputs and the data structures;
//! - `direct`: each block goes straight from sender to receiver: all in one group, in several groups, or with
//!   few peers at a time; `ncclAlltoAll`;
//! - `two_level`: blocks are collected inside a node, and go to each other node together; `two_level_of_parts`: the same
//!   for blocks of unequal length;
//! - `in_place`: pairs of ranks exchange blocks in place.

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
pub(crate) use value::{
    BufferLocation, Exchange, Message, Move, Part, Payload, Region, Schedule, ScheduleStep,
};

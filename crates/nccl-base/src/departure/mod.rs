//! How a rank departed: one value from the end of its connection to the error of every other rank, also over the wire.
//!
//! What another part has to know of a departure is a field or a variant here ([`Lost::may_live`],
//! [`Silence::is_one_way`], [`ProcessEnd`]). The sentences are written by `Display` alone, and nothing reads them.
//!
//! - `exit`: how a process ended, as its parent sees it;
//! - `wire`: the bytes of all this.
//!
//! All ranks compare what they heard of one departure, so that whatever is in it comes over the wire as it was: times in
//! nanoseconds, not as they are shown.
//!
//! This module depends on nothing but the codec.

mod exit;
mod unfinished;
mod value;
mod wire;

#[cfg(test)]
mod tests;

pub use exit::{Exit, OomKill, Signal};
#[doc(hidden)]
pub use unfinished::{Ended, Reason, Unfinished};
#[doc(hidden)]
pub use value::{
    Departure, Failure, HeardOnly, How, LastCall, Lost, ProcessEnd, Sign, Silence, Told, cut,
};
#[doc(hidden)]
pub use wire::{
    departure, failure, lost, process_end, put_departure, put_failure, put_lost, put_process_end,
};

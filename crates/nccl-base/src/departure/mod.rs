//! How a rank departed: one value from the end of its connection to the error of every other rank, also over the wire.
//!
//! What another part has to know of a departure is a field or a variant here ([`Lost::may_live`],
//! [`Silence::is_one_way`], [`ProcessEnd`]). The sentences are written by `Display` alone, and nothing reads them.
//!
//! - `exit`: how a process ended, as its parent sees it;
//! - `unfinished`: how an exchange ended that was not finished.
//!
//! All ranks compare what they heard of one departure, so that whatever is in it comes over the wire as it was, but for what
//! [`clean`](crate::wire::clean) does to texts that are shown and to times.

mod exit;
mod unfinished;
mod value;

#[cfg(test)]
mod tests;

pub use exit::{Exit, OomKill, Signal};
#[doc(hidden)]
pub use unfinished::{Ended, Reason, Unfinished};
#[doc(hidden)]
pub use value::{
    Departure, Failure, HeardOnly, How, LastCall, Lost, ProcessEnd, Sign, Silence, Told, cut,
};

//! How a rank departed: one value from the end of its connection to the error of every other rank, also between processes.
//!
//! What other code needs to know of a departure is a field or a variant here ([`Lost::may_live`],
//! [`UnreachableHost::is_one_way`], [`ProcessEnd`]). Only `Display` writes the sentences, and no code parses them.
//!
//! - `exit`: how a process ended, as its parent sees it;
//! - `unfinished`: how an unfinished exchange ended.
//!
//! All ranks compare what they received about a departure, so that every field is sent unchanged, except for what
//! [`clean`](crate::wire::clean) does to texts that are shown and to times.

mod exit;
mod unfinished;
mod value;

#[cfg(test)]
mod tests;

pub use exit::{Exit, OomKill, Signal};
#[doc(hidden)]
pub use unfinished::{GatherOutcome, Reason, UnfinishedExchange};
#[doc(hidden)]
pub use value::{
    Departure, ExitReport, Failure, HeardOnly, LastCall, LossKind, Lost, ProcessEnd,
    UnreachableEvidence, UnreachableHost, cut,
};

//! How a rank departed. The value is made where the end of its connection is detected, is sent between processes, and
//! becomes the error of every other rank.
//!
//! Everything that other code needs to know of a departure is a field or a variant here ([`Lost::may_live`],
//! [`UnreachableHost::is_one_way`], [`ProcessEnd`]). Only `Display` writes the sentences, and no code parses them.
//!
//! - `exit`: how a process ended, as its parent sees it;
//! - `unfinished`: how an unfinished exchange ended.
//!
//! All ranks compare what they received about a departure. So every field is sent unchanged, except for the changes
//! that [`clean`](crate::wire::clean) makes to displayed texts and to times.

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

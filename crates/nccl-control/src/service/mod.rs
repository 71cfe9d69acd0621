//! The coordinator's services for the ranks of one generation, beside their membership: rounds, the store, channels,
//! straggler queries.
//!
//! A machine without clock, lock, thread, socket or log. Its driver passes it the arrivals and departures of ranks
//! ([`Service::arrive`], [`Service::record_departure`]), their requests ([`Service::handle`]) and the time
//! ([`Service::handle_timeout`], [`Service::reports`]). After each of these calls, the driver sends the outputs of
//! [`Service::poll`] in that order; it drops outputs for an unreachable rank. Ranks are numbered `0..size`.
//!
//! Invariants: a request that expects an answer gets exactly one, at its deadline at the latest, unless its rank leaves
//! or cancels the request before. A round ends once, with one answer for all its ranks, including those that enter it
//! later.
//!
//! - `state`: the state of ranks and requests; `handle`: the interface for the driver;
//! - `rounds`: collecting one part from each rank; `outcomes`: the outcomes that ranks have from an earlier
//!   coordinator, and `takeover`: how the other ranks get them;
//! - `store`: keys and values; `channels`: messages in one order for all ranks;
//! - `straggler_queries`: which ranks have not entered an operation; `reporting`: log lines while ranks wait.

mod channel;
mod channels;
mod handle;
mod outcomes;
mod reporting;
mod round_state;
mod rounds;
mod state;
mod store;
mod straggler_queries;
mod straggler_query;
mod takeover;
#[cfg(test)]
mod tests;

pub(crate) use channel::{CAPACITY, LARGEST_MESSAGE};
pub(crate) use reporting::{WAIT_LOG_INTERVAL, names};
pub(crate) use state::{LONGEST_NAME, Output, Recipients, Service};

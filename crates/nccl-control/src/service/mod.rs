//! What a coordinator does for the ranks of one generation beside their membership: rounds, the store, channels, inquiries.
//!
//! A machine without clock, lock, thread, socket or log. Its driver passes on which ranks arrive and leave ([`Service::arrive`],
//! [`Service::leave`]), what they ask ([`Service::handle`]) and the time ([`Service::handle_timeout`], [`Service::reports`]). After
//! each of these calls it sends what [`Service::poll`] gives, in that order; what is for a rank that cannot be reached it drops.
//! Ranks are numbered `0..size`.
//!
//! What must stay true: a request that expects an answer gets exactly one, at its deadline at the latest, unless its rank leaves or
//! cancels it before. A round ends once, with one answer for all its ranks, also for those that come later.
//!
//! - `state`: what the service has of ranks and requests; `handle`: what its driver tells and asks for;
//! - `rounds`: one part of each rank, collected; `store`: keys and values; `channels`: messages in one order for all ranks;
//! - `inquiries`: which ranks have not entered an operation; `reporting`: what the log says while ranks wait.

mod channel;
mod channels;
mod handle;
mod inquiries;
mod inquiry;
mod reporting;
mod round;
mod rounds;
mod state;
mod store;
#[cfg(test)]
mod tests;

pub(crate) use channel::{CAPACITY, LARGEST_MESSAGE};
pub(crate) use reporting::REPORT;
pub(crate) use state::{LONGEST_NAME, Output, Service, To};

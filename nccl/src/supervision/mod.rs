//! Fault propagation: a fault that ends a communicator on one rank ends it on all ranks, with one cause that all of them report.
//!
//! NCCL informs no other rank: the ranks of an aborted communicator wait for each other for ever, and what one of
//! them reports after its own deadline is a consequence, not a cause. So the rank that gives a communicator
//! up announces that on its [`Line`](crate::rendezvous::Line) before it aborts the communicator:
//!
//! ```text
//! the rank that found it                        every rank, that one included
//!   begins its abort ──announces the fault──▶     the first notice for a communicator is its verdict,
//!                       (the coordinator          written once: all ranks hear in the same order
//!                        orders)                  aborts its own communicator, on a thread of its own
//!                                                 says when NCCL has let go of it
//!                        ◀──── when all have said so, or the bound has passed ────▶
//!   returns its error, and who has not said so    returns the same cause
//! ```
//!
//! A rank that dies, or fails ([`World::fail`](crate::World::fail)), ends all communicators of which it is
//! a member the same way; the coordinator's notice of it takes the place of an announcement. A rank that
//! leaves in order ends nothing.
//!
//! An error waits for the other ranks because, until they have aborted as well, their kernels may still write
//! into memory of this rank over the peer-to-peer connections of the operation that failed, and the caller that
//! gets the error may free that memory. Ranks that are gone are not waited for; ranks that do not answer are
//! named in the error. When the connection to the coordinator is lost, no rank can confirm; the error then waits
//! a moment in which the other ranks, which see the same loss, end their communicators.
//!
//! - `cause`: what can be a root cause; `fault`: a cause with its place, as sent to other ranks and as text;
//! - `trial`: a rank that ran out of time is not the rank that made it wait: the reports of all ranks (`report`) are
//!   collected, and the cause elected (`elect`), before a fault is announced; `trials`: what is collected;
//! - `board`: one communicator as its rank sees it;
//! - `roster`: which ranks of the world, and of the launcher, its ranks are;
//! - `docket`: the registered communicators, and the verdicts on them;
//! - `unborn`: communicators that failed before NCCL was called;
//! - `watch`: the notices of a line, and the communicators they concern;
//! - `session`: the ranks of a line, as its communicators see them; `attach`, `records`: what this crate attaches to a line;
//! - `late`: log events for stragglers; `words`: what NCCL and the host add to an error.
//!
//! None of this is on the path of an operation: a verdict begins an abort, which operations check for
//! anyway. The code on their path, which records what they were, is the [`recorder`].

mod attach;
mod board;
#[cfg(test)]
mod broken;
mod docket;
mod elect;
mod late;
mod ledger;
mod records;
mod report;
mod session;
mod trial;
mod trials;
mod unborn;
mod watch;
mod words;

pub(crate) use attach::{OfLine, decode, introduce, recordings, timeline};
pub(crate) use session::Session;

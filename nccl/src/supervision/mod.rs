//! What ends a communicator on one rank ends it on all of them, for one reason that all of them tell.
//!
//! NCCL tells nobody: the ranks of an aborted communicator wait for each other for ever, and what one of
//! them says after its own deadline is a consequence, not a cause. So the rank that gives a communicator
//! up says so on its [`Line`](crate::rendezvous::Line) before it aborts it:
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
//! Why an error waits for the others: until they have aborted as well, their kernels may still write into
//! memory of this rank over the peer-to-peer connections of the operation that failed. Whoever gets the
//! error may free that memory. Ranks that are gone are not waited for, and those that do not answer are
//! named in the error. When the line to the coordinator is lost, nobody can tell; the error then waits a
//! moment in which the others, who see the same, end theirs.
//!
//! - `cause`: what can be at the root of it; `fault`: one of these, as it travels and as it reads;
//! - `trial`: who ran out of time is not who made it wait: what all ranks say (`report`) is collected, and the cause
//!   elected (`elect`), before a fault is announced; `trials`: what is collected;
//! - `board`: one communicator as its rank sees it;
//! - `roster`: which ranks of the world, and of the launcher, its ranks are;
//! - `docket`: which communicators there are, and the verdicts on them;
//! - `unborn`: communicators that came to nothing before NCCL was asked;
//! - `watch`: what a line hears, and whom it concerns;
//! - `session`: the ranks of a line, as its communicators see them; `attach`, `records`: what this crate attaches to a line;
//! - `late`: what a log is told of stragglers; `words`: what NCCL and the host say beside an error.
//!
//! Nothing of this is on the way of an operation: a verdict begins an abort, which operations look for
//! anyhow. What is on their way, and writes down what they were, is the [`recorder`].

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

//! A rank: a process that has a part of the model, and takes the steps that the front sends.
//!
//! ```text
//!          ┌───────────── next epoch, with those that are left and those that are new ◀────────┐
//!          ▼                                                                                   │
//! join ─▶ enter: who has which part ─▶ communicator ─▶ (load) ─▶ serve: step, step, … ─────────┤ somebody is gone
//! (rejoin)                                                          │                          │ or a step failed
//!                                                                   └─▶ end: the front says so
//! ```
//!
//! What is dear outlives an epoch: the process, its device and stream, and its part of the weights. What belongs to the epoch does
//! not: the communicator, and the caches of keys and values, since nobody knows how far a step came that failed. The front
//! has the tokens, and sends them again.
//!
//! An epoch numbers its ranks anew; a rank that comes is the last one. Which part of the model a rank has must not depend
//! on that, or everybody would have to load after each death. So parts go by the launcher's number of a rank
//! (its *place*), which a process that is started again gets as well, and the communicator of the model has its ranks in
//! that order.
//!
//! - `epochs`: from one epoch to the next; `serve`: what a rank does in one;
//! - `link`: the connection to the front; `timed`: how much of a step is communication.

mod epochs;
mod link;
mod serve;
mod timed;

pub use self::epochs::{RankOptions, run};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

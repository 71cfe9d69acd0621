//! Checks, before NCCL is started, what ranks must agree on and whether hosts reach each other.
//!
//! - `given`: what is known of a rank beforehand; `facts`: what a rank reports; `interfaces`, `rdma`, `device`: parts
//!   of that;
//! - `bounds`: limits of the facts and reports that are sent;
//! - `reach`: whether hosts reach each other at the addresses where NCCL will listen;
//! - `rules`: from the facts of all ranks to findings;
//! - `run`: runs the checks; `scarce`: the scarcest resource after a failure.

mod bounds;
mod device;
mod facts;
mod given;
mod interfaces;
mod rdma;
mod reach;
mod rules;
mod run;
mod scarce;

#[cfg(test)]
mod tests;

pub use given::{Given, Loaded};
pub use rules::Scarce;
pub use run::{host, world};
pub use scarce::scarce;

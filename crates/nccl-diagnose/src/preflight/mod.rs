//! Checks, before NCCL is started, what ranks must agree on and whether hosts reach each other.
//!
//! - `check_input`: what is known about a rank beforehand; `facts`: what a rank reports; `interfaces`, `rdma`,
//!   `device`: parts of the report;
//! - `bounds`: limits of the facts and reports that are sent;
//! - `reachability`: whether hosts reach each other at the addresses where NCCL will listen;
//! - `rules`: from the facts of all ranks to findings;
//! - `run`: runs the checks; `resource_shortage`: the scarcest resource after a failure.

mod bounds;
mod check_input;
mod device;
mod facts;
mod interfaces;
mod rdma;
mod reachability;
mod resource_shortage;
mod rules;
mod run;

#[cfg(test)]
mod tests;

pub use check_input::{CheckInput, Loaded};
pub use resource_shortage::resource_shortage;
pub use rules::ResourceShortage;
pub use run::{host, world};

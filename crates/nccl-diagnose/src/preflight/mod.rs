//! What must agree or be reachable before NCCL is started.
//!
//! - `given`: what is known of a rank beforehand; `facts`: what it tells; `interfaces`, `rdma`, `device`: parts of that;
//! - `bounds`: how much of facts and reports travels;
//! - `reach`: whether hosts reach each other where NCCL will listen;
//! - `rules`: what follows from the facts of all ranks;
//! - `run`: the checks at work; `scarce`: what is too little after something has failed.

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

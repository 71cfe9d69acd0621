//! The identity that a launcher gives this process, and where its ranks meet.
//!
//! - `launch`: the launchers, and the identity of this process by their variables; `variables`: the rendezvous that follows;
//! - `address`: where the ranks meet, configured or derived;
//! - `of_process`: the same for another process, for a process that inspects it from outside;
//! - `nodelist`: Slurm's notation for lists of hosts.

mod address;
mod launch;
mod nodelist;
mod of_process;
mod variables;

#[cfg(test)]
mod tests;

pub use launch::is_launched;
pub(super) use launch::{is_observed, launched_rank};

//! The identity that a launcher gives this process, and where the launcher's ranks meet.
//!
//! - `launch`: the launchers, and the identity that their variables give this process; `variables`: the resulting
//!   rendezvous;
//! - `address`: where the ranks meet, configured or derived;
//! - `of_process`: the rendezvous of another process, for a process that inspects it from outside;
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

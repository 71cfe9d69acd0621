//! What a launcher says about this process, and where its ranks meet.
//!
//! - `launch`: the launchers, and who this process is by their variables; `variables`: the rendezvous that follows;
//! - `address`: where the ranks meet, said or derived;
//! - `of_process`: the same of another process, for somebody who looks at it from outside;
//! - `nodelist`: how Slurm writes the names of hosts.

mod address;
mod launch;
mod nodelist;
mod of_process;
mod variables;

#[cfg(test)]
mod tests;

pub(super) use launch::{is_observed, own_rank};

//! What a launcher says about this process, and where its ranks meet.
//!
//! - `variables`: who this process is, by the variables of `nccl-run`, torchrun, MPI, Slurm or Kubernetes;
//! - `address`: where the ranks meet, said or derived;
//! - `nodelist`: how Slurm writes the names of hosts.

mod address;
mod nodelist;
mod variables;

#[cfg(test)]
mod tests;

pub(super) use address::{FORMS, place, places};

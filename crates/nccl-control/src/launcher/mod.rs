//! What a launcher says about this process, and where its ranks meet.
//!
//! - `variables`: who this process is, by the variables of `nccl-run`, torchrun, MPI, Slurm or Kubernetes;
//! - `address`: where the ranks meet, said or derived;
//! - `of_process`: the same of another process, for somebody who looks at it from outside;
//! - `nodelist`: how Slurm writes the names of hosts.

mod address;
mod nodelist;
mod of_process;
mod variables;

#[cfg(test)]
mod tests;

use crate::error::Result;

pub(super) use address::{FORMS, place, places};

/// The rank that a launcher gave this process, if one did.
///
/// # Errors
/// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) for a variable of a launcher that is no text.
pub(super) fn own_rank() -> Result<Option<usize>> {
    variables::rank(|name| std::env::var_os(name))
}

//! What must agree or be reachable before NCCL is started.
//!
//! NCCL compares its own release and little else: a variable that differs, an address that cannot be
//! reached or a limit that is too low shows as a hang, or as a message on another rank. Here every rank
//! gathers facts, rank 0 compares them, and all ranks get the same [`Report`].
//!
//! - `system`: where facts come from, which a test can make up;
//! - `facts`: what a rank tells; `variables`, `interfaces`, `rdma`, `device`, `limits`: parts of it;
//! - `known`: NCCL's variables, and which of them the ranks have to agree on; `late`: those that were changed when
//!   NCCL had read them;
//! - `wire`: how facts and reports travel;
//! - `reach`: whether hosts reach each other where NCCL will listen;
//! - `rules`: what follows from the facts of all ranks;
//! - `report`: what was found, and how it reads; `run`: the checks at work;
//!   `switch`: when they are made; `scarce`: what is too little after something has failed.

mod device;
mod facts;
mod interfaces;
mod known;
mod late;
mod limits;
mod rdma;
mod reach;
use nccl_base::report;
mod rules;
mod run;
mod scarce;
mod settings;
mod switch;
mod system;
mod variables;
mod wire;

#[cfg(test)]
mod tests;

// What NCCL's logs are judged by.
pub(crate) use known::{Agreement, agreement};
pub(crate) use late::nccl_starts;
// Whoever has no thread says how many there are.
pub(crate) use limits::thread_limits;
// NCCL reads the process's environment as it reads its files.
pub(crate) use variables::{number, variable};

pub use nccl_launch::nccl_variables_for;
pub use report::{Finding, Report, Severity};
pub use run::host;
pub(crate) use scarce::scarce;
pub use settings::Settings;
pub(crate) use switch::Checks;

//! A benchmark program, from its arguments to its exit code; the program supplies the [`Operation`] to measure.
//!
//! [`main`] runs in three roles. Started by a user it is the *starter*: it checks everything that can be checked
//! without ranks, so that bad input is one sentence and not one per rank, and starts the ranks (`start`). Started by
//! itself, or by torchrun, srun or mpirun, it is one *rank* (`rank`); with `--spawn threads` the starter's threads are
//! the ranks. Rank 0 prints (`printer`).
//!
//! Buffers, data, events and graphs are the same for all operations (`runner`), driven by the method in
//! [`bench`](mod@crate::bench).

mod binding;
mod choice;
mod devices;
mod failure;
mod memory;
mod operation;
mod printer;
mod rank;
mod ranks;
mod runner;
mod start;

pub(crate) use devices::cudarc_finds_libcuda;
pub use devices::{Emulation, install};
pub use operation::{Call, Operands, Operation};
pub use ranks::WorldRanks;
pub use start::main;

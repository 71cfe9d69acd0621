//! An interpreter of NCCL's device kernels.
//!
//! libnccl launches few kernels, all of one shape: each block processes a channel's share of a list of works, by an
//! algorithm over connections whose buffers, counters and flags it shares with peers and proxies. [`Interpreter`]
//! runs the same protocol on the CPU, so that everything else (host code, transports, proxies) is NCCL's own.
//!
//! ```text
//! Interpreter::launch ─▶ Running ── step ─▶ Done | Moved | Waiting
//!     launch            decodes parameters and batches, refuses what is not interpreted
//!     block             one channel: communicator, waits, the abort flag
//!     collective, pat, point_to_point, broadcasts, one_rank      algorithms
//!     primitives        receive, reduce, copy, send: simple (counters), lines (LL, LL128)
//!     connection        one end of a connection
//!     symmetric         kernels over symmetric memory: windows that every rank maps
//!     diagnostics       kernels that try the links of GPUs
//!     asked, layout, works, functions      what the library's structures and tables mean
//! ```
//!
//! A kernel never blocks and has no thread: it is a set of futures that the stream polls. An unfinished wait yields
//! control; an abort of the communicator ends it. NVLS, CollNet and GIN are refused by name: they need hardware that the
//! emulated devices lack.

mod arithmetic;
mod asked;
mod block;
mod broadcasts;
mod collective;
mod connection;
mod counters;
mod diagnostics;
mod diagnostics_layout;
mod executor;
mod functions;
mod launch;
mod layout;
mod lines;
mod memory;
mod one_rank;
mod pat;
mod point_to_point;
mod primitives;
mod simple;
mod symmetric;
mod task;
mod works;

pub(crate) use asked::{Field, Mismatch, Types};
pub(crate) use block::Trouble;
pub(crate) use counters::CLOCK;
pub(crate) use diagnostics::Kernel as DiagnosticKernel;
pub(crate) use functions::Coverage;
#[cfg(test)]
pub(crate) use functions::Reason;
pub(crate) use launch::{Failure, Interpreter, Progress, Running, plain};
pub(crate) use memory::{Cause, Lease, Memory, View, Violation};

#[cfg(test)]
mod tests;

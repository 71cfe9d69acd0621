//! Faults on purpose: delay, hang or fail a chosen call on a chosen rank, or end the process in it.
//!
//! For tests of what is built on NCCL. A fault sits at a function of NCCL's or of the CUDA driver's
//! ([`at_call`]), and strikes when it is called; or at an operation ([`at_operation`]), and strikes when the operation begins
//! to run on its stream. It may be limited to one rank, to communicators by name, and to the n-th time. [`late`] makes every
//! operation begin late: what is only right because the work was quick, goes wrong.
//!
//! ```
//! use nccl_emulator::faults;
//!
//! // Rank 1 hangs in its third ncclGroupEnd, until the guard goes.
//! let guard = faults::at_call("ncclGroupEnd").rank(1).nth(3).hang();
//! assert_eq!(guard.hits(), 0);
//! ```
//!
//! For processes that a test does not write, the variable `NCCL_EMULATOR_FAULTS` holds the same,
//! separated by semicolons:
//!
//! ```text
//! NCCL_EMULATOR_FAULTS="call=ncclGroupEnd,rank=1,nth=3,action=hang; run=AllReduce,comm=tp,action=delay=50ms; late=2ms"
//! ```
//!
//! Faults are the process's: `rank(1)` is rank 1 of every communicator in it. Tests that run as threads of one process, as those of
//! `cargo test` do, give their communicators names of their own, and limit their faults to them
//! ([`communicator`](Fault::communicator), `comm=NAME` or `comm=PREFIX*`).
//!
//! | action | a call | an operation |
//! |---|---|---|
//! | `delay=TIME` | begins later | begins later |
//! | `hang` | hangs; not even an abort ends it | never begins; an abort ends it |
//! | `stall` | hangs until its communicator is aborted, from another thread | as `hang` |
//! | `fail=CODE` | returns the code, or counts as failed in its group | never begins; the communicator reports the code |
//! | `kill` | the process ends by SIGKILL | the process ends by SIGKILL |
//!
//! A `stall` at a call ends when `ncclCommAbort` is called meanwhile on that communicator, or on one that shares its abort flag. The
//! crate `nccl` does so in its launch mode `BlockingChild`, where the parent of the communicator is aborted. In `NonBlocking` no call
//! waits, and none may come while another is inside: there a stalled call is one that does not come back, and ends the
//! process, as `hang` does.
//!
//! Functions of the driver have no rank and no communicator: a fault at one strikes every caller, and
//! nothing but the end of the fault ends its `stall`. They are named without the version that some have
//! in their symbols (`cuMemAlloc`), and fail with codes of CUDA's.
//!
//! `ncclCommInitRankConfig` and `ncclCommInitRankScalable` with `fail=1` leave the thread inside a
//! group, as NCCL's do when CUDA cannot tell the current device.
//!
//! On NVIDIA's own library (`NCCL_EMULATOR_NCCL`) calls can be struck, operations cannot: such a fault is
//! refused when it is put in place, or by [`install()`](crate::install()).
//!
//! `ncclCommGetAsyncError` with `fail=CODE` succeeds, and reports the code as the communicator's
//! state from then on.

// - `choosing`: where a fault sits, and putting it in place; `specification`: the same from a text;
// - `guard`: what is in place, held by its owner; `in_force`: all of them;
// - `point`: where one sits, and what it does there; `rule`: one of them; `strikes`: where they strike.

mod choosing;
mod guard;
mod in_force;
mod point;
mod rule;
mod specification;
mod strikes;

#[cfg(test)]
mod tests;

pub use choosing::{Fault, at_call, at_operation, specify};
pub use guard::{FaultGuard, LateGuard, late};
pub(crate) use in_force::{any, check_environment, check_for, lateness};
pub(crate) use rule::{OperationFault, Subject};
pub use specification::SpecificationError;
pub(crate) use strikes::{check_call, check_driver_call, check_operation};

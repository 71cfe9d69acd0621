//! Fault injection: delay, hang or fail a chosen call on a chosen rank, or end the process in it.
//!
//! Fault injection serves tests of programs that use NCCL. A fault at a function of NCCL or the CUDA driver
//! ([`at_call`]) strikes when the function is called. A fault at an operation ([`at_operation`]) strikes when the operation begins
//! to run on its stream. A fault may be limited to one rank, to communicators by name, and to the n-th time. [`late`] delays
//! every operation, which exposes code that is only correct while the work is quick.
//!
//! ```
//! use nccl_emulator::faults;
//!
//! // Rank 1 hangs in its third ncclGroupEnd, until the guard goes.
//! let guard = faults::at_call("ncclGroupEnd").rank(1).nth(3).hang();
//! assert_eq!(guard.hits(), 0);
//! ```
//!
//! For other processes, the variable `NCCL_EMULATOR_FAULTS` describes faults, separated by
//! semicolons:
//!
//! ```text
//! NCCL_EMULATOR_FAULTS="call=ncclGroupEnd,rank=1,nth=3,action=hang; run=AllReduce,comm=tp,action=delay=50ms; late=2ms"
//! ```
//!
//! Faults apply to the whole process: `rank(1)` is rank 1 of every communicator in it. Tests that run as threads of one process, as
//! with `cargo test`, give their communicators distinct names, and limit their faults to them
//! ([`communicator`](Fault::communicator), `comm=NAME` or `comm=PREFIX*`).
//!
//! | action | effect on a call | effect on an operation |
//! |---|---|---|
//! | `delay=TIME` | begins later | begins later |
//! | `hang` | hangs; not even an abort ends it | never begins; an abort ends it |
//! | `stall` | hangs until another thread aborts its communicator | as `hang` |
//! | `fail=CODE` | returns the code, or counts as failed in its group | never begins; the communicator reports the code |
//! | `kill` | the process ends by SIGKILL | the process ends by SIGKILL |
//!
//! A `stall` at a call ends when `ncclCommAbort` is called meanwhile on that communicator, or on one that shares its abort flag. The
//! crate `nccl` does so in its launch mode `BlockingChild`, where it aborts the parent of the communicator. In `NonBlocking` no call
//! waits, and no call may overlap another: there a stalled call never returns, and ends the process, as `hang` does.
//!
//! Functions of the driver have no rank and no communicator: a fault at one strikes every caller, and
//! only the end of the fault ends its `stall`. Their names omit the version suffix that some symbols
//! have (`cuMemAlloc`), and they fail with codes of CUDA.
//!
//! `ncclCommInitRankConfig` and `ncclCommInitRankScalable` with `fail=1` leave the thread inside a
//! group, as in NCCL when CUDA cannot determine the current device.
//!
//! With NVIDIA's own library (`NCCL_EMULATOR_NCCL`) faults at calls work, but faults at operations do not: they are
//! refused when they are activated, or by [`install()`](crate::install()).
//!
//! The health of devices as NVML reports it is set by another variable, `NCCL_EMULATOR_NVML`, and by [`nvml()`]:
//!
//! ```text
//! NCCL_EMULATOR_NVML="device=1,ecc=2; device=0,nvlink=3:down; device=1,after=500,lost"
//! ```
//!
//! | item | what NVML reports for the device |
//! |---|---|
//! | `lost` | `NVML_ERROR_GPU_IS_LOST` from every supported function that takes the device |
//! | `hang` | calls do not return; without `device=N`, those for any device |
//! | `ecc=N` | N uncorrected memory errors |
//! | `row-remap=pending`, `row-remap=failed`, `retired-pages=pending` | the state of memory repair |
//! | `nvlink=up`, `nvlink=LINK:down`, `nvlink=LINK:KIND:N` | 18 links, up; error kinds: `replay`, `recovery`, `crc`, `crc-data` |
//! | `pcie-width=N`, `pcie-generation=N`, `pcie-replays=N` | the PCIe link, of at most 16 lanes and generation 5 |
//! | `throttle=thermal`, `software-thermal`, `power-brake`, `slowdown` | a reason for slow clocks |
//! | `temperature=N` | the temperature in degrees Celsius |
//! | `process=PID` | an additional process that uses the device |
//! | `after=MS` | delays the other items of the entry by that many milliseconds |
//!
//! `ncclCommGetAsyncError` with `fail=CODE` succeeds, and from then on reports the code as the communicator's
//! state.

// - `choosing`: the builder of a fault; `specification`: its textual form;
// - `guard`: the owner's hold on an active fault; `in_force`: all active faults;
// - `nvml`: states of devices that NVML reports;
// - `point`: a fault's place and action; `rule`: one active fault; `strikes`: the checks at calls and operations.

mod choosing;
mod guard;
mod in_force;
mod nvml;
mod point;
mod rule;
mod specification;
mod strikes;

#[cfg(test)]
mod tests;

pub use choosing::{Fault, at_call, at_operation, specify};
pub use guard::{FaultGuard, LateGuard, late};
pub(crate) use in_force::{any, check_environment, check_for, lateness};
pub(crate) use nvml::VARIABLE as NVML_VARIABLE;
pub use nvml::nvml;
pub(crate) use rule::{OperationFault, Subject};
pub use specification::SpecificationError;
pub(crate) use strikes::{check_call, check_driver_call, check_operation};

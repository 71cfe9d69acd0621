//! The check for a machine with a GPU: `gpu-check run`.
//!
//! It unpacks a bundle (`cargo xtask gpu-bundle`, [`bundle`]), and runs everything in it in steps ([`check`]): the
//! arrangements of several ranks on one device, the tests, the conformance programs here and on the emulator, the
//! benchmark, the measurements. A step is a process with a deadline of its own ([`step`]), and no process outlives it
//! ([`processes`]). The result is one JSON and one readable report ([`report`]).
//!
//! On the emulator it does the same, so that it is tested without a GPU; the report says so.

pub mod bundle;
pub mod check;
pub mod options;
pub mod processes;
pub mod report;
pub mod step;
pub mod verdict;

pub use verdict::{not_tested, tested};

/// The file to which a program that runs as a step writes its results as JSON, for the report.
pub const RESULT: &str = "NCCL_TOOLS_RESULT";

/// The arrangements of ranks that work here: names separated by commas; unset, all.
pub const ARRANGEMENTS: &str = "NCCL_TOOLS_ARRANGEMENTS";

/// The most ranks that the devices of this machine can take; unset, no limit.
pub const MOST_RANKS: &str = "NCCL_TOOLS_MOST_RANKS";

/// The directory of the programs that tests start, with `examples` in it, where Cargo has not built them beside the tests.
pub const PROGRAMS: &str = "NCCL_TEST_PROGRAMS";

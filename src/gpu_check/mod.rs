//! The check that is carried to a machine with a GPU: what `gpu-check run` does.
//!
//! A bundle (`cargo xtask gpu-bundle`) is unpacked ([`bundle`]), and everything in it is run in steps
//! ([`check`]): which ways of putting several ranks on one device work, the tests, the conformance
//! programs here and on the emulator, the benchmark, the measurements. A step is a process with a
//! deadline of its own ([`step`]), and nothing it starts outlives it ([`processes`]). What came of it
//! all is one JSON and one readable report ([`report`]).
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

/// Where a program that runs as a step leaves its results as JSON, for the report.
pub const RESULT: &str = "NCCL_TOOLS_RESULT";

/// How ranks may be arranged here: names separated by commas; unset, every way works.
pub const ARRANGEMENTS: &str = "NCCL_TOOLS_ARRANGEMENTS";

/// The most ranks that the devices of this machine can take; unset, as many as there are.
pub const MOST_RANKS: &str = "NCCL_TOOLS_MOST_RANKS";

/// The directory of the programs that tests start, with `examples` in it, where Cargo has not built them beside the tests.
pub const PROGRAMS: &str = "NCCL_TEST_PROGRAMS";

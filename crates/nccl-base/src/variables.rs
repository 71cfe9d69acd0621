//! Environment variables that more than one of the crates reads.

/// Names the directory in which the worlds of a process write their recordings.
#[doc(hidden)]
pub const RECORD_DIR: &str = "NCCL_RUN_RECORD_DIR";

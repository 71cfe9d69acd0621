//! Which NCCL the emulator is.

use nccl_sys::{NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH, NCCL_VERSION_CODE};

/// What `ncclGetVersion` says.
pub(crate) const CODE: i32 = NCCL_VERSION_CODE;

const _: () = assert!(
    CODE == 23203,
    "the bindings are of another release than the emulator's texts"
);

/// The banner, in the form that tools look for in the library and in its log.
pub(crate) const BANNER: &str = "NCCL version 2.32.3+cuda13.0";

/// The line after it, where NCCL names its commit.
pub(crate) const ORIGIN: &str = concat!(
    "NCCL git version nccl-emulator ",
    env!("CARGO_PKG_VERSION"),
    " (on the CPU: no GPU, no NVIDIA code)"
);

const _: () = assert!(NCCL_MAJOR == 2 && NCCL_MINOR == 32 && NCCL_PATCH == 3);

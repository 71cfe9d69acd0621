//! The emulated release of NCCL: the release of the emulator's header, or an older one that the
//! options select.

use nccl_sys::{NCCL_VERSION_CODE, Version, since};

use crate::options::options;

const _: () = assert!(
    NCCL_VERSION_CODE == 23203,
    "the bindings are of another release than the emulator's texts"
);

/// The banner of the newest release, in the form that tools search for in the library.
const BANNER: &str = "NCCL version 2.32.3+cuda13.0";

/// The line after the banner, where NCCL names its commit.
pub(crate) const ORIGIN: &str = concat!(
    "NCCL git version nccl-emulator ",
    env!("CARGO_PKG_VERSION"),
    " (on the CPU: no GPU, no NVIDIA code)"
);

/// Returns the emulated release.
pub(crate) fn current() -> Version {
    options().version
}

/// Whether the emulated release is at least this one.
pub(crate) fn is_at_least(major: u32, minor: u32, patch: u32) -> bool {
    current() >= Version::new(major, minor, patch)
}

/// Returns the code of `ncclGetVersion`.
pub(crate) fn code() -> i32 {
    current().code()
}

/// The first line of the log.
pub(crate) fn banner() -> String {
    format!("NCCL version {}", release())
}

/// Returns the emulated release with the version of CUDA that it is built for: `2.32.3+cuda13.0`.
pub(crate) fn release() -> String {
    let Version {
        major,
        minor,
        patch,
    } = current();
    match BANNER.split_once('+') {
        Some((_, cuda)) => format!("{major}.{minor}.{patch}+{cuda}"),
        None => format!("{major}.{minor}.{patch}"),
    }
}

/// Whether the release has this function, under its own name or a profiler's.
pub(crate) fn has(function: &str) -> bool {
    since(function.strip_prefix('p').unwrap_or(function)).is_none_or(|first| first <= current())
}

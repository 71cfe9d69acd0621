//! Support for tests with separate processes: re-exports of `nccl::testing`, and functions to inspect processes.

use std::time::{Duration, Instant};

use procfs::FromRead;
use procfs::process::Stat;

pub use nccl::testing::{Call, Place, Role, Verdict, again, end_with, is_child, name};

/// Waits until `condition` holds.
///
/// # Panics
/// When that takes more than 20 s.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "never happened: {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process exists and is no zombie.
#[must_use]
pub fn lives(pid: u32) -> bool {
    let stat = Stat::from_file(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| stat.state != 'Z')
}

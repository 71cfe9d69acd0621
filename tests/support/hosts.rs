//! Hosts by name alone: processes of one machine with different host names.

use std::process::Command;

/// The variable with the number of ranks per host.
pub(super) const RANKS_PER_HOST: &str = "NCCL_TEST_RANKS_PER_HOST";

/// Whether a process can get a host name of its own; prints a message if not.
pub(super) fn possible() -> bool {
    let named = Command::new("unshare").args(["--uts", "true"]).output();
    let possible = named.is_ok_and(|named| named.status.success());
    if !possible {
        eprintln!("SKIPPED: hosts with names of their own need root and unshare of util-linux");
    }
    possible
}

/// Gives this rank's thread, and threads that it starts, the name of its host. Called before the name is used.
pub(super) fn move_to_own() -> Result<(), String> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let Some(each) = number(RANKS_PER_HOST) else {
        return Ok(());
    };
    let rank = number("NCCL_RUN_RANK").ok_or("no rank")?;
    // SAFETY: only this thread gets a namespace of its own, and only the host name is no longer shared.
    if unsafe { libc::unshare(libc::CLONE_NEWUTS) } != 0 {
        return Err(format!("unshare: {}", std::io::Error::last_os_error()));
    }
    let name = format!("host{}", rank / each);
    std::fs::write("/proc/sys/kernel/hostname", name).map_err(|error| format!("{error:#}"))
}

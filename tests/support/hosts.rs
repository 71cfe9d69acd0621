//! Hosts by name alone: processes of one machine whose kernel tells them different names.

use std::process::Command;

/// How many ranks a host has.
pub(super) const RANKS_PER_HOST: &str = "NCCL_TEST_RANKS_PER_HOST";

/// Whether a process can be given a name of its own; says it aloud if not.
pub(super) fn possible() -> bool {
    let named = Command::new("unshare").args(["--uts", "true"]).output();
    let possible = named.is_ok_and(|named| named.status.success());
    if !possible {
        eprintln!("SKIPPED: hosts with names of their own need root and unshare of util-linux");
    }
    possible
}

/// Gives this rank's thread, and those that it starts, the name of its host. Before anything asks for it.
pub(super) fn move_to_own() -> Result<(), String> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let Some(each) = number(RANKS_PER_HOST) else {
        return Ok(());
    };
    let rank = number("NCCL_RUN_RANK").ok_or("no rank")?;
    // SAFETY: only this thread gets a namespace of its own, and shares nothing less with the others than a name.
    if unsafe { libc::unshare(libc::CLONE_NEWUTS) } != 0 {
        return Err(format!("unshare: {}", std::io::Error::last_os_error()));
    }
    let name = format!("host{}", rank / each);
    std::fs::write("/proc/sys/kernel/hostname", name).map_err(|error| error.to_string())
}

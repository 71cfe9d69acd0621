//! Processes that run under this kernel: their descriptors, their start times and their states.
//!
//! A connection ends only when the last process that has it open ends, which may be a forgotten child that a rank
//! forked. Where both ends run under one kernel, a pidfd reports the end of the rank itself (`node/process_watch`).
//!
//! A process id is valid in one namespace only, and is reused. For a Unix socket, the kernel therefore identifies the
//! peer (`SO_PEERCRED`, in the reader's namespace). Over TCP, both ends compare boot id and namespace, and check that
//! they use one address. The descriptor must refer to the process that has this id in its own namespace (`NSpid`), and
//! is opened before that process proves its identity: so the process was alive then, and has had the id throughout.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use procfs::process::Stat;
use procfs::{FromRead, ProcessCGroups};
use rustix::process::{Pid, PidfdFlags};

use nccl_base::wire::checksum;

use super::process_state::{Held, ProcessState};

/// Identifies the running kernel and the namespace in which process ids are valid; empty if the system does not show
/// them.
pub(super) fn kernel() -> &'static str {
    static KERNEL: LazyLock<String> = LazyLock::new(|| {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let namespace = std::fs::read_link("/proc/self/ns/pid");
        match (boot, namespace) {
            (Ok(boot), Ok(namespace)) => format!("{} {}", boot.trim(), namespace.display()),
            _ => String::new(),
        }
    });
    &KERNEL
}

/// Returns a descriptor of the process that listens at the other end of a Unix socket, and its id here; `None` for this process itself.
pub(super) fn at_the_other_end(socket: impl AsFd) -> Option<(OwnedFd, u64)> {
    let pid = rustix::net::sockopt::socket_peercred(socket).ok()?.pid;
    let number = pid.as_raw_nonzero().get().try_into().ok()?;
    if number == u64::from(std::process::id()) {
        return None;
    }
    let descriptor = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?;
    Some((descriptor, number))
}

/// Describes the state of the process at the other end of a Unix socket; `None` for a running process, or if the kernel
/// does not show it.
pub(super) fn state_of_peer(socket: impl AsFd) -> Option<&'static str> {
    let pid = rustix::net::sockopt::socket_peercred(socket).ok()?.pid;
    match stat(pid.as_raw_nonzero().get().try_into().ok()?)?.state {
        'T' => Some("its process is stopped (SIGSTOP)"),
        't' => Some("its process is stopped by a debugger"),
        'Z' | 'X' => Some("its process has ended"),
        'D' => Some("its process waits in the kernel and cannot be interrupted"),
        _ => None,
    }
}

/// The result of looking up a process by its id.
pub(super) enum ProcessLookup {
    /// A descriptor of the process.
    Process(OwnedFd),
    /// The process has ended: its id is unused, or belongs to another process.
    Ended,
    /// The system does not show the process.
    Unknown,
}

impl ProcessLookup {
    pub(super) fn has_ended(&self) -> bool {
        matches!(self, Self::Ended)
    }
}

/// Finds the process with this id and this start time, both as stated by the process, in this kernel and namespace.
pub(super) fn find(pid: u32, started: u64) -> ProcessLookup {
    let Some(target) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return ProcessLookup::Unknown;
    };
    let descriptor = match rustix::process::pidfd_open(target, PidfdFlags::NONBLOCK) {
        Ok(descriptor) => descriptor,
        Err(rustix::io::Errno::SRCH) => return ProcessLookup::Ended,
        Err(_) => return ProcessLookup::Unknown,
    };
    // Read after the descriptor is open: a process that ended in between cannot have passed its id to one with the same
    // start time.
    match stat(pid.into()) {
        Some(stat) if stat.starttime == started => ProcessLookup::Process(descriptor),
        Some(_) => ProcessLookup::Ended,
        None => ProcessLookup::Unknown,
    }
}

/// Returns the start time of this process, in the kernel's units; 0 if not shown.
pub(super) fn start_time() -> u64 {
    stat(std::process::id().into()).map_or(0, |stat| stat.starttime)
}

/// Returns the parent of process `pid`: the process that started it, or that adopted it.
pub(super) fn parent_of(pid: u32) -> Option<u32> {
    stat(pid.into())?.ppid.try_into().ok()
}

/// Reads the kernel's record of a process and its main thread.
fn stat(pid: u64) -> Option<Stat> {
    Stat::from_file(format!("/proc/{pid}/stat")).ok()
}

/// Returns a checksum of [`kernel`]; 0 if the system does not show it.
pub(super) fn kernel_sum() -> u64 {
    static SUM: OnceLock<u64> = OnceLock::new();
    *SUM.get_or_init(|| match kernel() {
        "" => 0,
        kernel => checksum(kernel.as_bytes()).max(1),
    })
}

/// Returns the state of a process of this kernel and namespace; `None` if the kernel does not show it.
pub(super) fn state_of(pid: u64) -> Option<ProcessState> {
    let letter = stat(pid)?.state;
    let held = held_back(pid);
    Some(ProcessState { letter, held })
}

/// Returns whether the control group of a process is frozen, or was denied processor time.
fn held_back(pid: u64) -> Option<Held> {
    let groups = ProcessCGroups::from_file(format!("/proc/{pid}/cgroup")).ok()?;
    let of_second_version = groups.into_iter().find(|group| group.hierarchy == 0);
    let cgroup = of_second_version?.pathname;
    let directory = format!("/sys/fs/cgroup{cgroup}");
    let number = |file: &str, name: &str| -> Option<u64> {
        let text = std::fs::read_to_string(format!("{directory}/{file}")).ok()?;
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        lines.find(|(key, _)| *key == name)?.1.trim().parse().ok()
    };
    if number("cgroup.events", "frozen") == Some(1) {
        return Some(Held::Frozen { cgroup });
    }
    let throttled = number("cpu.stat", "throttled_usec").filter(|time| *time > 0)?;
    let time = Duration::from_micros(throttled);
    Some(Held::Throttled { cgroup, time })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_knows_where_its_number_means_something() {
        assert!(kernel().contains("pid:["), "{}", kernel());
    }
}

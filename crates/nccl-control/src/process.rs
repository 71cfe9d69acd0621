//! The process at the other end of a connection, watched by a descriptor of its own.
//!
//! A connection ends with the last process that has it open, and that may be a child which a rank has
//! forked and forgotten. Where both ends run under one kernel, a pidfd tells of the rank's own end.
//!
//! A number of a process means something in one namespace only, and is given out again. So it is the
//! kernel that says who is at the other end of a Unix socket (`SO_PEERCRED`, in the reader's namespace); over
//! TCP both ends compare boot and namespace, and that they use one address. And the descriptor has to be
//! of the process that calls itself by this number in its own namespace (`NSpid`), and is opened before that
//! process proves who it is: it was alive then, and had the number all the time.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::LazyLock;
use std::time::Duration;

use procfs::process::Stat;
use procfs::{FromRead, ProcessCGroups};
use rustix::process::{Pid, PidfdFlags};

use nccl_base::wire::checksum;

use super::process_state::{Held, ProcessState};

/// The running kernel and the namespace in which the numbers of processes mean something; empty where the
/// system does not say.
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

/// A descriptor of the process that listens at the other end of a Unix socket, and its number here; `None` for this process itself.
pub(super) fn at_the_other_end(socket: impl AsFd) -> Option<(OwnedFd, u64)> {
    let pid = rustix::net::sockopt::socket_peercred(socket).ok()?.pid;
    let number = pid.as_raw_nonzero().get().try_into().ok()?;
    if number == u64::from(std::process::id()) {
        return None;
    }
    let descriptor = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?;
    Some((descriptor, number))
}

/// What the kernel says of the process at the other end of a Unix socket; `None` for one that runs, and where it
/// does not say.
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

/// What was found of a process by its number.
pub(super) enum Found {
    /// A descriptor of it.
    Process(OwnedFd),
    /// It has ended: nobody has its number, or another process.
    Ended,
    /// The system does not say.
    Unknown,
}

impl Found {
    pub(super) fn has_ended(&self) -> bool {
        matches!(self, Self::Ended)
    }
}

/// The process with a number of this kernel and namespace that was started then, as it says itself.
pub(super) fn find(pid: u32, started: u64) -> Found {
    let Some(target) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return Found::Unknown;
    };
    let descriptor = match rustix::process::pidfd_open(target, PidfdFlags::NONBLOCK) {
        Ok(descriptor) => descriptor,
        Err(rustix::io::Errno::SRCH) => return Found::Ended,
        Err(_) => return Found::Unknown,
    };
    // Behind the descriptor: one that ended in between has left its number to nobody who was started at the same time.
    match stat(pid.into()) {
        Some(stat) if stat.starttime == started => Found::Process(descriptor),
        Some(_) => Found::Ended,
        None => Found::Unknown,
    }
}

/// When this process was started, as its kernel counts; 0 where it does not say.
pub(super) fn started() -> u64 {
    stat(std::process::id().into()).map_or(0, |stat| stat.starttime)
}

/// Who has started a process, or has taken it over.
pub(super) fn parent_of(pid: u32) -> Option<u32> {
    stat(pid.into())?.ppid.try_into().ok()
}

/// What the kernel says of a process and its main thread.
fn stat(pid: u64) -> Option<Stat> {
    Stat::from_file(format!("/proc/{pid}/stat")).ok()
}

/// A checksum of [`kernel`]; 0 where the system does not say.
pub(super) fn kernel_sum() -> u64 {
    match kernel() {
        "" => 0,
        kernel => checksum(kernel.as_bytes()).max(1),
    }
}

/// How it stands with a process of this kernel and namespace; `None` where the kernel does not say.
pub(super) fn state_of(pid: u64) -> Option<ProcessState> {
    let letter = stat(pid)?.state;
    let held = held_back(pid);
    Some(ProcessState { letter, held })
}

/// Whether the group of a process is frozen, or was denied processor time.
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

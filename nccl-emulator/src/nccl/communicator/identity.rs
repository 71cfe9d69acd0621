//! The identity of a rank, which it sends to the others when it joins.

use std::fs;
use std::io;
use std::sync::OnceLock;

use crate::nccl::environment;
use crate::nccl::ras::Place;
use crate::nccl::unique_id::{hash, namespace, random};
use crate::transport::RankInfo;
use crate::version;
use cuda_emulator::driver::visible;
use cuda_emulator::memory::Pool;

/// Returns the identity of this process's rank on `device`. `ras` is the place of the process's RAS thread.
pub(crate) fn rank_info(device: i32, pool: &Pool, ras: Place) -> RankInfo {
    let token = pool.token();
    RankInfo {
        pid: std::process::id(),
        device,
        version: version::code(),
        pool: 0,
        started: own_start().ok().flatten().unwrap_or(0),
        pid_namespace: namespace("pid"),
        host_hash: host_hash(),
        process: process(),
        bus_id: bus_id(device),
        pool_token: [(token >> 64) as u64, token as u64],
        uuid: cuda_emulator::driver::device::uuid(visible::physical(device.unsigned_abs())),
        ras_address: ras.address,
        ras_ports: [ras.gossip, ras.query],
    }
}

/// Returns a device's PCI bus, packed into a number as in NCCL. The driver's id of device 0 is
/// `0000:01:00.0`.
pub(crate) fn bus_id(device: i32) -> i64 {
    (i64::from(visible::physical(device.unsigned_abs())) + 1) << 12
}

/// What this process knows of the life of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    /// It began so many clock ticks after boot.
    Since(u64),
    /// A zombie counts as ended: its memory and descriptors are gone.
    Ended,
    /// It has no file in /proc that this process sees.
    Hidden,
    Unknown,
}

fn life(pid: u32) -> Life {
    match life_in(fs::read_to_string(format!("/proc/{pid}/stat"))) {
        // With the mount option `hidepid` the processes of other users have no files.
        Life::Hidden if !exists(pid) => Life::Ended,
        life => life,
    }
}

fn exists(pid: u32) -> bool {
    // SAFETY: signal 0 only asks whether the process exists.
    let asked = unsafe { libc::kill(pid.cast_signed(), 0) };
    asked == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Returns the life that a process's `stat` tells. An error says nothing of an end, but that of a missing file: this process
/// may lack, for example, the descriptor to read it.
fn life_in(stat: io::Result<String>) -> Life {
    let stat = match stat {
        Ok(stat) => stat,
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH) => return Life::Hidden,
            _ => return Life::Unknown,
        },
    };
    // The name in parentheses may contain blanks and parentheses. The state is field 3.
    let fields = stat.rfind(')').map_or("", |end| &stat[end + 1..]);
    let fields: Vec<_> = fields.split_ascii_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    match (fields.first(), number(20), number(22)) {
        // The first thread of a process may end long before the others: then it is a zombie among several threads.
        (Some(&("Z" | "X" | "x")), Some(0 | 1), _) => Life::Ended,
        (Some(_), _, Some(start)) => Life::Since(start),
        _ => Life::Unknown,
    }
}

/// It cannot be told now.
struct Unclear;

/// Returns the start of this process; `None` if /proc is that of another PID namespace, where its PID is that of another process.
fn own_start() -> Result<Option<u64>, Unclear> {
    static KNOWN: OnceLock<Option<u64>> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return Ok(*known);
    }
    let own = life_in(fs::read_to_string("/proc/self/stat"));
    let start = match (own, life(std::process::id())) {
        (Life::Unknown, _) | (_, Life::Unknown) => return Err(Unclear),
        (Life::Since(start), Life::Since(other)) if start == other => Some(start),
        _ => None,
    };
    Ok(*KNOWN.get_or_init(|| start))
}

/// Whether the process of a rank is certainly gone. A process of another PID namespace counts as
/// alive.
pub(crate) fn is_gone(info: &RankInfo) -> bool {
    static OWN: OnceLock<u64> = OnceLock::new();
    info.pid_namespace == *OWN.get_or_init(|| namespace("pid"))
        && info.started != 0
        && matches!(own_start(), Ok(Some(_)))
        && match life(info.pid) {
            Life::Since(start) => start != info.started,
            Life::Ended => true,
            Life::Hidden | Life::Unknown => false,
        }
}

/// Returns a number that is the same for all ranks of a host: a hash of `NCCL_HOSTID`, or of host name and boot id.
fn host_hash() -> u64 {
    match environment::text("NCCL_HOSTID") {
        Some(id) => hash(id.as_bytes()),
        None => {
            let mut text = crate::nccl::debug::host().into_bytes();
            text.extend(
                fs::read("/proc/sys/kernel/random/boot_id")
                    .unwrap_or_default()
                    .trim_ascii(),
            );
            hash(&text)
        }
    }
}

/// Returns a random number that identifies this process. A forked child gets another one.
pub(crate) fn process() -> u64 {
    static TOKEN: OnceLock<(u32, u64)> = OnceLock::new();
    let (pid, token) = *TOKEN.get_or_init(|| (std::process::id(), random()));
    if pid == std::process::id() {
        token
    } else {
        token ^ u64::from(std::process::id()) << 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(pid: u32) -> u64 {
        match life(pid) {
            Life::Since(start) => start,
            other => panic!("process {pid}: {other:?}"),
        }
    }

    #[test]
    fn only_a_missing_or_dead_process_has_ended() {
        let error = |code| life_in(Err(io::Error::from_raw_os_error(code)));
        assert_eq!(error(libc::ENOENT), Life::Hidden);
        assert_eq!(error(libc::ESRCH), Life::Hidden);
        for lack in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EACCES] {
            assert_eq!(error(lack), Life::Unknown);
        }
        let stat = |state, threads: u32| {
            let before = " 0".repeat(16);
            life_in(Ok(format!("7 (a) b) {state}{before} {threads} 0 41 0")))
        };
        assert_eq!(stat("S", 1), Life::Since(41));
        assert_eq!(stat("Z", 1), Life::Ended);
        // Its first thread has ended.
        assert_eq!(stat("Z", 2), Life::Since(41));
        assert_eq!(life_in(Ok(String::new())), Life::Unknown);
    }

    #[test]
    fn a_process_without_a_file_has_ended_only_if_no_signal_reaches_it() {
        // The first process belongs to another user, unless root runs this; it exists all the same.
        assert!(exists(1));
        assert!(exists(std::process::id()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let _ = child.wait().unwrap();
        assert!(!exists(child.id()));
        assert_eq!(life(child.id()), Life::Ended);
    }

    #[test]
    fn a_process_that_ended_is_known_to_be_gone() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let info = RankInfo {
            pid: child.id(),
            started: start(child.id()),
            pid_namespace: namespace("pid"),
            ..RankInfo::default()
        };
        child.kill().unwrap();
        // A zombie is gone as well.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !is_gone(&info) && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert!(is_gone(&info));
        child.wait().unwrap();
        assert!(is_gone(&info));
        let own = RankInfo {
            pid: std::process::id(),
            started: own_start().ok().flatten().unwrap(),
            ..info
        };
        assert!(!is_gone(&own));
        let elsewhere = RankInfo {
            pid_namespace: 1,
            ..info
        };
        assert!(!is_gone(&elsewhere));
    }
}

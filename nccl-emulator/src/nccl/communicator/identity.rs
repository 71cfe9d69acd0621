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
        started: match life("self") {
            Life::Since(start) => start,
            Life::Ended | Life::Unknown => 0,
        },
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
    Unknown,
}

fn life(pid: &str) -> Life {
    life_in(fs::read_to_string(format!("/proc/{pid}/stat")))
}

/// Returns the life that a process's `stat` tells. Only a missing file means an end: this process may lack, for example, the
/// descriptor to read it.
fn life_in(stat: io::Result<String>) -> Life {
    let stat = match stat {
        Ok(stat) => stat,
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH) => return Life::Ended,
            _ => return Life::Unknown,
        },
    };
    // The name in parentheses may contain blanks and parentheses.
    let fields = stat.rfind(')').map_or("", |end| &stat[end + 1..]);
    let mut fields = fields.split_ascii_whitespace();
    match fields.next() {
        Some("Z" | "X" | "x") => Life::Ended,
        // The start is field 22.
        Some(_) => match fields.nth(18).map(str::parse) {
            Some(Ok(start)) => Life::Since(start),
            _ => Life::Unknown,
        },
        None => Life::Unknown,
    }
}

/// Whether the process of a rank is certainly gone. A process of another PID namespace counts as
/// alive.
pub(crate) fn is_gone(info: &RankInfo) -> bool {
    static OWN: OnceLock<u64> = OnceLock::new();
    info.pid_namespace == *OWN.get_or_init(|| namespace("pid"))
        && info.started != 0
        && match life(&info.pid.to_string()) {
            Life::Since(start) => start != info.started,
            Life::Ended => true,
            Life::Unknown => false,
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

    fn start(pid: &str) -> u64 {
        match life(pid) {
            Life::Since(start) => start,
            other => panic!("process {pid}: {other:?}"),
        }
    }

    #[test]
    fn only_a_missing_or_dead_process_has_ended() {
        let error = |code| life_in(Err(io::Error::from_raw_os_error(code)));
        assert_eq!(error(libc::ENOENT), Life::Ended);
        assert_eq!(error(libc::ESRCH), Life::Ended);
        for lack in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EACCES] {
            assert_eq!(error(lack), Life::Unknown);
        }
        let stat = |state| life_in(Ok(format!("7 (a) b) {state}{} 41 0", " 0".repeat(18))));
        assert_eq!(stat("S"), Life::Since(41));
        assert_eq!(stat("Z"), Life::Ended);
        assert_eq!(life_in(Ok(String::new())), Life::Unknown);
    }

    #[test]
    fn a_process_that_ended_is_known_to_be_gone() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let info = RankInfo {
            pid: child.id(),
            started: start(&child.id().to_string()),
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
            started: start("self"),
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

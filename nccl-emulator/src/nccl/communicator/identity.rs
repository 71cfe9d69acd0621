//! The identity of a rank, which it sends to the others when it joins.

use std::fs;
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
        started: started("self").unwrap_or(0),
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

/// Returns the start of a process, in clock ticks since boot: field 22 of its `stat`. Returns `None` if the process has
/// ended. A zombie counts as ended: its memory and descriptors are gone.
fn started(pid: &str) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain blanks and parentheses.
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X" | "x")).then_some(())?;
    fields.nth(18)?.parse().ok()
}

/// Whether the process of a rank is certainly gone. A process of another PID namespace counts as
/// alive.
pub(crate) fn is_gone(info: &RankInfo) -> bool {
    static OWN: OnceLock<u64> = OnceLock::new();
    info.pid_namespace == *OWN.get_or_init(|| namespace("pid"))
        && info.started != 0
        && started(&info.pid.to_string()) != Some(info.started)
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

    #[test]
    fn a_process_that_ended_is_known_to_be_gone() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let info = RankInfo {
            pid: child.id(),
            started: started(&child.id().to_string()).unwrap(),
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
            started: started("self").unwrap(),
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

//! Who a rank is: what it tells the others when it joins.

use std::fs;
use std::sync::OnceLock;

use crate::nccl::environment;
use crate::nccl::unique_id::{hash, namespace, random};
use crate::transport::RankInfo;
use crate::version;
use cuda_emulator::driver::visible;
use cuda_emulator::memory::Pool;

/// What this process says of its rank on `device`.
pub(crate) fn rank_info(device: i32, pool: &Pool) -> RankInfo {
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
    }
}

/// A device's PCI bus, as NCCL packs it into a number: the driver side says `0000:01:00.0` of
/// device 0.
pub(crate) fn bus_id(device: i32) -> i64 {
    (i64::from(visible::physical(device.unsigned_abs())) + 1) << 12
}

/// When a process started, in clock ticks since boot: field 22 of its `stat`. `None` of one that has ended, a zombie as
/// well: its memory and descriptors are gone.
fn started(pid: &str) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, even blanks and parentheses.
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X" | "x")).then_some(())?;
    fields.nth(18)?.parse().ok()
}

/// Whether the process of a rank is certainly gone. One that cannot be seen from here counts as
/// alive.
pub(crate) fn is_gone(info: &RankInfo) -> bool {
    static OWN: OnceLock<u64> = OnceLock::new();
    info.pid_namespace == *OWN.get_or_init(|| namespace("pid"))
        && info.started != 0
        && started(&info.pid.to_string()) != Some(info.started)
}

/// The same number for all ranks of a host; `NCCL_HOSTID` replaces what it is made of.
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

/// Tells this process from all others, also from the one it was forked from.
fn process() -> u64 {
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

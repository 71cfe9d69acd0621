//! Control groups with a limit.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A control group; its processes must have ended before this value is dropped.
pub(crate) struct Group(pub(crate) PathBuf);

impl Group {
    /// A group with a limit: bytes (`memory`), thousandths of a processor (`cpu`), or processes and threads (`pids`).
    /// `None` where this process may not create one.
    pub(crate) fn new(controller: &str, limit: u64) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("nccl-test-{}-{number}", std::process::id());
        for line in own.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            let unified = controllers.is_empty();
            let mount = match unified {
                true => String::from("/sys/fs/cgroup"),
                false if controllers.split(',').any(|one| one == controller) => {
                    format!("/sys/fs/cgroup/{controllers}")
                }
                false => continue,
            };
            // Processors are limited by microseconds of every 100 ms.
            let (file, text) = match (controller, unified) {
                ("memory", true) => ("memory.max", limit.to_string()),
                ("memory", false) => ("memory.limit_in_bytes", limit.to_string()),
                ("cpu", true) => ("cpu.max", format!("{} 100000", limit * 100)),
                ("cpu", false) => ("cpu.cfs_quota_us", (limit * 100).to_string()),
                _ => ("pids.max", limit.to_string()),
            };
            let group = Self(
                Path::new(&mount)
                    .join(path.trim_start_matches('/'))
                    .join(&name),
            );
            if std::fs::create_dir(&group.0).is_ok()
                && std::fs::write(group.0.join(file), text).is_ok()
            {
                return Some(group);
            }
        }
        None
    }

    /// Moves a process into the group.
    ///
    /// # Errors
    /// The system's.
    #[allow(dead_code, reason = "not every test binary uses it")]
    pub(crate) fn take(&self, pid: u32) -> std::io::Result<()> {
        std::fs::write(self.0.join("cgroup.procs"), pid.to_string())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // It cannot be removed while one of its processes has not ended completely.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

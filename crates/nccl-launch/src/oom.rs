//! Whether the kernel's OOM killer ended a process, according to the counters of its control group.
//!
//! The counter shows that *a* process of the group was killed, not which one. Combined with a rank that died of a
//! SIGKILL not sent by this fleet, it is near-certain evidence; messages state both facts, not the conclusion.

use std::path::{Path, PathBuf};

use procfs::process::MountInfo;
use procfs::{FromRead, ProcessCGroup, ProcessCGroups};

use crate::departure::OomKill;

/// The file with the counter, and the file with the memory limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Counter {
    file: PathBuf,
    limit: PathBuf,
}

impl Counter {
    /// The counter of the control group of the process `pid`.
    pub(super) fn of(pid: u32) -> Option<Self> {
        let groups = ProcessCGroups::from_file(format!("/proc/{pid}/cgroup")).ok()?;
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        candidates(&groups, &mounts)
            .into_iter()
            .find(|counter| counter.read().is_some())
    }

    /// Returns how many processes have been killed so far.
    pub(super) fn read(&self) -> Option<u64> {
        let text = std::fs::read_to_string(&self.file).ok()?;
        let value = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        value?.trim().parse().ok()
    }

    /// Returns the kills since the counter stood at `before`.
    pub(super) fn since(&self, before: u64) -> Option<OomKill> {
        let killed = self.read()?.checked_sub(before).filter(|&more| more > 0)?;
        let group = self.file.parent().unwrap_or(Path::new("/"));
        let limit = std::fs::read_to_string(&self.limit).ok();
        let limit = limit.and_then(|text| text.trim().parse::<u64>().ok());
        Some(OomKill {
            group: group.display().to_string(),
            killed,
            // Version 1 control groups represent the absence of a limit by a huge number.
            limit: limit.filter(|&limit| limit < 1 << 60),
        })
    }
}

/// Returns where the counter of a process may be: `groups` is its `/proc/PID/cgroup`, `mounts` the text of a
/// `/proc/PID/mountinfo`. Lines that cannot be parsed are skipped.
fn candidates(groups: &ProcessCGroups, mounts: &str) -> Vec<Counter> {
    let mounts = mounts.lines().map(MountInfo::from_line);
    let mounts: Vec<_> = mounts.filter_map(Result::ok).collect();
    let mut found = Vec::new();
    for group in groups {
        let unified = group.controllers.is_empty();
        for mount in mounts.iter().filter(|mount| shows(mount, group)) {
            // In a container the mount shows only a part of the tree, and the path may be that of the host.
            let root = mount.root.trim_end_matches('/');
            let inside = group.pathname.strip_prefix(root).unwrap_or("");
            for directory in [
                mount.mount_point.join(inside.trim_start_matches('/')),
                mount.mount_point.clone(),
            ] {
                let (file, limit) = match unified {
                    true => ("memory.events", "memory.max"),
                    false => ("memory.oom_control", "memory.limit_in_bytes"),
                };
                found.push(Counter {
                    file: directory.join(file),
                    limit: directory.join(limit),
                });
            }
        }
    }
    found
}

/// Whether a mount may show the memory counters of a group.
fn shows(mount: &MountInfo, group: &ProcessCGroup) -> bool {
    if group.controllers.is_empty() {
        return mount.fs_type == "cgroup2";
    }
    group.controllers.iter().any(|name| name == "memory")
        && mount.fs_type == "cgroup"
        && mount.super_options.contains_key("memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(groups: &str, mounts: &str) -> Vec<String> {
        let groups = ProcessCGroups::from_read(groups.as_bytes()).unwrap();
        let found = candidates(&groups, mounts);
        found.iter().map(|c| c.file.display().to_string()).collect()
    }

    #[test]
    fn both_kinds_of_control_groups_are_found() {
        let new = "35 24 0:31 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate";
        assert_eq!(
            files("0::/user.slice/job\n", new)[0],
            "/sys/fs/cgroup/user.slice/job/memory.events"
        );
        let old = "32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                   33 23 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu";
        assert_eq!(
            files("9:cpu:/x\n4:memory:/box/a\n0::/\n", old),
            [
                "/sys/fs/cgroup/memory/box/a/memory.oom_control",
                "/sys/fs/cgroup/memory/memory.oom_control"
            ]
        );
    }

    #[test]
    fn a_container_sees_its_own_part_of_the_tree() {
        let mounts = "35 24 0:31 /kube/pod7 /sys/fs/cgroup ro - cgroup2 cgroup2 rw";
        assert_eq!(
            files("0::/kube/pod7/c1", mounts)[0],
            "/sys/fs/cgroup/c1/memory.events"
        );
        assert_eq!(
            files("0::/elsewhere", mounts)[0],
            "/sys/fs/cgroup/memory.events"
        );
    }

    #[test]
    fn what_rose_is_told_with_the_limit() {
        let directory = tempfile::tempdir().unwrap();
        let counter = Counter {
            file: directory.path().join("memory.events"),
            limit: directory.path().join("memory.max"),
        };
        assert_eq!(counter.read(), None);
        std::fs::write(&counter.file, "oom 4\noom_kill 3\noom_group_kill 0\n").unwrap();
        std::fs::write(&counter.limit, "67108864\n").unwrap();
        assert_eq!(counter.since(3), None);
        let text = counter.since(2).unwrap().to_string();
        assert!(text.contains("ended 1 process of"), "{text}");
        assert!(text.ends_with("(limit 64 MiB) while it ran"), "{text}");
    }
}

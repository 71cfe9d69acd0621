//! The system's limits for this process: open files, threads, locked memory, shared memory, ports.

use serde::{Deserialize, Serialize};

use super::System;

/// The limits of one process; `None` if the system does not report a limit, or sets none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct Limits {
    pub files: Option<u64>,
    pub files_hard: Option<u64>,
    pub files_used: u64,
    /// Processes and threads of this user (`ulimit -u`); `None` for the super-user.
    pub processes: Option<u64>,
    pub threads_used: u64,
    /// Processes and threads that the tightest control group still allows; `tasks_file` has that limit.
    pub tasks_left: Option<u64>,
    pub tasks_file: String,
    /// Locked memory in bytes.
    pub locked: Option<u64>,
    /// Bytes that the tightest control group allows, whatever its usage, which is mostly cache that the kernel can
    /// reclaim. `memory_file` has that limit.
    pub memory: Option<u64>,
    pub memory_file: String,
    /// Thousandths of a processor that the tightest control group allows.
    pub processors: Option<u64>,
    /// Size of `/dev/shm` in bytes.
    pub shared_size: Option<u64>,
    pub shared_free: Option<u64>,
    /// Number of NCCL's leaked files in `/dev/shm`, and their bytes.
    pub leaked: u64,
    pub leaked_bytes: u64,
    /// Range of the ports that the system assigns to connections.
    pub first_port: Option<u64>,
    pub last_port: Option<u64>,
}

/// Returns the number of threads of this process, and the limits on that number, as a part of a sentence.
pub fn thread_limits() -> String {
    let limits = gather(&System::real());
    let mut text = format!("this process has {}", limits.threads_used);
    if let Some(left) = limits.tasks_left {
        text.push_str(&format!("; {} leaves {left}", limits.tasks_file));
    }
    if let Some(most) = limits.processes {
        text.push_str(&format!("; ulimit -u of its user is {most}"));
    }
    text
}

/// Minimum age of a leaked segment: NCCL removes the name of a segment as soon as all ranks have opened it.
const LEAKED_AFTER: std::time::Duration = std::time::Duration::from_secs(120);

#[doc(hidden)]
pub fn gather(system: &System) -> Limits {
    let text = system.text("/proc/self/limits").unwrap_or_default();
    let soft = |name: &str| limit(&text, name, 0);
    let status = system.text("/proc/self/status").unwrap_or_default();
    let groups = Groups::of(system);
    let (tasks_left, tasks_file) = groups.left("pids.max", "pids.current", "pids");
    let (memory, memory_file) = groups.left("memory.max", "", "memory");
    let shared = rustix::fs::statvfs(system.path("/dev/shm")).ok();
    let shared = shared.and_then(|stat| {
        let space = Space {
            blocks: stat.f_blocks,
            available: stat.f_bavail,
            block_size: stat.f_frsize,
        };
        space.bytes()
    });
    let (leaked, leaked_bytes) = leaked(system);
    let ports = system.text("/proc/sys/net/ipv4/ip_local_port_range");
    let mut ports = ports.iter().flat_map(|text| text.split_ascii_whitespace());
    let mut port = || ports.next()?.parse().ok();
    Limits {
        files: soft("Max open files"),
        files_hard: limit(&text, "Max open files", 1),
        files_used: system.names("/proc/self/fd").len() as u64,
        processes: soft("Max processes").filter(|_| !system.is_super_user),
        threads_used: field(&status, "Threads:").unwrap_or(1),
        tasks_left,
        tasks_file,
        locked: soft("Max locked memory"),
        memory,
        memory_file,
        processors: groups.processors(),
        shared_size: shared.map(|(size, _)| size),
        shared_free: shared.map(|(_, free)| free),
        leaked,
        leaked_bytes,
        first_port: port(),
        last_port: port(),
    }
}

/// The blocks of a file system.
struct Space {
    blocks: u64,
    available: u64,
    block_size: u64,
}

impl Space {
    /// Returns the size and the free bytes; `None` for a tmpfs without a limit (`size=0`), which reports no blocks at all.
    fn bytes(&self) -> Option<(u64, u64)> {
        let bytes = |blocks: u64| blocks.saturating_mul(self.block_size);
        (self.blocks > 0).then(|| (bytes(self.blocks), bytes(self.available)))
    }
}

/// Parses a column of a line of `/proc/PID/limits`; `None` for `unlimited`. The crate procfs is not used, because it
/// returns nothing if a single line is missing, and the crates without a control plane do not depend on it.
fn limit(text: &str, name: &str, column: usize) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().nth(column)?.parse().ok()
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

fn leaked(system: &System) -> (u64, u64) {
    let names = system.names("/dev/shm");
    let files = names
        .iter()
        .filter(|name| name.starts_with("nccl-"))
        .filter_map(|name| std::fs::metadata(system.path(format!("/dev/shm/{name}"))).ok())
        .filter(|file| {
            let age = file.modified().ok().and_then(|time| time.elapsed().ok());
            age.is_some_and(|age| age > LEAKED_AFTER)
        });
    files.fold((0, 0), |(count, bytes), file| {
        (count + 1, bytes + file.len())
    })
}

/// The control groups of this process, from its own up to the root.
struct Groups<'s> {
    system: &'s System,
    /// The path in version 2.
    path: String,
    /// The paths in version 1, where each controller has a tree of its own.
    old: Vec<(String, String)>,
}

impl<'s> Groups<'s> {
    fn of(system: &'s System) -> Self {
        let text = system.text("/proc/self/cgroup").unwrap_or_default();
        let mut path = String::from("/");
        let mut old = Vec::new();
        for line in text.lines().take(64) {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(own)) = (parts.next(), parts.next()) else {
                continue;
            };
            if controllers.is_empty() {
                own.clone_into(&mut path);
            } else {
                let each = controllers.split(',');
                old.extend(each.map(|controller| (controller.to_owned(), own.to_owned())));
            }
        }
        Self { system, path, old }
    }

    /// Returns the directories that may limit a controller, of both versions. In a container, the path often does not
    /// exist, and the container's own root is what counts.
    fn directories(&self, controller: &str) -> Vec<String> {
        let mut found = above("/sys/fs/cgroup", &self.path);
        let old = self.old.iter().filter(|(name, _)| name == controller);
        for (name, path) in old {
            found.extend(above(&format!("/sys/fs/cgroup/{name}"), path));
        }
        found
    }

    /// Returns what is left in the tightest group, or its whole limit if there is no usage file, and the path of the
    /// file with the limit.
    fn left(&self, most: &str, used: &str, controller: &str) -> (Option<u64>, String) {
        let old = match controller {
            "memory" => ("memory.limit_in_bytes", ""),
            _ => (most, used),
        };
        let mut tightest = (None, String::new());
        for directory in self.directories(controller) {
            for (most, used) in [(most, used), old] {
                let file = format!("{directory}/{most}");
                // Version 1 writes a number close to 2⁶³ for no limit.
                let Some(most) = self.system.number(&file).filter(|&most| most < 1 << 60) else {
                    continue;
                };
                let used = match used {
                    "" => None,
                    used => self.system.number(format!("{directory}/{used}")),
                };
                let left = most.saturating_sub(used.unwrap_or(0));
                if tightest.0.is_none_or(|least| left < least) {
                    tightest = (Some(left), file);
                }
            }
        }
        tightest
    }

    fn processors(&self) -> Option<u64> {
        let quota = |directory: &String| {
            let text = self.system.text(format!("{directory}/cpu.max"));
            let (quota, period) = match text {
                Some(text) => {
                    let mut words = text.split_ascii_whitespace().map(str::parse::<u64>);
                    (words.next()?.ok()?, words.next()?.ok()?)
                }
                None => (
                    self.system
                        .number(format!("{directory}/cpu.cfs_quota_us"))?,
                    self.system
                        .number(format!("{directory}/cpu.cfs_period_us"))?,
                ),
            };
            quota.checked_mul(1000)?.checked_div(period)
        };
        self.directories("cpu").iter().filter_map(quota).min()
    }
}

/// Returns a directory below `root`, and all above it up to `root` itself.
fn above(root: &str, path: &str) -> Vec<String> {
    let mut found = vec![root.to_owned()];
    let mut own = root.to_owned();
    for part in path
        .split('/')
        .filter(|part| !part.is_empty() && *part != "..")
    {
        own = format!("{own}/{part}");
        found.push(own.clone());
    }
    found.truncate(64);
    found
}

#[cfg(test)]
mod tests {
    use super::super::fake_tree::Tree;
    use super::*;

    fn gathered(tree: &Tree) -> Limits {
        gather(&System::fake(tree.path(), &[]))
    }

    #[test]
    fn limits_are_read_from_a_process_like_this_one() {
        let tree = Tree::new();
        tree.write(
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max processes             127                  200                  processes \n\
             Max open files            64                   4096                 files     \n\
             Max locked memory         8388608              unlimited            bytes     \n",
        );
        tree.write("proc/self/status", "Name:\tx\nThreads:\t7\n");
        for descriptor in 0..5 {
            tree.write(&format!("proc/self/fd/{descriptor}"), "");
        }
        tree.write("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n");
        tree.write("dev/shm/nccl-new", "xyz");
        let limits = gathered(&tree);
        assert_eq!((limits.files, limits.files_hard), (Some(64), Some(4096)));
        assert_eq!((limits.files_used, limits.threads_used), (5, 7));
        assert_eq!(
            (limits.processes, limits.locked),
            (Some(127), Some(8 << 20))
        );
        assert_eq!(
            (limits.first_port, limits.last_port),
            (Some(32768), Some(60999))
        );
        // A new file belongs to a job that starts.
        assert_eq!(limits.leaked, 0);
        assert!(limits.shared_size.is_some());
    }

    #[test]
    fn an_old_segment_is_a_leaked_one() {
        let tree = Tree::new();
        tree.write("dev/shm/nccl-abc", "12345");
        tree.write("dev/shm/other", "12345");
        let long_ago = std::time::SystemTime::now() - 2 * LEAKED_AFTER;
        for name in ["nccl-abc", "other"] {
            let path = tree.path().join("dev/shm").join(name);
            let file = std::fs::File::options().write(true).open(path).unwrap();
            file.set_modified(long_ago).unwrap();
        }
        let limits = gathered(&tree);
        assert_eq!((limits.leaked, limits.leaked_bytes), (1, 5));
    }

    #[test]
    fn shared_memory_without_a_limit_is_not_too_little() {
        let space = |blocks, available| {
            let block_size = 4096;
            Space {
                blocks,
                available,
                block_size,
            }
            .bytes()
        };
        assert_eq!(space(0, 0), None);
        // Full, but limited.
        assert_eq!(space(16, 0), Some((64 << 10, 0)));
        assert_eq!(space(16, 1), Some((64 << 10, 4 << 10)));
    }

    #[test]
    fn the_tightest_of_all_control_groups_counts() {
        let tree = Tree::new();
        tree.write("proc/self/cgroup", "0::/a/b\n");
        tree.write("sys/fs/cgroup/a/pids.max", "100\n");
        tree.write("sys/fs/cgroup/a/pids.current", "90\n");
        tree.write("sys/fs/cgroup/a/b/pids.max", "max\n");
        tree.write("sys/fs/cgroup/a/b/memory.max", "1000\n");
        tree.write("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
        tree.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
        let limits = gathered(&tree);
        assert_eq!(limits.tasks_left, Some(10));
        assert_eq!(limits.tasks_file, "/sys/fs/cgroup/a/pids.max");
        assert_eq!(limits.memory, Some(1000));
        assert_eq!(limits.processors, Some(1500));
    }

    #[test]
    fn control_groups_of_the_first_version_are_read_as_well() {
        let tree = Tree::new();
        tree.write(
            "proc/self/cgroup",
            "3:cpu,cpuacct:/x\n2:memory:/x\n1:pids:/x\n",
        );
        tree.write("sys/fs/cgroup/pids/x/pids.max", "20\n");
        tree.write(
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes",
            "9223372036854771712\n",
        );
        tree.write("sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "50000\n");
        tree.write("sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000\n");
        let limits = gathered(&tree);
        assert_eq!((limits.tasks_left, limits.memory), (Some(20), None));
        assert_eq!(limits.processors, Some(500));
    }

    #[test]
    fn this_process_has_limits() {
        let limits = gather(&System::real());
        assert!(limits.files_used > 2 && limits.threads_used > 0);
        assert!(limits.first_port < limits.last_port);
    }
}

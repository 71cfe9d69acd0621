//! The memory of this process's control group: processes that the out-of-memory killer ended in it, and how long its
//! processes were stalled by lack of memory.

use std::fmt;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use nccl_base::departure::cut;
use nccl_base::sanitize;
use nccl_base::system::System;

/// Memory pressure, in percent of the last ten seconds, from which on it is reported.
const HIGH: f64 = 20.0;

/// The memory of a control group.
///
/// ```
/// let memory = nccl::host_evidence::HostEvidence::gather().memory;
/// if memory.oom_kills > Some(0) {
///     println!("{}: {:?} processes were ended for want of memory", memory.cgroup, memory.oom_kills);
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Memory {
    /// The control group, as this process sees it.
    pub cgroup: String,
    /// Number of its processes that the out-of-memory killer has ended since this process first looked (before its
    /// first communicator); `None` where the kernel does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oom_kills: Option<u64>,
    /// Its memory in use and its limit, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
    /// See [`used`](Self::used); `None` for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Share of the last ten seconds in which all its processes were stalled by lack of memory, in percent; that of the
    /// whole host if the group has no such value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pressure: Option<f64>,
}

impl Memory {
    /// Returns whether memory pressure is high enough to slow down or stop a rank.
    ///
    /// ```
    /// if nccl::host_evidence::HostEvidence::gather().memory.is_short() {
    ///     eprintln!("this host swaps, or reads its programs again and again");
    /// }
    /// ```
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.pressure.is_some_and(|pressure| pressure >= HIGH)
    }

    /// Returns the state now, and the kills since `baseline`.
    pub(super) fn gather(system: &System, baseline: Option<u64>) -> Self {
        let group = Group::of(system);
        let kills = group.oom_kills();
        Self {
            oom_kills: kills
                .zip(baseline)
                .map(|(now, then)| now.saturating_sub(then)),
            used: group.number("memory.current", "memory.usage_in_bytes"),
            // Version 1 has a number of nearly 2^63 for no limit.
            limit: group
                .number("memory.max", "memory.limit_in_bytes")
                .filter(|limit| *limit < 1 << 62),
            pressure: group.pressure(),
            cgroup: group.name,
        }
    }

    pub(super) fn bound(&mut self) {
        self.cgroup = sanitize::name(&self.cgroup);
        cut(&mut self.cgroup, 256);
        self.pressure = self
            .pressure
            .filter(|pressure| (0.0..=100.0).contains(pressure));
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: u64 = 1 << 20;
        write!(f, "control group {}", self.cgroup)?;
        match (self.used, self.limit) {
            (Some(used), Some(limit)) => {
                write!(f, " uses {} of {} MiB", used / MIB, limit / MIB)?;
            }
            (Some(used), None) => write!(f, " uses {} MiB, without a limit", used / MIB)?,
            _ => f.write_str(" does not say what it uses")?,
        }
        if let Some(pressure) = self.pressure.filter(|pressure| *pressure >= 1.0) {
            write!(
                f,
                "; its processes stood still for want of memory for {pressure:.0} % of the last 10 s"
            )?;
        }
        Ok(())
    }
}

/// Returns the count of kills when this process first looked.
pub(super) fn baseline() -> Option<u64> {
    static BASELINE: OnceLock<Option<u64>> = OnceLock::new();
    *BASELINE.get_or_init(|| Group::of(&System::real()).oom_kills())
}

/// This process's control group for memory.
struct Group<'s> {
    system: &'s System,
    /// Its path in `/proc/self/cgroup`.
    name: String,
    /// Its directory.
    directory: String,
    is_version_2: bool,
}

impl<'s> Group<'s> {
    fn of(system: &'s System) -> Self {
        let text = system.text("/proc/self/cgroup").unwrap_or_default();
        let mut found = (String::from("/"), "/sys/fs/cgroup", true);
        for line in text.lines().take(64) {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
                continue;
            };
            if controllers.split(',').any(|one| one == "memory") {
                found = (path.to_owned(), "/sys/fs/cgroup/memory", false);
                break;
            }
            if controllers.is_empty() {
                path.clone_into(&mut found.0);
            }
        }
        let (name, root, is_version_2) = found;
        // In a container the path may be that of the host, whose directory is not visible: its own is the root there.
        let inside = format!("{root}{}", name.trim_end_matches('/'));
        let is_there = !name.contains("..") && system.path(&inside).is_dir();
        Self {
            system,
            directory: if is_there { inside } else { root.to_owned() },
            name,
            is_version_2,
        }
    }

    fn text(&self, file: &str) -> Option<String> {
        self.system.text(format!("{}/{file}", self.directory))
    }

    fn number(&self, file: &str, old: &str) -> Option<u64> {
        let file = if self.is_version_2 { file } else { old };
        self.text(file)?.parse().ok()
    }

    /// Returns the kills in this group alone where the kernel counts them. `memory.events` includes the groups below,
    /// which may belong to other jobs.
    fn oom_kills(&self) -> Option<u64> {
        let text = match self.is_version_2 {
            true => self
                .text("memory.events.local")
                .or_else(|| self.text("memory.events")),
            false => self.text("memory.oom_control"),
        }?;
        let count = |line: &str| line.strip_prefix("oom_kill ")?.trim().parse().ok();
        text.lines().find_map(count)
    }

    /// Returns the share of `full` in the last ten seconds: `full avg10=0.00 avg60=…`.
    fn pressure(&self) -> Option<f64> {
        let own = self
            .is_version_2
            .then(|| self.text("memory.pressure"))
            .flatten();
        let text = own.or_else(|| self.system.text("/proc/pressure/memory"))?;
        let full = text.lines().find_map(|line| line.strip_prefix("full "))?;
        let mut fields = full.split_ascii_whitespace();
        let average = fields.find_map(|field| field.strip_prefix("avg10="))?;
        average.parse().ok().filter(|share: &f64| share.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &std::path::Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn the_kills_of_a_group_of_version_2_are_counted_from_the_baseline_on() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "proc/self/cgroup", "0::/job/rank-1\n");
        let group = "sys/fs/cgroup/job/rank-1";
        let events = "low 0\nhigh 0\nmax 7\noom 3\noom_kill 5\noom_group_kill 0\n";
        write(root.path(), &format!("{group}/memory.events"), events);
        write(
            root.path(),
            &format!("{group}/memory.current"),
            "1073741824\n",
        );
        write(root.path(), &format!("{group}/memory.max"), "max\n");
        let pressure = "some avg10=90.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=35.50 avg60=0.00 avg300=0.00 total=1\n";
        write(root.path(), &format!("{group}/memory.pressure"), pressure);
        let system = System::fake(root.path(), &[]);
        let memory = Memory::gather(&system, Some(3));
        assert_eq!((memory.oom_kills, memory.limit), (Some(2), None));
        // The groups below are not counted, where that is known.
        let own = "oom 1\noom_kill 4\n";
        write(root.path(), &format!("{group}/memory.events.local"), own);
        assert_eq!(Memory::gather(&system, Some(3)).oom_kills, Some(1));
        assert!(memory.is_short());
        assert_eq!(
            memory.to_string(),
            "control group /job/rank-1 uses 1024 MiB, without a limit; its processes stood still for want of memory for \
             36 % of the last 10 s"
        );
        assert_eq!(Memory::gather(&system, None).oom_kills, None);
    }

    #[test]
    fn a_group_of_version_1_and_one_that_is_the_root_of_its_container_are_read() {
        let root = tempfile::tempdir().unwrap();
        let groups = "5:memory,hugetlb:/docker/abc\n1:cpu:/\n0::/\n";
        write(root.path(), "proc/self/cgroup", groups);
        let control = "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n";
        write(
            root.path(),
            "sys/fs/cgroup/memory/memory.oom_control",
            control,
        );
        let limit = "9223372036854771712\n";
        write(
            root.path(),
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            limit,
        );
        let system = System::fake(root.path(), &[]);
        let memory = Memory::gather(&system, Some(0));
        assert_eq!((memory.oom_kills, memory.limit), (Some(1), None));
        assert_eq!(memory.cgroup, "/docker/abc");
        assert!(!memory.is_short());
    }

    #[test]
    fn a_machine_that_says_nothing_gives_nothing() {
        let root = tempfile::tempdir().unwrap();
        let memory = Memory::gather(&System::fake(root.path(), &[]), Some(0));
        assert_eq!((memory.oom_kills, memory.pressure), (None, None));
    }
}

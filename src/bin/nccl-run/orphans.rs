//! Processes that have lost their parent.
//!
//! They become children of the first process of their container. When that is nccl-run, it has to take note
//! of their ends, or they stay as zombies for as long as it runs.

use rustix::process::{Pid, WaitOptions, getpid, waitpid};

/// Whether this process is the one that gets them.
pub(crate) fn come_to_us() -> bool {
    getpid().is_init()
}

/// Takes note of those that have ended. Ranks are another's business: they lead a process group, which what
/// they leave behind does not.
pub(crate) fn bury() {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return;
    };
    for entry in entries.flatten() {
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if let Some(pid) = dead_orphan(&stat).and_then(Pid::from_raw) {
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

/// The number of the process, if this text of `/proc/PID/stat` is that of a zombie whose parent is the first
/// process, and which does not lead a process group.
fn dead_orphan(stat: &str) -> Option<i32> {
    let (head, fields) = stat.rsplit_once(") ")?;
    let pid = head.split(' ').next()?.parse().ok()?;
    let mut fields = fields.split(' ');
    let (state, parent, group) = (fields.next()?, fields.next()?, fields.next()?);
    (state == "Z" && parent == "1" && group.parse() != Ok(pid)).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::dead_orphan;

    #[test]
    fn ranks_and_the_living_are_let_alone() {
        assert_eq!(dead_orphan("12 (a) b) Z 1 7 7 0"), Some(12));
        assert_eq!(dead_orphan("12 (rank) Z 1 12 7 0"), None);
        assert_eq!(dead_orphan("12 (sleep) S 1 7 7 0"), None);
        assert_eq!(dead_orphan("12 (sleep) Z 5 7 7 0"), None);
        assert_eq!(dead_orphan(""), None);
    }
}

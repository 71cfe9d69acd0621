//! Processes that have lost their parent.
//!
//! They become children of the first process of their container. When that is nccl-run, it has to collect their exit
//! status, or they stay zombies for as long as it runs.

use procfs::process::{Stat, all_processes};
use rustix::process::{Pid, WaitOptions, getpid, waitpid};

/// Whether this process is the first process, which becomes their parent.
pub(crate) fn come_to_us() -> bool {
    getpid().is_init()
}

/// Collects the exit status of ended orphans. Ranks are excluded: the fleet collects those, and they lead a process
/// group, which their descendants do not.
pub(crate) fn bury() {
    let processes = all_processes().into_iter().flatten().flatten();
    let stats = processes.filter_map(|process| process.stat().ok());
    for orphan in stats.filter(is_dead_orphan) {
        let _ = waitpid(Pid::from_raw(orphan.pid), WaitOptions::NOHANG);
    }
}

/// Whether this is a zombie whose parent is the first process, and which does not lead a process group.
fn is_dead_orphan(stat: &Stat) -> bool {
    stat.state == 'Z' && stat.ppid == 1 && stat.pgrp != stat.pid
}

#[cfg(test)]
mod tests {
    use procfs::FromRead;

    use super::*;

    #[test]
    fn ranks_and_the_living_are_let_alone() {
        let is_buried = |head: &str| {
            let text = format!("{head}{}", " 0".repeat(46));
            is_dead_orphan(&Stat::from_read(text.as_bytes()).unwrap())
        };
        assert!(is_buried("12 (a) b) Z 1 7 7"));
        assert!(!is_buried("12 (rank) Z 1 12 7"));
        assert!(!is_buried("12 (sleep) S 1 7 7"));
        assert!(!is_buried("12 (sleep) Z 5 7 7"));
    }
}

//! Processes that have lost their parent.
//!
//! They become children of the first process of their container. When that is nccl-run, it has to collect their exit
//! status, or they stay zombies for as long as it runs.

use nccl::launch::Fleet;
use procfs::process::{Stat, all_processes};
use rustix::process::{Pid, WaitOptions, getpid, waitpid};

/// Whether this process is the first process, which becomes their parent.
pub(crate) fn come_to_us() -> bool {
    getpid().is_init()
}

/// Collects the exit status of ended orphans. The processes that the fleet has started are excluded: it collects those.
pub(crate) fn bury(fleet: &Fleet) {
    let processes = all_processes().into_iter().flatten().flatten();
    let stats = processes.filter_map(|process| process.stat().ok());
    let mut dead: Vec<i32> = stats.filter(is_dead_child).map(|stat| stat.pid).collect();
    let known = started_by(fleet);
    dead.retain(|pid| !known.contains(pid));
    if dead.is_empty() {
        return;
    }
    // The answer comes from the thread that starts the ranks: after it, the fleet knows those that were just being
    // started.
    let _ = fleet.joined();
    let known = started_by(fleet);
    for orphan in dead.into_iter().filter(|pid| !known.contains(pid)) {
        let _ = waitpid(Pid::from_raw(orphan), WaitOptions::NOHANG);
    }
}

/// The processes that the fleet has started, and whose exit status it has not collected.
fn started_by(fleet: &Fleet) -> Vec<i32> {
    let pids = fleet.pids().into_iter().chain([fleet.keeper()]);
    pids.flatten().map(u32::cast_signed).collect()
}

/// Whether this is a zombie whose parent is the first process.
fn is_dead_child(stat: &Stat) -> bool {
    stat.state == 'Z' && stat.ppid == 1
}

#[cfg(test)]
mod tests {
    use procfs::FromRead;

    use super::*;

    #[test]
    fn the_living_and_the_children_of_others_are_let_alone() {
        let is_buried = |head: &str| {
            let text = format!("{head}{}", " 0".repeat(46));
            is_dead_child(&Stat::from_read(text.as_bytes()).unwrap())
        };
        assert!(is_buried("12 (a) b) Z 1 7 7"));
        assert!(is_buried("12 (leader) Z 1 12 7"));
        assert!(!is_buried("12 (sleep) S 1 7 7"));
        assert!(!is_buried("12 (sleep) Z 5 7 7"));
    }
}

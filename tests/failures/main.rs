//! What becomes of ranks when something breaks: deaths, hangs, timeouts, aborts, and starts that fail.

#[path = "../support/cgroup.rs"]
mod cgroup;
#[path = "../support/delayed_cable.rs"]
mod delayed_cable;
#[path = "../support/isolated_hosts.rs"]
mod isolated_hosts;
#[path = "../meeting/mod.rs"]
mod meeting;
#[path = "../support/programs.rs"]
mod programs;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/switch.rs"]
mod switch;
#[path = "../support/unattended.rs"]
mod unattended;

mod abort_all;
mod abort_together;
mod before_nccl;
mod dead_peers;
mod deadlines;
mod exits;
mod fatal;
mod faults_of_one;
mod fork;
mod going_on;
mod hangs;
mod inside_nccl;
mod killed;
mod observer;
mod rendezvous;
mod start_up_faults;
mod stuck_calls;
mod succession;
mod timeouts;
mod watchdog;

/// Not a test of its own: the code of the ranks of tests that use `meeting`.
#[test]
fn a_rank() {
    meeting::run_a_rank();
}

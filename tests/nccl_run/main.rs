//! `nccl-run` as a user runs it: its output, exit codes and signals, and that it leaves no process behind.

mod blame;
#[path = "../support/cgroup.rs"]
mod cgroup;
mod orphans;
mod output;
#[path = "../support/programs.rs"]
mod programs;
mod record;
mod running;
mod signals;
mod terminal;
mod worlds;

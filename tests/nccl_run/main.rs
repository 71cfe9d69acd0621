//! `nccl-run` as a person uses it: what it prints, its exit codes, signals, and that nothing is left behind.

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

//! `nccl-run` as a person uses it: what it prints, its exit codes, signals, and that nothing is left behind.

mod blame;
#[path = "../support/cgroup.rs"]
mod cgroup;
mod orphans;
mod output;
mod record;
mod running;
mod signals;
mod terminal;
mod worlds;

//! `nccl-run` as a person uses it: what it prints, its exit codes, signals, and that nothing is left behind.

mod blame;
mod orphans;
mod output;
mod record;
mod running;
mod signals;
mod terminal;
mod worlds;

//! `nccl-run` as a user runs it: its output, exit codes and signals, and that it leaves no process behind.

mod blame;
mod orphans;
mod output;
mod record;
mod running;
mod signals;
mod terminal;
mod worlds;

//! `examples/all_to_all_perf` as a person uses it: its output, its exit codes, and what happens when
//! something breaks.

mod bad_input;
mod faults;
mod json;
mod launchers;
mod program;
mod table;

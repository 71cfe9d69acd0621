//! The benchmark programs in `examples/` as a person uses them: their output, their exit codes, and what
//! happens when something breaks. What they have in common is tried on `all_to_all_perf`.

mod algorithms;
mod all_reduce;
mod all_to_all_v;
mod analysis;
mod bad_input;
mod faults;
mod graph;
mod json;
mod launchers;
mod plot;
mod program;
#[path = "../support/programs.rs"]
mod programs;
mod sendrecv;
mod table;

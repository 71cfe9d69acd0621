//! The benchmark programs in `examples/` as a user runs them: their output, their exit codes, and their behaviour under
//! faults. Common features are tested on `all_to_all_perf`.

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
mod sendrecv;
mod table;

//! The loader, tested with small libraries that the tests compile.
//!
//! A loaded library stays in a process, so every test runs in a process of its own; see [`process`].

mod identify;
mod libraries;
mod process;
mod real;
mod search;
mod second_copy;

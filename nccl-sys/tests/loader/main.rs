//! The loader, against small libraries that are compiled for the purpose.
//!
//! What is loaded stays in a process, so that every test runs in one of its own; see [`process`].

mod identify;
mod libraries;
mod process;
mod real;
mod search;
mod second_copy;

//! Plugins of NCCL that are functions of this process.
//!
//! NCCL asks the dynamic linker for a plugin under a name, `libnccl-env.so` for instance, and takes from it a table of
//! functions. Here a stand-in (`stand_in_object`) answers to that name: an object in memory without code, whose symbol is the
//! address of a table in this process. NCCL needs no variable, no file and no change for it.
//!
//! A plugin that the user configured is never replaced: one that a variable names, or one that the dynamic linker finds under
//! the default name.
//!
//! | module | plugin |
//! |---|---|
//! | [`environment`] | what NCCL reads as `NCCL_*` variables (2.28.7 and newer) |
//! | [`profiler`] | what happens inside NCCL (2.23 and newer) |
#![cfg(not(loom))]

pub mod environment;
mod offer;
pub mod profiler;

pub use offer::Offer;

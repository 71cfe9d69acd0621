//! NCCL plugins that are functions of this process.
//!
//! NCCL asks the dynamic linker for a plugin by name, for instance `libnccl-env.so`, and takes a table of functions
//! from it. Here, a stand-in (`stand_in_object`) has that name: an object in memory without code, whose symbol is the
//! address of a table in this process. NCCL needs no variable, file or change for this.
//!
//! A plugin that the user configured is never replaced: neither one named by a variable, nor one that the dynamic
//! linker finds under the default name.
//!
//! | module | plugin |
//! |---|---|
//! | [`environment`] | the `NCCL_*` variables that NCCL reads (2.28.7 and newer) |
//! | [`profiler`] | what happens inside NCCL (2.23 and newer) |
#![cfg(not(loom))]

pub mod environment;
mod offer;
pub mod profiler;

pub use offer::Offer;

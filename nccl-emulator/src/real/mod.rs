//! NVIDIA's own libnccl in this process, whose calls to the CUDA runtime go to the emulator's runtime.
//!
//! ```text
//! file ──▶ analysis (calls, dwarf) ──▶ cache      once per build of the library: 0.1 to 0.3 s
//!                     │
//!                     ▼
//! dlopen ──▶ redirect, entries ──▶ RealNccl       once per process: milliseconds
//! ```
//!
//! A wheel's libnccl carries NVIDIA's CUDA runtime as a static library. [`load`] loads the file as it is
//! and redirects every call from NCCL's own code to a public function of that runtime, see [`redirect`].
//! NVIDIA's runtime does not run, except for the registration functions (`__cudaRegister*`) that the
//! library's constructors call, which only record.
//!
//! Invariants:
//! - the file on disk is never written, and no byte of the runtime's functions is changed in memory;
//! - every address and offset comes from the loaded file, or from a cache entry made from a file of
//!   the same build ID and length;
//! - a library that differs from the expectations in any way is refused with a [`LoadError`].

mod cache;
mod calls;
pub(crate) mod coverage;
pub(crate) mod covered;
mod dwarf;
mod entries;
mod error;
mod file;
mod image;
mod install;
mod kernels;
mod library;
mod program;
mod redirect;
mod types;
mod wanted;

#[cfg(test)]
mod tests;

pub(crate) use install::install;

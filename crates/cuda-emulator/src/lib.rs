//! The CUDA driver on the CPU, behind the same C ABI. This crate is independent of NCCL: `nccl-emulator` runs NCCL on it,
//! either its own implementation or NVIDIA's library.
//!
//! | module | contents |
//! |---|---|
//! | [`driver`] | the functions of libcuda: they check their arguments and catch panics |
//! | [`exec`] | streams, events, captures and graphs, and the threads that run their work |
//! | [`memory`] | device memory and pinned host memory: every address is resolved before an access |
//! | [`kernels`] | the Rust functions that run in place of a program's kernels |
//! | [`stand_in`] | stand-ins that make the dynamic linker of this process find these functions |
//! | [`violations`](mod@violations) | detected misuse |
//! | `runtime` | with the feature `runtime`: functions of the CUDA runtime |
//! | [`nvml`] | functions of libnvidia-ml, and injected states of devices |
//! | [`hooks`] | fault injection |
//! | [`forks`] | processes that were forked from one that uses the driver |
//! | [`settings`] | number of devices and their memory |
#![cfg(not(loom))]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "an internal crate: who reads its pages reads its sources"
)]

#[cfg(not(all(
    target_os = "linux",
    target_pointer_width = "64",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!(
    "cuda-emulator takes the place of a Linux library: it needs Linux on x86-64 or aarch64"
);

pub mod driver;
pub mod exec;
pub mod forks;
pub mod hooks;
pub mod kernels;
pub mod memory;
pub mod nvml;
pub mod registry;
mod result;
#[cfg(feature = "runtime")]
pub mod runtime;
pub mod settings;
pub mod stand_in {
    //! Stand-ins: they make the dynamic linker of this process find the emulator's functions under a library's name.

    use std::ffi::CStr;

    pub use stand_in_object::{StandInError, Symbol, loaded_from, shared_object};

    /// Makes `soname` resolve to `symbols`, for the rest of the process.
    ///
    /// # Errors
    /// See [`StandInError`].
    pub fn load(soname: &CStr, symbols: &[Symbol]) -> Result<(), StandInError> {
        stand_in_object::load("nccl-emulator", soname, symbols)
    }
}
pub mod sync;
pub mod violations;
mod visible;

//! The CUDA driver on the CPU, behind the same C ABI. It knows no NCCL: `nccl-emulator` puts NCCL on it, its own or NVIDIA's.
//!
//! | module | what it has |
//! |---|---|
//! | [`driver`] | the functions of libcuda: arguments checked, panics kept in |
//! | [`exec`] | streams, events, captures and graphs: who runs which work when |
//! | [`memory`] | device memory and pinned host memory: every address is resolved, none is trusted |
//! | [`kernels`] | what runs when a program launches a kernel |
//! | [`stand_in`] | how the dynamic linker of this process comes to find these functions |
//! | [`violations`](mod@violations) | misuse that was caught |
//! | `runtime` | with the feature `runtime`: functions of the CUDA runtime |
//! | `nvml` | with the feature `runtime`: functions of libnvidia-ml |
//! | [`hooks`] | faults on purpose |
//! | [`settings`] | how many devices, with how much memory |
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
mod elf;
pub mod exec;
pub mod hooks;
pub mod kernels;
pub mod memory;
#[cfg(feature = "runtime")]
pub mod nvml;
pub mod registry;
mod result;
#[cfg(feature = "runtime")]
pub mod runtime;
pub mod settings;
pub mod stand_in;
pub mod sync;
pub mod violations;
mod visible;

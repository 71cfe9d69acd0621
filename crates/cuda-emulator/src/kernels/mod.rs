//! Kernels: Rust functions that run when a program launches a kernel.
//!
//! The emulator does not execute PTX. It reads the kernels of a module and their parameters, and runs a Rust function in place
//! of each kernel with a known name. `nccl-emulator` provides the kernels of the crate `nccl`, with results that are bitwise
//! equal to those of their PTX. A program provides its own with [`provide`]. The launch of any other kernel returns
//! `CUDA_ERROR_NOT_SUPPORTED`, and prints the kernel's name on stderr.
//!
//! A launch is work on its stream like any other: it runs in stream order, delayed by `nccl_emulator::faults::late`, and again
//! at each replay of a graph that captured it. The launch copies its arguments. A kernel runs on one thread without
//! interruption, so interactions between its blocks do not show. A kernel that waits for memory written by others is provided
//! with [`provide_waiting`], and called repeatedly.
//!
//! ```
//! use cudarc::driver::{CudaContext, result};
//! use nccl_emulator::kernels;
//!
//! nccl_emulator::install()?;
//! kernels::provide("twice", |launch| {
//!     let (x, n) = (launch.argument::<u64>(0), launch.argument::<u32>(1));
//!     let values: Vec<f32> = launch.read(x, n as usize)?;
//!     launch.write(x, &values.iter().map(|value| value * 2.0).collect::<Vec<_>>())
//! });
//!
//! // What a compiler made of the kernel; here only its head counts.
//! let ptx = c".version 7.0
//!     .target sm_70
//!     .address_size 64
//!     .visible .entry twice(.param .u64 x, .param .u32 n) { ret; }";
//! let context = CudaContext::new(0)?;
//! let stream = context.new_stream()?;
//! let x = stream.clone_htod(&[1.0f32, 2.0, 3.0])?;
//! let (mut address, mut n) = (x.leak(), 3u32);
//! // SAFETY: the module is not unloaded, and the arguments are those of the kernel.
//! unsafe {
//!     let module = result::module::load_data(ptx.as_ptr().cast())?;
//!     let twice = result::module::get_function(module, c"twice".into())?;
//!     let arguments = &mut [(&raw mut address).cast(), (&raw mut n).cast()];
//!     result::launch_kernel(twice, (1, 1, 1), (32, 1, 1), 0, stream.cu_stream(), arguments)?;
//!     let x = stream.upgrade_device_ptr::<f32>(address, 3);
//!     assert_eq!(stream.clone_dtoh(&x)?, [2.0, 4.0, 6.0]);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod launch;
pub mod program;
mod provided;
mod ptx;
mod work;

pub use launch::{Launch, Plain};
pub use program::Progress;
pub(crate) use provided::function;
pub use provided::{provide, provide_waiting};
pub(crate) use ptx::{Entry, Unreadable, entries};
pub(crate) use work::Kernel;

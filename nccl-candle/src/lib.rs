//! candle's tensors in NCCL's collectives.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use nccl::{ReduceOp, World};
//! use nccl_candle::TensorCommunicator;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! nccl_emulator::install_unless_gpu()?; // on a machine with GPUs this does nothing
//! let world = World::single(); // or World::join(Rendezvous::from_env()?)?
//! let device = Device::Cpu; // or Device::new_cuda_with_stream(world.local_rank())?
//!
//! let comm = TensorCommunicator::join(&world, "model/tp", &device)?;
//! let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &device)?;
//! let y = comm.all_reduce(&x, ReduceOp::Sum)?;
//! assert_eq!(y.to_vec2::<f32>()?, [[1., 2.], [3., 4.]]); // of one rank
//! # Ok(())
//! # }
//! ```
//!
//! # Where tensors are stored
//! - On the **CPU**, an operation goes through a GPU, or through the emulator: the data is copied into pinned memory,
//!   which is kept for the next operation, to the device, through NCCL, and back. The call waits for the end, at most
//!   as long as the communicator's operations may take, so that the returned tensor is complete. This is how tensor
//!   parallelism runs in tests and on a laptop.
//! - On a **CUDA device** (feature `cuda`) nothing is copied: the operation is enqueued on the device's own stream,
//!   reads the tensor's memory, and writes the result's. The call waits for nothing, like candle's own operations. This
//!   path has not run on a GPU yet: it is compiled against candle's feature `cuda` (`cargo xtask check-candle-cuda`),
//!   and issues operations through the same functions as the CPU path.
//!
//! # Shapes
//! Of `n` ranks, with `d` the length of the first dimension:
//!
//! | operation | takes | gives |
//! |---|---|---|
//! | [`all_reduce`](TensorCommunicator::all_reduce) | `[d, …]` | the same shape |
//! | [`broadcast`](TensorCommunicator::broadcast) | `[d, …]`, on every rank | the same shape |
//! | [`all_gather`](TensorCommunicator::all_gather) | `[d, …]` | `[n·d, …]`; of scalars `[n]` |
//! | [`reduce_scatter`](TensorCommunicator::reduce_scatter) | `[d, …]`, `d` a multiple of `n` | `[d/n, …]` |
//! | [`all_to_all`](TensorCommunicator::all_to_all) | `[d, …]`, `d` a multiple of `n` | the same shape |
//!
//! `all_gather` and `reduce_scatter` take any other dimension as well. A dimension may have length 0: the operation
//! then keeps its place in the order of operations, and moves no data.
//!
//! # Views
//! A contiguous view is used as it is, wherever it begins. The methods of [`TensorCommunicator`] make a strided view
//! contiguous before (a copy, which gradients go through); the operations of [`ops`] refuse it.
//!
//! # Element types
//! `U8`, `U32`, `I32`, `I64`, `BF16`, `F16`, `F32`, `F64` and `F8E4M3` (NCCL 2.24.3 or newer). NCCL has no `I16`, no
//! 6-bit and 4-bit floats and no `F8E8M0`: these are refused with [`Error::DType`].
//!
//! # Gradients
//! See [`Gradient`].
//!
//! # Errors
//! candle's errors keep this crate's errors, but code that adds context or converts them may lose them: [`Error::of`]
//! finds the error, and [`TensorCommunicator::last_error`] has it in any case. `world.fault()` also has the fault that
//! ended a communicator on all of its ranks.
//!
//! # Features
//! - `cuda`: tensors on CUDA devices. Turns on candle's feature of that name, which needs `nvcc` to build and links
//!   to CUDA, so that such a program cannot run on the emulator.

pub use candle_core;
pub use nccl;

pub use communicator::TensorCommunicator;
pub use error::Error;
pub use gradient::Gradient;
pub use staging::Staged;

mod collective;
mod communicator;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod gradient;
mod operations;
pub mod ops;
mod staging;

/// Compiles the code of the pages.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../../docs/candle.md")]
    mod candle {}
}

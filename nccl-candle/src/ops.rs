//! The operations as candle's custom operations, for programs that call [`Tensor::apply_op1`] themselves.
//!
//! The methods of [`TensorCommunicator`] are these, with views made contiguous and dimensions moved where needed.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use nccl_candle::{TensorCommunicator, ops};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # nccl_emulator::install_unless_gpu()?;
//! # let comm = TensorCommunicator::join(&nccl::World::single(), "demo", &Device::Cpu)?;
//! let x = Tensor::new(&[1u32, 2, 3], &Device::Cpu)?;
//! let y = x.apply_op1(ops::AllReduce::new(&comm, nccl::ReduceOp::Max))?;
//! x.inplace_op1(&ops::Broadcast::new(&comm, 0))?;
//! assert_eq!(y.to_vec1::<u32>()?, x.to_vec1::<u32>()?);
//! # Ok(())
//! # }
//! ```

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, InplaceOp1, Layout, MetalStorage, Shape, Tensor,
};
use nccl::ReduceOp;

use crate::collective::Collective;
#[cfg(not(feature = "cuda"))]
use crate::communicator::WITHOUT_CUDA;
use crate::communicator::{METAL, TensorCommunicator};
use crate::cpu;
use crate::error::Error;
use crate::gradient::Gradient;

type Result<T> = candle_core::Result<T>;

/// The common part of the operations of this file: candle's traits cannot be implemented for all types with a trait of ours.
trait Op {
    fn comm(&self) -> &TensorCommunicator;

    fn collective(&self) -> Collective;

    /// Returns the gradient of the argument, from that of the result.
    fn backward(&self, argument: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>>;

    /// Returns the error that there is no gradient.
    fn none(&self, reason: &'static str) -> Result<Option<Tensor>> {
        let (operation, comm) = (self.collective().name(), self.comm());
        Err(comm.fail(Error::NoGradient {
            operation,
            comm: comm.communicator().name().to_owned(),
            reason,
        }))
    }

    /// Returns the error that this device cannot take part.
    fn no_device<T>(&self, reason: &'static str) -> Result<T> {
        let (operation, comm) = (self.collective().name(), self.comm());
        Err(comm.fail(Error::Device {
            operation,
            comm: comm.communicator().name().to_owned(),
            reason,
        }))
    }
}

const UNDECIDED: &str = "every rank has the result, and nobody said what the ranks do with it: choose with \
     `TensorCommunicator::with_gradient`; for tensor parallelism, `Gradient::Replicated`";
const NO_SUM: &str = "products, minima and maxima over ranks have none here";

macro_rules! custom_op {
    ($($operation:ident),*) => {$(
        impl CustomOp1 for $operation {
            fn name(&self) -> &'static str {
                self.collective().name()
            }

            fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
                let done = cpu::forward(&self.comm, self.collective(), storage, layout);
                done.map_err(|error| self.comm.fail(error))
            }

            #[cfg(feature = "cuda")]
            fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
                let done = crate::cuda::forward(&self.comm, self.collective(), storage, layout);
                done.map_err(|error| self.comm.fail(error))
            }

            #[cfg(not(feature = "cuda"))]
            fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
                self.no_device(WITHOUT_CUDA)
            }

            fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
                self.no_device(METAL)
            }

            fn bwd(&self, argument: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
                self.backward(argument, gradient)
            }
        }
    )*};
}

macro_rules! in_place_op {
    ($($operation:ident),*) => {$(
        impl InplaceOp1 for $operation {
            fn name(&self) -> &'static str {
                self.collective().name()
            }

            fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
                let done = cpu::in_place(&self.comm, self.collective(), storage, layout);
                done.map_err(|error| self.comm.fail(error))
            }

            #[cfg(feature = "cuda")]
            fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
                let done = crate::cuda::in_place(&self.comm, self.collective(), storage, layout);
                done.map_err(|error| self.comm.fail(error))
            }

            #[cfg(not(feature = "cuda"))]
            fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout) -> Result<()> {
                self.no_device(WITHOUT_CUDA)
            }

            fn metal_fwd(&self, _: &mut MetalStorage, _: &Layout) -> Result<()> {
                self.no_device(METAL)
            }
        }
    )*};
}

custom_op!(AllReduce, Broadcast, AllGather, ReduceScatter, AllToAll);
in_place_op!(AllReduce, Broadcast);

/// [`TensorCommunicator::all_reduce`] of a contiguous tensor; also in place.
///
/// ```
/// # fn example(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor) -> candle_core::Result<()> {
/// let sum = x.apply_op1(nccl_candle::ops::AllReduce::new(comm, nccl::ReduceOp::Sum))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct AllReduce {
    comm: TensorCommunicator,
    op: ReduceOp,
}

/// [`TensorCommunicator::broadcast`] of a contiguous tensor; also in place.
///
/// ```
/// # fn example(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor) -> candle_core::Result<()> {
/// x.inplace_op1(&nccl_candle::ops::Broadcast::new(comm, 0))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Broadcast {
    comm: TensorCommunicator,
    root: usize,
}

/// [`TensorCommunicator::all_gather`] of a contiguous tensor, along its first dimension.
///
/// ```
/// # fn example(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor) -> candle_core::Result<()> {
/// let all = x.apply_op1(nccl_candle::ops::AllGather::new(comm))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct AllGather {
    comm: TensorCommunicator,
}

/// [`TensorCommunicator::reduce_scatter`] of a contiguous tensor, along its first dimension.
///
/// ```
/// # fn example(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor) -> candle_core::Result<()> {
/// let part = x.apply_op1(nccl_candle::ops::ReduceScatter::new(comm, nccl::ReduceOp::Sum))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ReduceScatter {
    comm: TensorCommunicator,
    op: ReduceOp,
}

/// [`TensorCommunicator::all_to_all`] of a contiguous tensor.
///
/// ```
/// # fn example(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor) -> candle_core::Result<()> {
/// let received = x.apply_op1(nccl_candle::ops::AllToAll::new(comm))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct AllToAll {
    comm: TensorCommunicator,
}

/// [`TensorCommunicator::copy_to_ranks`]: a copy, whose gradient is all-reduced.
///
/// ```
/// # fn example(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor) -> candle_core::Result<()> {
/// let same = x.apply_op1(nccl_candle::ops::CopyToRanks::new(comm))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct CopyToRanks {
    comm: TensorCommunicator,
}

macro_rules! new {
    ($operation:ident $(, $field:ident: $type:ty)?) => {
        impl $operation {
            /// Returns the operation on that communicator; clones it.
            ///
            /// ```
            /// # fn example(comm: &nccl_candle::TensorCommunicator) {
            #[doc = concat!(
                "let op = nccl_candle::ops::", stringify!($operation), "::new(comm",
                $("", new!(@example $field),)? ");"
            )]
            /// # }
            /// ```
            #[must_use]
            pub fn new(comm: &TensorCommunicator $(, $field: $type)?) -> Self {
                Self { comm: comm.clone() $(, $field)? }
            }
        }
    };
    (@example op) => { ", nccl::ReduceOp::Sum" };
    (@example root) => { ", 0" };
}

new!(AllReduce, op: ReduceOp);
new!(Broadcast, root: usize);
new!(AllGather);
new!(ReduceScatter, op: ReduceOp);
new!(AllToAll);
new!(CopyToRanks);

/// Divides by the number of ranks.
fn mean(gradient: &Tensor, comm: &TensorCommunicator) -> Result<Tensor> {
    gradient / comm.world_size() as f64
}

impl Op for AllReduce {
    fn comm(&self) -> &TensorCommunicator {
        &self.comm
    }

    fn collective(&self) -> Collective {
        Collective::AllReduce(self.op)
    }

    fn backward(&self, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let is_mean = match self.op {
            ReduceOp::Sum => false,
            ReduceOp::Avg => true,
            _ => return self.none(NO_SUM),
        };
        match self.comm.gradient() {
            None => self.none(UNDECIDED),
            Some(Gradient::Replicated) if is_mean => mean(gradient, &self.comm).map(Some),
            Some(Gradient::Replicated) => Ok(Some(gradient.clone())),
            Some(Gradient::Summed) => self.comm.all_reduce(gradient, self.op).map(Some),
        }
    }
}

impl Op for Broadcast {
    fn comm(&self) -> &TensorCommunicator {
        &self.comm
    }

    fn collective(&self) -> Collective {
        Collective::Broadcast(self.root)
    }

    fn backward(&self, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = match self.comm.gradient() {
            None => return self.none(UNDECIDED),
            Some(Gradient::Replicated) => gradient.clone(),
            Some(Gradient::Summed) => self.comm.all_reduce(gradient, ReduceOp::Sum)?,
        };
        // Zeros, and not nothing: candle expects the gradient of every argument that is not a variable itself, and the
        // operations before it must be differentiated on all ranks.
        Ok(Some(match self.comm.rank() == self.root {
            true => gradient,
            false => gradient.zeros_like()?,
        }))
    }
}

impl Op for AllGather {
    fn comm(&self) -> &TensorCommunicator {
        &self.comm
    }

    fn collective(&self) -> Collective {
        Collective::AllGather
    }

    fn backward(&self, argument: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = match self.comm.gradient() {
            None => return self.none(UNDECIDED),
            Some(Gradient::Replicated) => {
                let own = argument.dims().first().map_or(1, |&first| first);
                gradient.narrow(0, self.comm.rank() * own, own)?
            }
            Some(Gradient::Summed) => self.comm.reduce_scatter(gradient, 0, ReduceOp::Sum)?,
        };
        gradient.reshape(argument.shape()).map(Some)
    }
}

impl Op for ReduceScatter {
    fn comm(&self) -> &TensorCommunicator {
        &self.comm
    }

    fn collective(&self) -> Collective {
        Collective::ReduceScatter(self.op)
    }

    fn backward(&self, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        match self.op {
            ReduceOp::Sum => self.comm.all_gather(gradient, 0).map(Some),
            ReduceOp::Avg => {
                let all = self.comm.all_gather(gradient, 0)?;
                mean(&all, &self.comm).map(Some)
            }
            _ => self.none(NO_SUM),
        }
    }
}

impl Op for AllToAll {
    fn comm(&self) -> &TensorCommunicator {
        &self.comm
    }

    fn collective(&self) -> Collective {
        Collective::AllToAll
    }

    fn backward(&self, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.comm.all_to_all(gradient).map(Some)
    }
}

impl CustomOp1 for CopyToRanks {
    fn name(&self) -> &'static str {
        "copy_to_ranks"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        // Copies only the elements of a view.
        let copy = storage.to_dtype(layout, storage.dtype())?;
        Ok((copy, layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let copy = storage.to_dtype(layout, storage.dtype())?;
        Ok((copy, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.comm.all_reduce(gradient, ReduceOp::Sum).map(Some)
    }
}

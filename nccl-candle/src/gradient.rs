//! The meaning of the gradient of a result that every rank has.

/// What the ranks compute from a result that all of them have; this determines the gradient of the result.
///
/// candle differentiates on each rank alone, so that an operation between ranks has to know what an incoming
/// gradient stands for. Chosen with [`TensorCommunicator::with_gradient`](crate::TensorCommunicator::with_gradient); without
/// a choice, the backward pass of such an operation is an error instead of a wrong factor.
///
/// | operation | `Replicated` | `Summed` |
/// |---|---|---|
/// | all-reduce, sum | the gradient as it is (Megatron's *g*) | all-reduced |
/// | all-reduce, mean | divided by the ranks | all-reduced, and divided |
/// | all-gather | this rank's part of it | reduce-scattered |
/// | broadcast | as it is on the root, zeros elsewhere | the sum on the root, zeros elsewhere |
///
/// No choice is needed where the ranks' results differ: reduce-scatter (sum, mean), whose gradient is all-gathered;
/// all-to-all, whose gradient is sent back in the opposite direction;
/// [`copy_to_ranks`](crate::TensorCommunicator::copy_to_ranks), which does nothing in the forward pass and all-reduces
/// the gradient (Megatron's *f*).
///
/// Products, minima and maxima have no gradient here.
///
/// The backward pass calls NCCL as well: all ranks have to differentiate graphs of the same operations, and to request the
/// gradients of the same inputs.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use nccl::{ReduceOp, World};
/// use nccl_candle::{Gradient, TensorCommunicator};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// let tp = TensorCommunicator::join(&World::single(), "tp", &Device::Cpu)?
///     .with_gradient(Gradient::Replicated);
/// let part_of_w = Var::ones((4, 2), candle_core::DType::F32, &Device::Cpu)?;
/// let x = Tensor::ones((3, 4), candle_core::DType::F32, &Device::Cpu)?;
///
/// let y = tp.all_reduce(&x.matmul(&part_of_w)?, ReduceOp::Sum)?; // the same on all ranks
/// let loss = y.sum_all()?; // and so is this
/// let gradient = loss.backward()?;
/// assert_eq!(gradient.get(&part_of_w).unwrap().to_vec2::<f32>()?, [[3.0; 2]; 4]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gradient {
    /// Every rank computes the same loss from it: tensor parallelism.
    Replicated,
    /// Every rank computes something of its own from it, and the sum of the ranks' losses is differentiated.
    Summed,
}

//! The operations as methods of the communicator: views are made contiguous, and dimensions moved where needed.

use candle_core::Tensor;
use candle_core::shape::Dim;
#[cfg(doc)]
use nccl::Communicator;
use nccl::ReduceOp;

use crate::collective::Collective;
use crate::communicator::TensorCommunicator;
#[cfg(doc)]
use crate::error::Error;
use crate::ops;

type Result<T, E = candle_core::Error> = std::result::Result<T, E>;

impl TensorCommunicator {
    /// Reduces the tensors of all ranks, element by element; all get the result.
    ///
    /// # Errors
    /// [`Error::DType`]; [`Error::Nccl`] with all errors of [`Communicator::all_reduce`] and, on the CPU,
    /// [`Request::wait`](nccl::Request::wait). Its backward pass needs [`with_gradient`](Self::with_gradient).
    ///
    /// Wraps `ncclAllReduce`.
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor) -> candle_core::Result<()> {
    /// let sum = comm.all_reduce(x, nccl::ReduceOp::Sum)?;
    /// assert_eq!(sum.shape(), x.shape());
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce(&self, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        x.contiguous()?.apply_op1(ops::AllReduce::new(self, op))
    }

    /// As [`all_reduce`](Self::all_reduce), into the tensor itself and all tensors that share its memory. Has no gradient.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`Error::Strided`] for a view that is not contiguous.
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator, gradient: &candle_core::Tensor) -> candle_core::Result<()> {
    /// comm.all_reduce_in_place(gradient, nccl::ReduceOp::Avg)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce_in_place(&self, y: &Tensor, op: ReduceOp) -> Result<()> {
        y.inplace_op1(&ops::AllReduce::new(self, op))
    }

    /// Sends the tensor of rank `root` to all; the others pass a tensor of the same shape and type.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and a root that does not exist.
    ///
    /// Wraps `ncclBroadcast`.
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator, w: &candle_core::Tensor) -> candle_core::Result<()> {
    /// let w = comm.broadcast(w, 0)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        x.contiguous()?.apply_op1(ops::Broadcast::new(self, root))
    }

    /// Concatenates the tensors of all ranks along `dim`, in the order of the ranks; all get the result.
    ///
    /// Scalars become a tensor of one dimension. Along another dimension than the first, the result is copied once more.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and a dimension that does not exist.
    ///
    /// Wraps `ncclAllGather`.
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor) -> candle_core::Result<()> {
    /// use candle_core::D;
    /// let logits = comm.all_gather(x, D::Minus1)?; // of a head whose vocabulary is split
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_gather(&self, x: &Tensor, dim: impl Dim) -> Result<Tensor> {
        let x = match x.rank() {
            0 => x.reshape(1)?,
            _ => x.contiguous()?,
        };
        let dim = dim.to_index(x.shape(), "all_gather")?;
        let y = x.apply_op1(ops::AllGather::new(self))?;
        if dim == 0 {
            return Ok(y);
        }
        // [n, d0, …] with the ranks moved before `dim`, and merged with it.
        let mut dims = x.dims().to_vec();
        let ranks = self.world_size();
        let blocks: Vec<usize> = std::iter::once(ranks).chain(dims.iter().copied()).collect();
        let order: Vec<usize> = (1..=dim).chain([0]).chain(dim + 1..blocks.len()).collect();
        dims[dim] *= ranks;
        y.reshape(blocks)?.permute(order)?.reshape(dims)
    }

    /// Reduces the tensors of all ranks, and gives each rank its part of the result along `dim`.
    ///
    /// Along another dimension than the first, the tensor is copied before.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`Error::NotDivisible`], [`Error::Scalar`], and a dimension that does not
    /// exist.
    ///
    /// Wraps `ncclReduceScatter`.
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor) -> candle_core::Result<()> {
    /// let part = comm.reduce_scatter(x, 0, nccl::ReduceOp::Sum)?;
    /// assert_eq!(part.dim(0)? * comm.world_size(), x.dim(0)?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn reduce_scatter(&self, x: &Tensor, dim: impl Dim, op: ReduceOp) -> Result<Tensor> {
        let apply = |x: &Tensor| x.apply_op1(ops::ReduceScatter::new(self, op));
        if x.rank() == 0 {
            return apply(x);
        }
        let dim = dim.to_index(x.shape(), "reduce_scatter")?;
        if dim == 0 {
            return apply(&x.contiguous()?);
        }
        // `dim` split into ranks and shares, and the ranks moved to the front.
        let collective = Collective::ReduceScatter(op);
        let share = collective.share(self.communicator(), x.shape(), dim);
        let share = share.map_err(|error| self.fail(error))?;
        let mut dims = x.dims().to_vec();
        dims[dim] = share;
        let mut blocks = dims.clone();
        blocks.insert(dim, self.world_size());
        let order: Vec<usize> = std::iter::once(dim)
            .chain(0..dim)
            .chain(dim + 1..blocks.len())
            .collect();
        dims[0] *= self.world_size();
        apply(&x.reshape(blocks)?.permute(order)?.reshape(dims)?)
    }

    /// Sends part `i` of this rank's tensor, along the first dimension, to rank `i`; part `i` of the result comes from
    /// rank `i`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`Error::NotDivisible`], [`Error::Scalar`].
    ///
    /// Wraps `ncclAlltoAll`, or `ncclSend` and `ncclRecv` in a group before NCCL 2.28.3.
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator, tokens: &candle_core::Tensor) -> candle_core::Result<()> {
    /// let received = comm.all_to_all(tokens)?;
    /// let back = comm.all_to_all(&received)?; // as `tokens`
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all(&self, x: &Tensor) -> Result<Tensor> {
        x.contiguous()?.apply_op1(ops::AllToAll::new(self))
    }

    /// Returns the tensor unchanged. It is the same on all ranks, but each rank computes something different from it:
    /// the backward pass adds the gradients of all ranks (Megatron's *f*).
    ///
    /// Costs nothing if no gradient is needed, and a copy otherwise.
    ///
    /// # Errors
    /// Those of the copy.
    ///
    /// ```
    /// # fn example(tp: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor, columns: &candle_core::Tensor,
    /// #     rows: &candle_core::Tensor) -> candle_core::Result<()> {
    /// // Two linear layers that the ranks share: columns of the first weight, rows of the second.
    /// let h = tp.copy_to_ranks(x)?.matmul(columns)?.relu()?;
    /// let y = tp.all_reduce(&h.matmul(rows)?, nccl::ReduceOp::Sum)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn copy_to_ranks(&self, x: &Tensor) -> Result<Tensor> {
        match x.track_op() {
            true => x.apply_op1(ops::CopyToRanks::new(self)),
            false => Ok(x.clone()),
        }
    }
}

//! The collectives, in one table: names, shapes, and the call.

use candle_core::{Layout, Shape};
use nccl::{Communicator, RecvBuffer, ReduceOp, Request, SendBuffer};

use crate::error::Error;

/// A collective, with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Collective {
    AllReduce(ReduceOp),
    Broadcast(usize),
    AllGather,
    ReduceScatter(ReduceOp),
    AllToAll,
}

impl Collective {
    /// Returns the name that the crate `nccl` uses.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::Broadcast(_) => "broadcast",
            Self::AllGather => "all_gather",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllToAll => "all_to_all",
        }
    }

    /// Returns the shape of the result; blocks are along the first dimension.
    pub(crate) fn shape(self, comm: &Communicator, shape: &Shape) -> Result<Shape, Error> {
        let ranks = comm.world_size();
        let mut dims = shape.dims().to_vec();
        match (self, dims.first_mut()) {
            (Self::AllReduce(_) | Self::Broadcast(_), _) => {}
            (Self::AllGather, Some(first)) => *first *= ranks,
            (Self::AllGather, None) => dims.push(ranks),
            (Self::ReduceScatter(_), Some(first)) => *first = self.share(comm, shape, 0)?,
            (Self::AllToAll, Some(_)) => drop(self.share(comm, shape, 0)?),
            (Self::ReduceScatter(_) | Self::AllToAll, None) => {
                return Err(Error::Scalar {
                    operation: self.name(),
                    comm: comm.name().to_owned(),
                    rank: comm.rank(),
                    ranks,
                });
            }
        }
        Ok(Shape::from(dims))
    }

    /// Returns the length of each rank's part of a dimension.
    pub(crate) fn share(
        self,
        comm: &Communicator,
        shape: &Shape,
        dim: usize,
    ) -> Result<usize, Error> {
        let (length, ranks) = (shape.dims()[dim], comm.world_size());
        if length.is_multiple_of(ranks) {
            return Ok(length / ranks);
        }
        Err(Error::NotDivisible {
            operation: self.name(),
            comm: comm.name().to_owned(),
            rank: comm.rank(),
            ranks,
            shape: shape.clone(),
            dim,
        })
    }

    /// Returns the range of a view's elements in its storage.
    pub(crate) fn span(
        self,
        comm: &Communicator,
        layout: &Layout,
    ) -> Result<std::ops::Range<usize>, Error> {
        match layout.contiguous_offsets() {
            Some((start, end)) => Ok(start..end),
            None => Err(Error::Strided {
                operation: self.name(),
                comm: comm.name().to_owned(),
                shape: layout.shape().clone(),
                stride: layout.stride().to_vec(),
            }),
        }
    }

    /// Calls NCCL.
    pub(crate) fn issue<'a, S, R>(self, comm: &'a Communicator, x: S, y: R) -> nccl::Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        match self {
            Self::AllReduce(op) => comm.all_reduce(x, y, op),
            Self::Broadcast(root) => comm.broadcast((comm.rank() == root).then_some(x), y, root),
            Self::AllGather => comm.all_gather(x, y),
            Self::ReduceScatter(op) => comm.reduce_scatter(x, y, op),
            Self::AllToAll => comm.all_to_all(x, y),
        }
    }

    /// Calls NCCL in place; only for a collective that keeps the shape.
    #[cfg(feature = "cuda")]
    pub(crate) fn issue_in_place<'a, R>(self, comm: &'a Communicator, y: R) -> nccl::Result<Request>
    where
        R: RecvBuffer<'a>,
    {
        match self {
            Self::AllReduce(op) => comm.all_reduce_in_place(y, op),
            Self::Broadcast(root) => comm.broadcast_in_place(y, root),
            Self::AllGather | Self::ReduceScatter(_) | Self::AllToAll => {
                unreachable!("{} is not among the operations in place", self.name())
            }
        }
    }
}

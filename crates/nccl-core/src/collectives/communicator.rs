//! The public functions of a communicator: the collectives, each issued at once, and their operators.

use std::sync::Arc;

use super::collective::issue_collective;
use super::{Collective, rules};
use crate::active_calls::CallKind;
use crate::background_call::BackgroundCall;
use crate::buffer::{RecvBuffer, SendBuffer};
use crate::collective_config::CollectiveConfig;
use crate::communicator::{Communicator, check_not_capturing};
use crate::cuda_driver;
use crate::dtype::NcclType;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::forked;
use crate::reduce::{self, PreMulSum, ReduceOp, Reduction};
use crate::request::Request;

impl Communicator {
    /// Returns a handle to the same communicator with a configuration for its collectives: single ones, those in groups,
    /// and those in captured plans.
    ///
    /// The configuration does not apply to messages (`isend`, `irecv`, and all-to-alls that are made of them).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for invalid values, [`ErrorKind::Unsupported`] for a release of NCCL without these calls.
    /// With an event of another context the collective fails, and the communicator is aborted.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// # let comm = world.communicator("demo").stream(&stream).build()?;
    /// let mut config = nccl::CollectiveConfig::default();
    /// config.algorithm = Some(String::from("RING"));
    /// config.fall_back = true;
    /// let ring = comm.with_config(&config)?;
    /// let mut y = stream.clone_htod(&[1i32, 2])?;
    /// ring.all_reduce_in_place(&mut y, nccl::ReduceOp::Max)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Wraps `ncclAllReduceConfig` and its seven siblings.
    pub fn with_config(&self, config: &CollectiveConfig) -> Result<Self> {
        let raw = config.to_raw(self.library())?;
        Ok(Self {
            config: Some(Arc::new(raw)),
            ..self.clone()
        })
    }

    /// Reduces the `x` of all ranks, element by element, into the `y` of every rank.
    ///
    /// `x` and `y` have the same number of elements, the same on all ranks. Without elements this returns
    /// at once.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] and [`ErrorKind::DataTypeMismatch`] for buffers that do not fit,
    /// [`ErrorKind::WrongReduction`] for an operator that does not;
    /// [`ErrorKind::Stream`] for a stream that cannot carry the operation; [`ErrorKind::Nccl`] and
    /// [`ErrorKind::TimedOut`] when NCCL fails or does not launch in time, after which the communicator
    /// is aborted; [`ErrorKind::Aborted`] and [`ErrorKind::Closed`] when it is out of use.
    ///
    /// Wraps `ncclAllReduce`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1.0f32, 2.0])?;
    /// let mut y = stream.alloc_zeros::<f32>(2)?;
    /// comm.all_reduce(&x, &mut y, nccl::ReduceOp::Sum)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [1.0, 2.0]); // one rank only
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce<'a, S, R, O>(&'a self, x: S, y: R, op: O) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
        O: Reduction,
    {
        let collective =
            Collective::out_of_place(rules::ALL_REDUCE, Some(x), Some(y)).reducing(op, self);
        issue_collective(self, rules::ALL_REDUCE.kind, collective)
    }

    /// Waits until every rank of the communicator has called `barrier`, and all earlier work on each rank's stream is done.
    ///
    /// This issues a reduction of one byte and blocks the calling thread until it is done, at most for the communicator's
    /// timeout. To synchronize only the hosts, without the devices, use `World::barrier`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ErrorKind::Cuda`] if the byte cannot be allocated.
    ///
    /// Wraps `ncclAllReduce`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// comm.barrier()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn barrier(&self) -> Result<()> {
        self.start_barrier()?.wait()
    }

    fn start_barrier(&self) -> Result<Request> {
        forked::check()?;
        let stream = self.stream();
        let mut byte = {
            let _inside = self.inner.enter(CallKind::Issue, self.timeout);
            // Memory that is allocated during a capture belongs to the graph.
            check_not_capturing("the communicator's stream", stream)?;
            let zero = || stream.alloc_zeros::<u8>(1);
            cuda_driver::ignoring_stored_error(stream.context(), zero)
                .map_err(Error::cuda("allocating a byte for a barrier"))?
        };
        self.all_reduce_in_place(&mut byte, ReduceOp::Max)
    }

    /// Like [`barrier`](Self::barrier), without blocking the calling thread, for tasks of an executor. The reduction is issued
    /// before this function returns, in order with the communicator's other operations; a background thread waits for it.
    ///
    /// ```
    /// # async fn example(comm: nccl::Communicator) -> nccl::Result<()> {
    /// comm.barrier_async().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn barrier_async(&self) -> BackgroundCall<()> {
        match self.start_barrier() {
            Ok(done) => BackgroundCall::start(move || done.wait()),
            Err(error) => BackgroundCall::ready(Err(error)),
        }
    }

    /// Reduces the `y` of all ranks, element by element, into the `y` of every rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclAllReduce`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[1i64, 2])?;
    /// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Min)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce_in_place<'a, R, O>(&'a self, y: R, op: O) -> Result<Request>
    where
        R: RecvBuffer<'a>,
        O: Reduction,
    {
        let collective = Collective::in_place(rules::ALL_REDUCE, y).reducing(op, self);
        issue_collective(self, rules::ALL_REDUCE.kind, collective)
    }

    /// Sends the `x` of rank `root` to the `y` of every rank.
    ///
    /// Only the root needs `x`; the `x` of other ranks is ignored. All buffers have the same number of
    /// elements.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ErrorKind::NoSuchRank`] for a root that does not exist,
    /// [`ErrorKind::NoBuffer`] when the root does not pass the buffer that only it needs.
    ///
    /// Wraps `ncclBroadcast`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1u8, 2])?;
    /// let mut y = stream.alloc_zeros::<u8>(2)?;
    /// comm.broadcast((comm.rank() == 0).then_some(&x), &mut y, 0)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [1, 2]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn broadcast<'a, S, R>(&'a self, x: Option<S>, y: R, root: usize) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let collective = Ok(Collective::out_of_place(rules::BROADCAST, x, Some(y)).root(root));
        issue_collective(self, rules::BROADCAST.kind, collective)
    }

    /// Sends the `y` of rank `root` to the `y` of every rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ErrorKind::NoSuchRank`] for a root that does not exist,
    /// [`ErrorKind::NoBuffer`] when the root does not pass the buffer that only it needs.
    ///
    /// Wraps `ncclBroadcast`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[1u8, 2])?;
    /// comm.broadcast_in_place(&mut y, 0)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn broadcast_in_place<'a, R>(&'a self, y: R, root: usize) -> Result<Request>
    where
        R: RecvBuffer<'a>,
    {
        let collective = Ok(Collective::in_place(rules::BROADCAST, y).root(root));
        issue_collective(self, rules::BROADCAST.kind, collective)
    }

    /// Reduces the `x` of all ranks, element by element, into the `y` of rank `root`.
    ///
    /// Only the root needs `y`; the `y` of other ranks is not touched. All buffers have the same number of
    /// elements.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ErrorKind::NoSuchRank`] for a root that does not exist,
    /// [`ErrorKind::NoBuffer`] when the root does not pass the buffer that only it needs.
    ///
    /// Wraps `ncclReduce`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1i32, 2])?;
    /// let mut y = stream.alloc_zeros::<i32>(2)?;
    /// comm.reduce(&x, (comm.rank() == 0).then_some(&mut y), nccl::ReduceOp::Prod, 0)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [1, 2]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn reduce<'a, S, R, O>(&'a self, x: S, y: Option<R>, op: O, root: usize) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
        O: Reduction,
    {
        let collective = Collective::out_of_place(rules::REDUCE, Some(x), y)
            .root(root)
            .reducing(op, self);
        issue_collective(self, rules::REDUCE.kind, collective)
    }

    /// Reduces the `y` of all ranks, element by element, into the `y` of rank `root`.
    ///
    /// The `y` of the other ranks is unchanged.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ErrorKind::NoSuchRank`] for a root that does not exist,
    /// [`ErrorKind::NoBuffer`] when the root does not pass the buffer that only it needs.
    ///
    /// Wraps `ncclReduce`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[1i32, 2])?;
    /// comm.reduce_in_place(&mut y, nccl::ReduceOp::Sum, 0)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn reduce_in_place<'a, R, O>(&'a self, y: R, op: O, root: usize) -> Result<Request>
    where
        R: RecvBuffer<'a>,
        O: Reduction,
    {
        let collective = Collective::in_place(rules::REDUCE, y)
            .root(root)
            .reducing(op, self);
        issue_collective(self, rules::REDUCE.kind, collective)
    }

    /// Puts the `x` of rank `i` at block `i` of the `y` of every rank.
    ///
    /// With `n` elements in `x`, the same on all ranks, `y` has `n` for each rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclAllGather`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[7u64])?;
    /// let mut y = stream.alloc_zeros::<u64>(comm.world_size())?;
    /// comm.all_gather(&x, &mut y)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [7]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_gather<'a, S, R>(&'a self, x: S, y: R) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let collective = Ok(Collective::out_of_place(
            rules::ALL_GATHER,
            Some(x),
            Some(y),
        ));
        issue_collective(self, rules::ALL_GATHER.kind, collective)
    }

    /// Puts block `i` of the `y` of rank `i` at block `i` of the `y` of every rank.
    ///
    /// `y` has a block for each rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclAllGather`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[7u64])?;
    /// comm.all_gather_in_place(&mut y)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_gather_in_place<'a, R>(&'a self, y: R) -> Result<Request>
    where
        R: RecvBuffer<'a>,
    {
        let collective = Ok(Collective::in_place(rules::ALL_GATHER, y));
        issue_collective(self, rules::ALL_GATHER.kind, collective)
    }

    /// Reduces block `i` of the `x` of all ranks, element by element, into the `y` of rank `i`.
    ///
    /// With `n` elements in `y`, the same on all ranks, `x` has `n` for each rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclReduceScatter`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&vec![1.5f64; comm.world_size()])?;
    /// let mut y = stream.alloc_zeros::<f64>(1)?;
    /// comm.reduce_scatter(&x, &mut y, nccl::ReduceOp::Max)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [1.5]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn reduce_scatter<'a, S, R, O>(&'a self, x: S, y: R, op: O) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
        O: Reduction,
    {
        let collective =
            Collective::out_of_place(rules::REDUCE_SCATTER, Some(x), Some(y)).reducing(op, self);
        issue_collective(self, rules::REDUCE_SCATTER.kind, collective)
    }

    /// Reduces block `i` of the `y` of all ranks, element by element, into block `i` of the `y` of rank `i`.
    ///
    /// `y` has a block for each rank. The contents of the other blocks are undefined afterwards.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclReduceScatter`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&vec![1.5f64; comm.world_size()])?;
    /// comm.reduce_scatter_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn reduce_scatter_in_place<'a, R, O>(&'a self, y: R, op: O) -> Result<Request>
    where
        R: RecvBuffer<'a>,
        O: Reduction,
    {
        let collective = Collective::in_place(rules::REDUCE_SCATTER, y).reducing(op, self);
        issue_collective(self, rules::REDUCE_SCATTER.kind, collective)
    }

    /// Puts the `x` of rank `i` at block `i` of the `y` of rank `root`.
    ///
    /// With `n` elements in `x`, the same on all ranks, the root's `y` has `n` for each rank. Only the root
    /// needs `y`; the `y` of other ranks is not touched.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ErrorKind::NoSuchRank`] for a root that does not exist,
    /// [`ErrorKind::NoBuffer`] when the root does not pass the buffer that only it needs.
    ///
    /// Wraps `ncclGather`, or `ncclSend` and `ncclRecv` in a group before NCCL 2.28.3.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[7i8, 8])?;
    /// let mut y = stream.alloc_zeros::<i8>(2 * comm.world_size())?;
    /// comm.gather(&x, (comm.rank() == 0).then_some(&mut y), 0)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [7, 8]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn gather<'a, S, R>(&'a self, x: S, y: Option<R>, root: usize) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let collective = Ok(Collective::out_of_place(rules::GATHER, Some(x), y).root(root));
        issue_collective(self, rules::GATHER.kind, collective)
    }

    /// Puts the `y` of rank `i` at block `i` of the `y` of rank `root`.
    ///
    /// With `n` elements in the `y` of the other ranks, the root's has `n` for each rank, its own at block
    /// `root`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ErrorKind::NoSuchRank`] for a root that does not exist,
    /// [`ErrorKind::NoBuffer`] when the root does not pass the buffer that only it needs.
    ///
    /// Wraps `ncclGather`, or `ncclSend` and `ncclRecv` in a group before NCCL 2.28.3.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[7i8, 8])?;
    /// comm.gather_in_place(&mut y, 0)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn gather_in_place<'a, R>(&'a self, y: R, root: usize) -> Result<Request>
    where
        R: RecvBuffer<'a>,
    {
        let collective = Ok(Collective::in_place(rules::GATHER, y).root(root));
        issue_collective(self, rules::GATHER.kind, collective)
    }

    /// Puts block `i` of the `x` of rank `root` into the `y` of rank `i`.
    ///
    /// With `n` elements in `y`, the same on all ranks, the root's `x` has `n` for each rank. Only the root
    /// needs `x`; the `x` of other ranks is ignored.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ErrorKind::NoSuchRank`] for a root that does not exist,
    /// [`ErrorKind::NoBuffer`] when the root does not pass the buffer that only it needs.
    ///
    /// Wraps `ncclScatter`, or `ncclSend` and `ncclRecv` in a group before NCCL 2.28.3.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&vec![3u32; comm.world_size()])?;
    /// let mut y = stream.alloc_zeros::<u32>(1)?;
    /// comm.scatter((comm.rank() == 0).then_some(&x), &mut y, 0)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn scatter<'a, S, R>(&'a self, x: Option<S>, y: R, root: usize) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let collective = Ok(Collective::out_of_place(rules::SCATTER, x, Some(y)).root(root));
        issue_collective(self, rules::SCATTER.kind, collective)
    }

    /// Puts block `i` of the `y` of rank `root` into the `y` of rank `i`.
    ///
    /// With `n` elements in the `y` of the other ranks, the root's has `n` for each rank, and keeps its own
    /// at block `root`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ErrorKind::NoSuchRank`] for a root that does not exist,
    /// [`ErrorKind::NoBuffer`] when the root does not pass the buffer that only it needs.
    ///
    /// Wraps `ncclScatter`, or `ncclSend` and `ncclRecv` in a group before NCCL 2.28.3.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[3u32])?;
    /// comm.scatter_in_place(&mut y, 0)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn scatter_in_place<'a, R>(&'a self, y: R, root: usize) -> Result<Request>
    where
        R: RecvBuffer<'a>,
    {
        let collective = Ok(Collective::in_place(rules::SCATTER, y).root(root));
        issue_collective(self, rules::SCATTER.kind, collective)
    }

    /// Makes an operator that multiplies this rank's values by `factor` and sums the results of all ranks.
    ///
    /// Each rank makes its own operator, with its own factor.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] and [`ErrorKind::Aborted`] when the communicator is out of use,
    /// [`ErrorKind::Nccl`] when NCCL refuses, as it does for a type that cannot be multiplied,
    /// [`ErrorKind::Unsupported`] in a world of one rank without NCCL.
    ///
    /// Wraps `ncclRedOpCreatePreMulSum`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, y: &mut nccl::cudarc::driver::CudaSlice<f64>) -> nccl::Result<()> {
    /// let mean = comm.pre_mul_sum(1.0 / comm.world_size() as f64)?;
    /// comm.all_reduce_in_place(y, &mean)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn pre_mul_sum<T: NcclType>(&self, factor: T) -> Result<PreMulSum<T>> {
        reduce::pre_mul_sum(self, factor)
    }
}

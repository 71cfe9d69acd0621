//! The public functions of a communicator for all-to-alls, and for connecting all ranks beforehand.

use std::time::Duration;

use super::algorithm::Algorithm;
use super::variable::Parts;
use super::{in_place, uniform, variable, warm_up};
use crate::background_call::BackgroundCall;
use crate::buffer::{RecvBuffer, SendBuffer};
use crate::communicator::Communicator;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::Result;
use crate::request::Request;

impl Communicator {
    /// Sends block `j` of `x` to rank `j`, and receives the block of rank `j` into block `j` of `y`.
    ///
    /// `x` and `y` have the same number of elements, a multiple of the number of ranks and the same on
    /// all ranks. With one buffer for both, use [`all_to_all_in_place`](Self::all_to_all_in_place).
    ///
    /// # Errors
    /// [`ErrorKind::Length`] when the lengths differ or are no multiple of the number of ranks;
    /// otherwise as [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclAlltoAll`, or `ncclSend` and `ncclRecv` in a group before NCCL 2.28.3.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1u32, 2, 3])?; // one rank: one block
    /// let mut y = stream.alloc_zeros::<u32>(3)?;
    /// comm.all_to_all(&x, &mut y)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [1, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all<'a, S, R>(&'a self, x: S, y: R) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        self.all_to_all_with(x, y, Algorithm::Auto)
    }

    /// Like [`all_to_all`](Self::all_to_all), with the algorithm `algorithm`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when the loaded NCCL does not have the algorithm, [`ErrorKind::InvalidConfig`] for an algorithm
    /// that is only available in plans ([`AllToAll`](crate::AllToAll)).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let x = stream.clone_htod(&[1u32, 2, 3])?;
    /// # let mut y = stream.alloc_zeros::<u32>(3)?;
    /// comm.all_to_all_with(&x, &mut y, nccl::all_to_all::AllToAllAlgorithm::Grouped)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all_with<'a, S, R>(&'a self, x: S, y: R, algorithm: Algorithm) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        uniform::exchange(self, x, y, algorithm)
    }

    /// Sends each rank its part of `x`, and receives the part of each rank into its part of `y`.
    ///
    /// `send` and `recv` are slices of counts, or [`Parts`]. With slices the parts are contiguous in the order of the ranks: rank
    /// `j`'s part of `x` begins after the parts of the ranks before it and has `send[j]` elements, likewise in `y`. With
    /// [`Parts::at`] they begin anywhere; received parts may not overlap, sent parts may. Both buffers may
    /// be longer than the sum. The part that rank `i` sends to rank `j` must be as long as the part that rank `j` receives
    /// from rank `i`; parts without elements are neither sent nor received.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] when there is not one count for each rank, when a buffer is shorter than the
    /// sum, or when this rank's part for itself differs between both counts; otherwise as
    /// [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclSend` and `ncclRecv` in a group.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1u32, 2, 3])?;
    /// let mut y = stream.alloc_zeros::<u32>(8)?; // room for more
    /// comm.all_to_all_v(&x, &[3], &mut y, &[3])?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?[..3], [1, 2, 3]);
    ///
    /// // Parts that begin anywhere: two elements from the second on, to the third.
    /// use nccl::all_to_all::Parts;
    /// comm.all_to_all_v(&x, Parts::at(&[2], &[1]), &mut y, Parts::at(&[2], &[2]))?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?[..4], [1, 2, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all_v<'a, 'p, S, R>(
        &'a self,
        x: S,
        send: impl Into<Parts<'p>>,
        y: R,
        recv: impl Into<Parts<'p>>,
    ) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        variable::exchange(self, x.erase(), send.into(), y.erase_mut(), recv.into())
    }

    /// Sends block `j` of `y` to rank `j`, and receives the block of rank `j` in its place.
    ///
    /// The length of `y` is a multiple of the number of ranks, the same on all ranks. In place, NCCL's own call would overwrite
    /// blocks that were not sent yet. So here pairs of ranks exchange their blocks, and a received block waits in `scratch`
    /// until the block that it replaces has been sent. `scratch` may have any element type; its contents are ignored and
    /// overwritten. It must have room for at least one block (each begins at a multiple of 16 bytes). With room for one block
    /// per rank, the exchange is one group; with less, it needs several groups.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] when `y` cannot be divided among the ranks, or `scratch` has no room for a block; otherwise
    /// as [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclSend` and `ncclRecv` in groups, and `cuMemcpyDtoDAsync`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[1u32, 2, 3])?; // one rank: one block
    /// let mut scratch = stream.alloc_zeros::<u8>(16)?;
    /// comm.all_to_all_in_place(&mut y, &mut scratch)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [1, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all_in_place<'a, R, S>(&'a self, y: R, scratch: S) -> Result<Request>
    where
        R: RecvBuffer<'a>,
        S: RecvBuffer<'a>,
    {
        in_place::exchange(self, y.erase_mut(), scratch.erase_mut())
    }

    /// Connects this rank with all others, and waits until that is done, at most for `timeout`;
    /// `NCCL_RUN_TIMEOUT` in the environment overrides `timeout`.
    ///
    /// NCCL connects two ranks when they first communicate. That takes milliseconds to seconds, and waits for both
    /// ranks. A service can do it here, before its first request. All ranks have to call this.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when not all ranks arrived in time; the communicator is then aborted.
    /// Otherwise as [`all_reduce`](Self::all_reduce).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// comm.warm_up(std::time::Duration::from_secs(60))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn warm_up(&self, timeout: Duration) -> Result<()> {
        warm_up::warm_up(self, timeout)
    }

    /// Like [`warm_up`](Self::warm_up), without blocking the calling thread, for tasks of an executor.
    ///
    /// A background thread makes the call, and its place among the operations of this communicator is not determined before
    /// that: do not use the communicator until this is ready, even if the future was dropped.
    ///
    /// ```
    /// # async fn example(comm: nccl::Communicator) -> nccl::Result<()> {
    /// comm.warm_up_async(std::time::Duration::from_secs(60)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn warm_up_async(&self, timeout: Duration) -> BackgroundCall<()> {
        let comm = self.clone();
        BackgroundCall::start(move || comm.warm_up(timeout))
    }
}

//! What a program calls on a communicator to exchange parts, and to connect all ranks beforehand.

use std::time::Duration;

use super::algorithm::Algorithm;
use super::variable::Parts;
use super::{in_place, uniform, variable, warm_up};
use crate::buffer::{RecvBuffer, SendBuffer};
use crate::communicator::Communicator;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::Result;
use crate::request::Request;

impl Communicator {
    /// Gives block `j` of `x` to rank `j`, and puts the block of rank `j` at block `j` of `y`.
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

    /// [`all_to_all`](Self::all_to_all) by the way that `algorithm` says.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when the loaded NCCL does not have it, [`ErrorKind::InvalidConfig`] for one that needs
    /// more than the two buffers, for which there are plans ([`AllToAll`](crate::AllToAll)).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let x = stream.clone_htod(&[1u32, 2, 3])?;
    /// # let mut y = stream.alloc_zeros::<u32>(3)?;
    /// comm.all_to_all_with(&x, &mut y, nccl::AllToAllAlgorithm::Grouped)?.wait()?;
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

    /// Gives each rank its part of `x`, and puts what each rank gives into its part of `y`.
    ///
    /// The parts lie one after another in the order of the ranks: rank `j`'s part of `x` begins behind
    /// the first `j` of `send_counts` and has `send_counts[j]` elements, likewise in `y`. Both buffers may
    /// be longer than the sum. What rank `i` sends to rank `j` must be as long as what rank `j` receives
    /// from rank `i`; parts without elements are neither sent nor received.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] when there is not one count for each rank, when a buffer is shorter than the
    /// sum, or when a rank would not receive from itself what it sends; otherwise as
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
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all_v<'a, S, R>(
        &'a self,
        x: S,
        send_counts: &[usize],
        y: R,
        recv_counts: &[usize],
    ) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        self.all_to_all_v_at(x, Parts::packed(send_counts), y, Parts::packed(recv_counts))
    }

    /// As [`all_to_all_v`](Self::all_to_all_v), with parts that begin anywhere in the buffers.
    ///
    /// What is received may not overlap; what is sent may.
    ///
    /// # Errors
    /// As [`all_to_all_v`](Self::all_to_all_v); [`ErrorKind::InvalidConfig`] for parts that overlap in `y`.
    ///
    /// Wraps `ncclSend` and `ncclRecv` in a group.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// use nccl::Parts;
    ///
    /// let x = stream.clone_htod(&[1u32, 2, 3])?;
    /// let mut y = stream.alloc_zeros::<u32>(4)?;
    /// // Two elements from the second on, to the third.
    /// comm.all_to_all_v_at(&x, Parts::at(&[2], &[1]), &mut y, Parts::at(&[2], &[2]))?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [0, 0, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all_v_at<'a, S, R>(
        &'a self,
        x: S,
        send: Parts<'_>,
        y: R,
        recv: Parts<'_>,
    ) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        variable::exchange(self, x.erase(), send, y.erase_mut(), recv)
    }

    /// Gives block `j` of `y` to rank `j`, and puts the block of rank `j` in its place.
    ///
    /// `y` has a multiple of as many elements as there are ranks, the same on all. What NCCL calls in place would
    /// overwrite blocks that were not sent yet; here pairs of ranks exchange theirs, and what comes waits in `scratch`
    /// until the block that it replaces has gone. `scratch` may be of any type and hold anything, and holds nothing of
    /// use afterwards. It has room for one block at least (each begins at a multiple of 16 bytes); with room for as many
    /// as there are ranks, everything goes at once, in one group, and with less in as many groups as it takes.
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

    /// Connects this rank with all others, and waits until that is done, at most for `limit`, over
    /// which `NCCL_RUN_TIMEOUT` in the environment wins.
    ///
    /// NCCL connects two ranks when they first need each other, which takes from milliseconds to seconds
    /// and waits for both. A service pays that here, before its first request. All ranks have to call it.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when not all ranks came in time; the communicator is aborted then.
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
    pub fn warm_up(&self, limit: Duration) -> Result<()> {
        warm_up::warm_up(self, limit)
    }
}

//! The methods of a communicator that allocate memory and register it with NCCL.

use super::{Buffer, OwnedBuffer, Registered, registered, window};
use crate::communicator::Communicator;
use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use crate::time::deadline_after;

impl Communicator {
    /// Allocates memory with NCCL's allocator, all zeros, on the stream of this communicator.
    ///
    /// # Errors
    /// As [`Buffer::zeroed`].
    ///
    /// Wraps `ncclMemAlloc` (NCCL ≥ 2.19).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = comm.buffer::<u8>(1 << 20)?;
    /// assert_eq!(x.len(), 1 << 20);
    /// # Ok(())
    /// # }
    /// ```
    pub fn buffer<T: NcclType>(&self, len: usize) -> Result<Buffer<T>> {
        Buffer::zeroed_within(self.library(), self.stream(), len, self.timeout)
    }

    /// Registers with NCCL a buffer that operations of this communicator will use often.
    ///
    /// Only this rank is affected; see [`Registered`] for what the other ranks have to do. After an error the buffer is
    /// not returned; it is freed.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when the library is older than 2.19.1, [`ErrorKind::Nccl`] when NCCL
    /// refuses the memory, [`ErrorKind::Stream`] for a buffer whose stream operations refuse as well,
    /// [`ErrorKind::Closed`] and [`ErrorKind::Aborted`] when the communicator is out of use;
    /// [`ErrorKind::TimedOut`] when NCCL does not return within the timeout for operations: the
    /// communicator is aborted, and the buffer leaked.
    ///
    /// Wraps `ncclCommRegister`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = comm.register(stream.clone_htod(&[1u8, 2, 3])?)?;
    /// assert_eq!(stream.clone_dtoh(&x.view())?, [1, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn register<B: OwnedBuffer>(&self, buffer: B) -> Result<Registered<B>> {
        registered::register(self, buffer)
    }

    /// Registers a symmetric window: buffers of the same length, one on each rank, that operations of this communicator
    /// will use often. NCCL has faster paths for operations whose buffers are all in windows; with
    /// [`CtaPolicy::Zero`](crate::CtaPolicy::Zero) it moves the data with copy engines
    /// ([`AllToAllAlgorithm::CopyEngine`](crate::AllToAllAlgorithm::CopyEngine)).
    ///
    /// All ranks must call this at the same time. If the library, a device or the communicator does not support windows, the
    /// buffer remains an ordinary one ([`Registered::is_effective`] returns false). After an error the buffer is not
    /// returned.
    ///
    /// # Errors
    /// As [`register`](Self::register), from NCCL 2.27.3 on; and [`ErrorKind::TimedOut`] when a rank does not arrive within
    /// the timeout for operations. In that case, and when NCCL or CUDA fails, the communicator is aborted.
    ///
    /// Wraps `ncclCommWindowRegister` (`NCCL_WIN_COLL_SYMMETRIC`).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = comm.register_window(comm.buffer::<f32>(1024)?)?;
    /// println!("symmetric: {}", y.is_effective());
    /// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn register_window<T: NcclType>(&self, buffer: Buffer<T>) -> Result<Registered<Buffer<T>>> {
        // Must not run between the comparison and the registration of another window.
        let deadline = deadline_after(self.timeout);
        match self.inner.window_turn.try_lock_until(deadline) {
            Some(_turn) => window::register(self, buffer),
            None => Err(Error::new(ErrorKind::TimedOut {
                what: String::from("another thread's registration of a window"),
                timeout: self.timeout,
            })),
        }
    }
}

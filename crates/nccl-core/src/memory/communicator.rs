//! The methods of a communicator that allocate memory and register it with NCCL, and those for NCCL's own memory.

use super::{Buffer, OwnedBuffer, Registered, registered, window};
use crate::communicator::{Communicator, CommunicatorMemory, suspend};
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

    /// Returns how much device memory NCCL has allocated for the communicator on this rank: its own buffers, not those of the
    /// program.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] before NCCL 2.29.7; [`ErrorKind::Nccl`] where `NCCL_DISABLE_MEM_MANAGER=1` turns the accounting
    /// off; [`ErrorKind::Aborted`] and [`ErrorKind::Closed`] when the communicator has ended.
    ///
    /// Wraps `ncclCommMemStats`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// # let comm = world.communicator("demo").stream(&stream).build()?;
    /// let memory = comm.memory()?;
    /// assert!(!memory.is_suspended && memory.suspendable <= memory.total);
    /// # Ok(())
    /// # }
    /// ```
    pub fn memory(&self) -> Result<CommunicatorMemory> {
        suspend::memory(self)
    }

    /// Releases the device memory of the communicator's own buffers until [`resume`](Self::resume), for instance while an
    /// inference server sleeps. All ranks have to call this. It waits for all work on the device, and for the other ranks.
    ///
    /// Until the communicator is resumed, every operation and every launch of a plan is refused; plans stay valid. It can be
    /// finalized, aborted and dropped. It must have been made with
    /// [`CommunicatorBuilder::suspendable`](crate::CommunicatorBuilder::suspendable).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for a communicator that was not made `suspendable`; [`ErrorKind::Unsupported`] before NCCL
    /// 2.29.7; [`ErrorKind::Nccl`] if `NCCL_DISABLE_MEM_MANAGER=1` forbids it; [`ErrorKind::Closed`] when the communicator is
    /// already suspended. [`ErrorKind::TimedOut`] when not all ranks make the call within the timeout for operations, and
    /// [`ErrorKind::Nccl`] when NCCL fails; the communicator is then aborted.
    ///
    /// Wraps `ncclCommSuspend`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// let comm = world.communicator("model").stream(&stream).with(|comm| comm.suspendable = true).build()?;
    /// comm.suspend()?;
    /// assert!(comm.barrier().is_err());
    /// comm.resume()?;
    /// comm.barrier()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn suspend(&self) -> Result<()> {
        suspend::suspend(self)
    }

    /// Allocates the memory again that [`suspend`](Self::suspend) released. All ranks have to call this.
    ///
    /// # Errors
    /// As [`suspend`](Self::suspend), and [`ErrorKind::InvalidConfig`] when the communicator is not suspended.
    ///
    /// Wraps `ncclCommResume`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// comm.suspend()?;
    /// // … another model uses the memory …
    /// comm.resume()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn resume(&self) -> Result<()> {
        suspend::resume(self)
    }
}

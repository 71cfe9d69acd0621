//! Memory into which other ranks write.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut};

use super::{RawWindow, Signals, Target};
use crate::communicator::Communicator;
use crate::cuda_driver;
use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use crate::ffi;
use crate::memory::{Buffer, Registered, register_alone};
use crate::reduce::ReduceOp;
use crate::time::deadline_after;
use nccl_base::data_type::DataType;

/// Memory of a rank into which the other ranks of a communicator write ([`put`](Self::put)), of the same length on all of them;
/// from [`Communicator::window`].
///
/// A put comes with a signal. Signals belong to the communicator: they are counted for each rank, signal and context, whatever window the put
/// went to, so puts to several windows at a time take several signals. A rank that has waited for the signal
/// ([`wait`](Self::wait)) has what was put before it. In between, the
/// other ranks may write at any time: what this rank reads then may be old, new or half of each. So ranks agree, with signals in the
/// other direction or a [`barrier`](Communicator::barrier), when a place may be written again.
///
/// The value owns its memory and keeps the communicator alive; its drop deregisters and frees it in the background. All ranks
/// should drop theirs, and make their windows in the same order.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let world = nccl::World::threads(1).remove(0);
/// # let comm = world.communicator("demo").stream(&stream).build()?;
/// use nccl::one_sided::{Signals, Target};
///
/// let (right, left) = ((comm.rank() + 1) % comm.world_size(), comm.rank()); // of one rank, itself
/// let source = comm.window::<f32>(4)?; // what is put lies in a window, too
/// let mut inbox = comm.window::<f32>(4)?;
/// inbox.put(source.view(), Target::rank(right))?;
/// inbox.wait(&[Signals::from(left)])?.wait()?;
/// assert_eq!(stream.clone_dtoh(&inbox.view())?, [0.0; 4]);
/// # Ok(())
/// # }
/// ```
pub struct Window<T: NcclType> {
    registered: Registered<Buffer<T>>,
    comm: Communicator,
}

fn turn_timed_out(timeout: Duration) -> Error {
    Error::new(ErrorKind::TimedOut {
        what: String::from("another thread's registration of a window"),
        timeout,
    })
}

/// What a rank lacks that has asked for a window.
const NO_WINDOW: u64 = 1;
const NO_OPERATIONS: u64 = 2;

impl Communicator {
    /// Allocates a window of `len` elements, all zeros, into which the other ranks can put. Every rank calls it with the same
    /// length, at the same time. Returns when what was enqueued before on the streams of all ranks is done, and the zeros are there:
    /// the communicator's timeout counts for that as well.
    ///
    /// # Errors
    /// On all ranks alike: [`ErrorKind::InvalidConfig`] when lengths or types differ, or the length is 0;
    /// [`ErrorKind::Unavailable`] when NCCL makes no windows among these ranks, or has no one-sided operations (a driver before
    /// CUDA 12.5, `NCCL_NUM_RMA_CTX=0`; before NCCL 2.29.7 it does not say so, and the communicator is aborted then);
    /// [`ErrorKind::Unsupported`] before NCCL 2.29.2. Otherwise as [`register_window`](Self::register_window) and
    /// [`buffer`](Self::buffer).
    ///
    /// Wraps `ncclMemAlloc` and `ncclCommWindowRegister` (`NCCL_WIN_COLL_SYMMETRIC`).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// # let comm = world.communicator("demo").stream(&stream).build()?;
    /// let window = comm.window::<u8>(1 << 20)?;
    /// assert_eq!(window.len(), 1 << 20);
    /// # Ok(())
    /// # }
    /// ```
    pub fn window<T: NcclType>(&self, len: usize) -> Result<Window<T>> {
        self.library().function(nccl_sys::Api::ncclPutSignal)?;
        // Between the comparison and the registration, no other window is registered here.
        let deadline = deadline_after(self.timeout);
        let Some(_turn) = self.inner.window_turn.try_lock_until(deadline) else {
            return Err(turn_timed_out(self.timeout));
        };
        let bytes = len.saturating_mul(size_of::<T>());
        let all =
            self.gather_from_all((bytes as u64) << 8 | T::DATA_TYPE.as_raw() as u64 & 0xff)?;
        if let Some(other) = all.iter().position(|&one| one != all[0]) {
            let bytes = |rank: usize| all[rank] >> 8;
            let data_type = |rank: usize| DataType::from_raw((all[rank] & 0xff) as u32);
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "len",
                reason: format!(
                    "rank 0 asks for a window of {} bytes of {}, rank {other} for {} of {}; all ranks have to ask for the same",
                    bytes(0),
                    data_type(0),
                    bytes(other),
                    data_type(other)
                ),
            }));
        }
        if len == 0 {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "len",
                reason: String::from("a window has at least one element"),
            }));
        }
        let mut window = self.window_alone(len, self.has_one_sided()?)?;
        // The first one-sided operation connects all ranks, and would wait for the others to issue one.
        window.comm = self.apart()?;
        self.inner.has_window.store(true, Ordering::Release);
        let own = self.rank();
        window.comm.signal(Target::rank(own))?;
        window.wait(&[Signals::from(own)])?.wait()?;
        window.comm = self.clone();
        Ok(window)
    }

    /// As [`window`](Self::window), without one-sided operations. `agree` compares the length among all ranks.
    #[doc(hidden)]
    pub fn window_for_kernels(
        &self,
        bytes: usize,
        agree: impl FnOnce() -> Result<()>,
    ) -> Result<Window<u8>> {
        let deadline = deadline_after(self.timeout);
        let Some(_turn) = self.inner.window_turn.try_lock_until(deadline) else {
            return Err(turn_timed_out(self.timeout));
        };
        agree()?;
        self.window_alone(bytes, true)
    }

    /// Allocates and registers a window whose length the ranks have compared.
    fn window_alone<T: NcclType>(&self, len: usize, has_operations: bool) -> Result<Window<T>> {
        let registered = register_alone(self, self.buffer::<T>(len)?)?;
        let own = match (registered.is_effective(), has_operations) {
            (false, _) => NO_WINDOW,
            (true, false) => NO_OPERATIONS,
            (true, true) => 0,
        };
        let apart = self.apart()?;
        // The zeros are written on this stream: no rank may put before they are there on all.
        let zeros = || apart.stream().join(self.stream());
        cuda_driver::ignoring_stored_error(&self.inner.context, zeros)
            .map_err(Error::cuda("waiting for the zeros (cuStreamWaitEvent)"))?;
        let lacks = apart.gather_on_own_stream(own)?;
        if let Some(rank) = lacks.iter().position(|&lack| lack != 0) {
            let reason = match lacks[rank] {
                NO_OPERATIONS => format!(
                    "rank {rank} has windows and no one-sided operations; they need CUDA 12.5, and NCCL_NUM_RMA_CTX other than 0"
                ),
                _ => format!(
                    "NCCL made none on rank {rank}; it needs peer access between the devices of all ranks and memory from cuMem \
                     (NCCL_CUMEM_ENABLE), or a network with GIN"
                ),
            };
            return Err(Error::new(ErrorKind::Unavailable {
                what: "a window for one-sided operations",
                reason,
            }));
        }
        Ok(Window {
            registered,
            comm: self.clone(),
        })
    }

    /// The communicator without its configuration, on a stream on which nothing of the program's is waited for.
    fn apart(&self) -> Result<Self> {
        let context = &self.inner.context;
        let stream = cuda_driver::ignoring_stored_error(context, || context.new_stream())
            .map_err(Error::cuda("creating a stream (cuStreamCreate)"))?;
        Ok(Self {
            config: None,
            ..self.on(&stream)
        })
    }

    /// Whether NCCL has one-sided operations here, as far as it says.
    fn has_one_sided(&self) -> Result<bool> {
        Ok(self.properties()?.host_rma != Some(false))
    }

    /// Returns the number that each rank has given.
    #[doc(hidden)]
    pub fn gather_from_all(&self, own: u64) -> Result<Vec<u64>> {
        self.apart()?.gather_on_own_stream(own)
    }

    fn gather_on_own_stream(&self, own: u64) -> Result<Vec<u64>> {
        let (context, stream) = (&self.inner.context, self.stream());
        let mut all = vec![0u64; self.world_size()];
        all[self.rank()] = own;
        let mut numbers = cuda_driver::ignoring_stored_error(context, || stream.clone_htod(&all))
            .map_err(Error::cuda("copying numbers to the device"))?;
        self.all_reduce_in_place(&mut numbers, ReduceOp::Max)?
            .wait()?;
        // The stream is idle.
        cuda_driver::ignoring_stored_error(context, || stream.clone_dtoh(&numbers))
            .map_err(Error::cuda("copying numbers from the device"))
    }
}

impl<T: NcclType> Window<T> {
    /// Returns the number of elements.
    ///
    /// ```
    /// # fn example(window: &nccl::one_sided::Window<f32>) {
    /// assert!(window.len() > 0);
    /// # }
    /// ```
    #[must_use]
    #[allow(
        clippy::len_without_is_empty,
        reason = "a window has at least one element"
    )]
    pub fn len(&self) -> usize {
        self.registered.len()
    }

    /// Returns the communicator whose ranks write into it, with the stream, timeout and configuration with which it was made.
    ///
    /// ```
    /// # fn example(window: &nccl::one_sided::Window<f32>) {
    /// let ranks = window.communicator().world_size();
    /// # }
    /// ```
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Returns the stream to which the memory belongs.
    ///
    /// ```
    /// # fn example(window: &nccl::one_sided::Window<f32>) {
    /// let stream = window.stream();
    /// # }
    /// ```
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        self.registered.stream()
    }

    /// Returns a view of this rank's elements, to read: for every function that takes cudarc's memory, and as the source of a put.
    ///
    /// ```
    /// # fn example(window: &nccl::one_sided::Window<f32>) -> Result<(), nccl::cudarc::driver::DriverError> {
    /// let host: Vec<f32> = window.stream().clone_dtoh(&window.view())?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn view(&self) -> CudaView<'_, T> {
        self.registered.view()
    }

    /// Returns a view of this rank's elements, to write.
    ///
    /// ```
    /// # fn example(window: &mut nccl::one_sided::Window<f32>) -> Result<(), nccl::cudarc::driver::DriverError> {
    /// let stream = window.stream().clone();
    /// stream.memcpy_htod(&vec![1.0f32; window.len()], &mut window.view_mut())?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.registered.view_mut()
    }

    /// Returns the address at which kernels of this rank's device reach the part of rank `peer`; `None` for a rank whose memory they
    /// do not reach ([`Team::load_store`](crate::device_api::Team::load_store)). It is valid until this rank's window or that one's is dropped, or the
    /// communicator ends, which an abort for another rank's fault may do at any time: kernels that use it need a
    /// [hold](Communicator::hold_windows). What they read and write there, and when, is for them to arrange.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`] for a rank that the communicator does not have; otherwise as [`Communicator::properties`].
    ///
    /// Wraps `ncclGetPeerDevicePointer`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// # let comm = world.communicator("demo").stream(&stream).build()?;
    /// let window = comm.window::<f32>(4)?;
    /// assert!(window.peer_address(comm.rank())?.is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn peer_address(&self, peer: usize) -> Result<Option<u64>> {
        const CALL: &str = "ncclGetPeerDevicePointer";
        let function = self
            .comm
            .library()
            .function(nccl_sys::Api::ncclGetPeerDevicePointer)?;
        let ranks = self.comm.world_size();
        let rank = i32::try_from(peer).ok().filter(|_| peer < ranks);
        let Some(rank) = rank else {
            return Err(Error::new(ErrorKind::NoSuchRank {
                role: "peer",
                rank: peer,
                world_size: ranks,
            }));
        };
        let window = self.raw();
        self.comm.ask(CALL, move |inner, _| {
            // Captured as a whole, because the pointer alone may not go to another thread.
            let whole: RawWindow = window;
            let mut pointer = std::ptr::null_mut();
            // SAFETY: the window is registered with this communicator, which is alive, under its lock; the place is valid
            // for the call.
            let code = unsafe { function(whole.0, 0, rank, &mut pointer) };
            ffi::check(&inner.library, CALL, code).map_err(Error::from)?;
            Ok((!pointer.is_null()).then_some(pointer.addr() as u64))
        })
    }

    pub(super) fn raw(&self) -> RawWindow {
        RawWindow(self.registered.window())
    }
}

impl<T: NcclType> fmt::Debug for Window<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window")
            .field("communicator", &self.comm.name())
            .field("len", &self.len())
            .finish()
    }
}

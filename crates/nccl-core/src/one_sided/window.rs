//! Memory into which other ranks can write.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut};

use super::{Signals, Target};
use crate::communicator::Communicator;
use crate::cuda_driver;
use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use crate::ffi;
use crate::memory::{Buffer, Registered, register_alone};
use crate::queued_op::RawWindow;
use crate::reduce::ReduceOp;
use crate::time::deadline_after;
use nccl_base::data_type::DataType;

/// Memory of a rank into which the other ranks of a communicator can write ([`put`](Self::put)), of the same length on all of
/// them; from [`Communicator::window`].
///
/// A put also sends a signal. Signals belong to the communicator: they are counted for each rank, signal and context, whatever
/// the window of the put, so simultaneous puts to several windows need several signals. A rank that has waited for the signal
/// ([`wait`](Self::wait)) sees the data of the put. The other ranks may write at any other time as well, and this rank then
/// reads old data, new data, or a mixture. So the ranks have to agree when a part of a window may be written again: with
/// signals in the other direction, or with a [`barrier`](Communicator::barrier).
///
/// On the emulator, a use of the bytes of a put without a wait for its signal is recorded as a violation
/// (`nccl_emulator::violations`).
///
/// The value owns its memory and keeps the communicator alive; its drop deregisters and frees the memory in the background.
/// All ranks should drop their part, and all must make their windows in the same order.
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

/// What a rank that requests a window lacks.
const NO_WINDOW: u64 = 1;
const NO_OPERATIONS: u64 = 2;

/// What a rank compares that has no memory for its window.
const REFUSED: u64 = u64::MAX;

impl Communicator {
    /// Allocates a window of `len` elements, all zeros, into which the other ranks can put. All ranks must call this with the
    /// same length, at the same time. It returns when the earlier work on the streams of all ranks is done and the zeros are
    /// written; the communicator's timeout includes both.
    ///
    /// # Errors
    /// On all ranks alike: [`ErrorKind::InvalidConfig`] when lengths or types differ, or the length is 0;
    /// [`ErrorKind::Unavailable`] when NCCL supports no windows among these ranks, or no one-sided operations (a driver before
    /// CUDA 12.5, `NCCL_NUM_RMA_CTX=0`; before 2.29.7, NCCL does not report that, and the communicator is aborted), or when
    /// another rank cannot allocate its part; that rank has its own error, as of [`buffer`](Self::buffer);
    /// [`ErrorKind::Unsupported`] before NCCL 2.29.2. Otherwise as [`register_window`](Self::register_window); a later failure
    /// of CUDA on one rank alone aborts the communicator, because the other ranks wait for that rank.
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
        // No other window may be registered here between the comparison and the registration.
        let deadline = deadline_after(self.timeout);
        let Some(_turn) = self.inner.window_turn.try_lock_until(deadline) else {
            return Err(turn_timed_out(self.timeout));
        };
        let buffer = (len > 0).then(|| self.buffer::<T>(len)).transpose();
        let bytes = len.saturating_mul(size_of::<T>());
        let own = match &buffer {
            Ok(_) => (bytes as u64) << 8 | T::DATA_TYPE.as_raw() as u64 & 0xff,
            Err(_) => REFUSED,
        };
        let all = self.gather_from_all(own)?;
        let buffer = buffer?;
        if let Some(rank) = all.iter().position(|&one| one == REFUSED) {
            return Err(Error::new(ErrorKind::Unavailable {
                what: "a window for one-sided operations",
                reason: format!("rank {rank} cannot allocate its part; its error says why"),
            }));
        }
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
        let Some(buffer) = buffer else {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "len",
                reason: String::from("a window has at least one element"),
            }));
        };
        let has_one_sided = self.has_one_sided().map_err(self.alone())?;
        let mut window = self.window_alone(buffer, has_one_sided)?;
        // The first one-sided operation connects all ranks, and would otherwise wait until the others issue one.
        window.comm = self.apart()?;
        self.inner.has_window.store(true, Ordering::Release);
        let own = self.rank();
        let connected = (|| {
            window.comm.signal(Target::rank(own))?;
            window.wait(&[Signals::from(own)])?.wait()
        })();
        connected.map_err(self.alone())?;
        window.comm = self.clone();
        Ok(window)
    }

    /// Like [`window`](Self::window), without one-sided operations. `agree` compares the length among all ranks; it is told
    /// whether this rank has the memory, and fails unless all ranks have it.
    #[doc(hidden)]
    pub fn window_for_kernels(
        &self,
        bytes: usize,
        agree: impl FnOnce(bool) -> Result<()>,
    ) -> Result<Window<u8>> {
        let deadline = deadline_after(self.timeout);
        let Some(_turn) = self.inner.window_turn.try_lock_until(deadline) else {
            return Err(turn_timed_out(self.timeout));
        };
        let buffer = self.buffer::<u8>(bytes);
        let agreed = agree(buffer.is_ok());
        let buffer = buffer?;
        agreed?;
        self.window_alone(buffer, true)
    }

    /// Registers a window whose length the ranks have compared.
    fn window_alone<T: NcclType>(
        &self,
        buffer: Buffer<T>,
        has_operations: bool,
    ) -> Result<Window<T>> {
        let registered = register_alone(self, buffer)?;
        let own = match (registered.is_effective(), has_operations) {
            (false, _) => NO_WINDOW,
            (true, false) => NO_OPERATIONS,
            (true, true) => 0,
        };
        let apart = self.apart()?;
        // The zeros are written on this stream, and no rank may put before they are written on all ranks.
        let zeros = || apart.stream().join(self.stream());
        cuda_driver::ignoring_stored_error(&self.inner.context, zeros)
            .map_err(Error::cuda("waiting for the zeros (cuStreamWaitEvent)"))
            .map_err(self.alone())?;
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

    /// Ends the communicator for an error of this rank alone: the other ranks make the window, and wait for this one.
    fn alone(&self) -> impl FnOnce(Error) -> Error {
        |error| self.inner.fail_alone(error)
    }

    /// Returns the communicator without its configuration, on a stream that does not wait for work of the program.
    fn apart(&self) -> Result<Self> {
        let context = &self.inner.context;
        let stream = cuda_driver::ignoring_stored_error(context, || context.new_stream())
            .map_err(Error::cuda("creating a stream (cuStreamCreate)"))
            .map_err(self.alone())?;
        Ok(Self {
            config: None,
            ..self.on(&stream)
        })
    }

    /// Whether NCCL has one-sided operations here, as far as it reports that.
    fn has_one_sided(&self) -> Result<bool> {
        Ok(self.properties()?.host_rma != Some(false))
    }

    /// Returns the numbers that the ranks passed, in rank order.
    #[doc(hidden)]
    pub fn gather_from_all(&self, own: u64) -> Result<Vec<u64>> {
        self.apart()?.gather_on_own_stream(own)
    }

    fn gather_on_own_stream(&self, own: u64) -> Result<Vec<u64>> {
        let (context, stream) = (&self.inner.context, self.stream());
        let mut all = vec![0u64; self.world_size()];
        all[self.rank()] = own;
        let mut numbers = cuda_driver::ignoring_stored_error(context, || stream.clone_htod(&all))
            .map_err(Error::cuda("copying numbers to the device"))
            .map_err(self.alone())?;
        self.all_reduce_in_place(&mut numbers, ReduceOp::Max)?
            .wait()?;
        // The stream is idle.
        cuda_driver::ignoring_stored_error(context, || stream.clone_dtoh(&numbers))
            .map_err(Error::cuda("copying numbers from the device"))
            .map_err(self.alone())
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

    /// Returns the communicator whose ranks can write into the window, with the stream, timeout and configuration with which
    /// the window was made.
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

    /// Returns a view of this rank's elements, to read: for functions that take cudarc's memory, and as the source of a put.
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

    /// Returns the address at which kernels on this rank's device reach the part of rank `peer`; `None` for a rank whose memory
    /// they cannot reach ([`Team::load_store`](crate::device_api::Team::load_store)). The address is valid until the window of
    /// this rank or of `peer` is dropped, or the communicator ends. An abort for another rank's fault may end it at any time,
    /// so kernels that use the address need a [hold](Communicator::hold_windows). The program has to synchronize the accesses
    /// of its kernels.
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
            // Captures the whole value, because the pointer alone is not `Send`.
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

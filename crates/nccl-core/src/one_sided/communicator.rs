//! The methods of a communicator for memory that other ranks, or kernels, access.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Signals, Target, Window};
use crate::communicator::{Communicator, WindowHold, hold_windows};
use crate::cuda_driver;
use crate::device_api::{self, DeviceCommunicator, DeviceRequirements, Properties};
use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Buffer, register_alone};
use crate::operation::{OperationKind, Shape};
use crate::reduce::ReduceOp;
use crate::request::Request;
use crate::time::deadline_after;
use nccl_base::data_type::DataType;

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

    /// Signals a rank without a put, for instance to report that a part of this rank's window may be written again. The ranks
    /// must have made a [`window`](Self::window) before.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] if no window was made yet. Otherwise as [`Window::put`](crate::one_sided::Window::put).
    ///
    /// Wraps `ncclSignal` (NCCL ≥ 2.29.2).
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// comm.signal(nccl::one_sided::Target::rank(0))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn signal(&self, to: Target) -> Result<Request> {
        let shape = Shape {
            peer: Some(to.peer),
            ..Shape::default()
        };
        self.group_of_kind(OperationKind::Signal, shape, |group| group.signal(to))
    }

    /// Returns the capabilities of the communicator. NCCL answers without communicating with the other ranks.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::error::ErrorKind::Unsupported) before NCCL 2.29.2,
    /// [`ErrorKind::Nccl`](crate::error::ErrorKind::Nccl) when NCCL fails;
    /// [`ErrorKind::Aborted`](crate::error::ErrorKind::Aborted) and [`ErrorKind::Closed`](crate::error::ErrorKind::Closed) when the
    /// communicator has ended.
    ///
    /// Wraps `ncclCommQueryProperties`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// # let comm = world.communicator("demo").stream(&stream).build()?;
    /// println!("one-sided operations: {:?}", comm.properties()?.host_rma);
    /// # Ok(())
    /// # }
    /// ```
    pub fn properties(&self) -> Result<Properties> {
        device_api::properties(self)
    }

    /// Keeps the windows of the communicator mapped while kernels of the program use [`Window::peer_address`] or a
    /// [`DeviceCommunicator`]. An abort, which a fault of another rank may begin at any time, and an orderly end wait until the
    /// work that is on the stream at [`WindowHold::until`] is over. If that takes longer than three quarters of the
    /// [abort timeout](crate::Timeouts::abort), the communicator is leaked, with its windows mapped.
    ///
    /// Take the hold before the launch. A kernel that waits for other ranks should check a flag or a clock, so that it ends if
    /// they do not arrive.
    ///
    /// [`Window::peer_address`]: crate::one_sided::Window::peer_address
    /// [`DeviceCommunicator`]: crate::device_api::DeviceCommunicator
    ///
    /// # Errors
    /// [`ErrorKind::Aborted`](crate::error::ErrorKind::Aborted) and [`ErrorKind::Closed`](crate::error::ErrorKind::Closed) when
    /// the communicator has ended or is being finalized, because its windows may be gone.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let hold = comm.hold_windows()?;
    /// drop(hold); // nothing was launched
    /// # Ok(())
    /// # }
    /// ```
    pub fn hold_windows(&self) -> Result<WindowHold> {
        hold_windows(&self.inner)
    }

    /// Makes a device communicator, for kernels that use NCCL's device functions. All ranks must call this with the same
    /// requirements.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if NCCL is older than the bindings ([`nccl_sys::Version::HEADER`]), because its struct
    /// differs. [`ErrorKind::InvalidConfig`] for numbers that exceed NCCL's range, and on all ranks if their requirements
    /// differ. [`ErrorKind::Unavailable`] if these ranks have no device API
    /// ([`Properties::device_api`]). [`ErrorKind::Nccl`] when NCCL fails, as in the emulator's
    /// own implementation, and [`ErrorKind::TimedOut`] when not all ranks make the call; in both cases the communicator is
    /// aborted.
    ///
    /// Wraps `ncclDevCommCreate`.
    ///
    /// ```no_run
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let device = comm.device_communicator(&Default::default())?;
    /// println!("{:?}", device.argument());
    /// # Ok(())
    /// # }
    /// ```
    pub fn device_communicator(&self, needs: &DeviceRequirements) -> Result<DeviceCommunicator> {
        device_api::device_communicator(self, needs, |own| self.gather_from_all(own))
    }
}

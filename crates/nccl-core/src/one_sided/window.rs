//! Memory into which other ranks can write.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut};

use crate::communicator::{Communicator, ask};
use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use crate::ffi;
use crate::memory::{Buffer, Registered};
use crate::queued_op::RawWindow;

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
    pub(super) registered: Registered<Buffer<T>>,
    pub(super) comm: Communicator,
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
        ask(&self.comm, CALL, move |inner, _| {
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

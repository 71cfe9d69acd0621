//! Device memory that NCCL allocates.

use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::RangeBounds;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut,
    DriverError, SyncOnDrop, result,
};
use nccl_sys as sys;

use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer, lend};
#[cfg(doc)]
use crate::communicator::Communicator;
use crate::communicator::{Timeouts, check_allocation_stream};
use crate::cuda_driver;
use crate::drop_queue::{self, DeferredDrop, DropPoll, StreamPoint};
use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use crate::library::Library;
use crate::time::deadline_after;
use crate::{detached_call, ffi};

/// Device memory from NCCL's own allocator, of `len` elements of `T`.
///
/// NCCL can let peers access such memory directly, which it cannot do with all memory: registering such a
/// buffer ([`Communicator::register`]) saves copies in collectives on NVLink. For every other
/// use it is ordinary device memory.
///
/// Like cudarc's [`CudaSlice`], a buffer belongs to a stream: work on that stream needs no further ordering, and the
/// memory is freed after all work that was put on the stream before the drop. Operations take `&buffer` and
/// `&mut buffer`, or [`slice`](Self::slice) and [`slice_mut`](Self::slice_mut); cudarc's functions
/// take [`view`](Self::view) and [`view_mut`](Self::view_mut).
///
/// A drop never waits: a thread frees the memory when the stream has reached that point. `ncclMemFree` then waits for
/// the whole device, as `cuMemFree` does, so a program should allocate buffers once and keep them.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// let mut y = comm.buffer::<f32>(3)?;
/// stream.memcpy_htod(&[1.0, 2.0, 3.0], &mut y.view_mut())?;
/// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
/// assert_eq!(stream.clone_dtoh(&y.view())?, [1.0, 2.0, 3.0]);
/// # Ok(())
/// # }
/// ```
pub struct Buffer<T: NcclType> {
    /// Never dropped as a slice, because cudarc would free it with its own allocator.
    memory: ManuallyDrop<CudaSlice<T>>,
    /// Recorded on drop; created beforehand, because creating it in the drop could fail.
    last: ManuallyDrop<CudaEvent>,
    library: Library,
}

impl<T: NcclType> Buffer<T> {
    /// Allocates `len` elements, all zeros, on the device of `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when the library is older than 2.19.1, [`ErrorKind::Nccl`] when there is not enough
    /// memory, [`ErrorKind::Stream`] for a stream that operations refuse as well,
    /// [`ErrorKind::Cuda`] when the device failed, [`ErrorKind::TimedOut`] when NCCL does not return
    /// within the communicator's timeout for operations, or 30 s.
    ///
    /// Wraps `ncclMemAlloc`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// use nccl::{Buffer, Library};
    ///
    /// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let x = Buffer::<u32>::zeroed(&Library::load()?, &stream, 8)?;
    /// assert_eq!(stream.clone_dtoh(&x.view())?, [0; 8]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn zeroed(library: &Library, stream: &Arc<CudaStream>, len: usize) -> Result<Self> {
        Self::zeroed_within(library, stream, len, Timeouts::default().operation)
    }

    /// Like [`zeroed`](Self::zeroed), with a timeout for NCCL.
    pub(super) fn zeroed_within(
        library: &Library,
        stream: &Arc<CudaStream>,
        len: usize,
        timeout: Duration,
    ) -> Result<Self> {
        library.function(sys::Api::ncclMemAlloc)?;
        library.function(sys::Api::ncclMemFree)?;
        library.admit(T::DATA_TYPE)?;
        check_allocation_stream(stream)?;
        let context = stream.context();
        let last = cuda_driver::new_event(context, None)
            .map_err(Error::cuda("creating an event (cuEventCreate)"))?;
        // Allocators return no memory for zero bytes.
        let bytes = len
            .checked_mul(size_of::<T>())
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or_else(|| {
                Error::new(ErrorKind::Length {
                    buffer: "the buffer",
                    given: len,
                    needed: isize::MAX as usize / size_of::<T>(),
                    rule: "at most what a device can address",
                })
            })?
            .max(size_of::<T>());
        let address = allocate(library, context, bytes, timeout)?;
        // SAFETY: an allocation of that many bytes, which is written below before it is handed out; the
        // slice is never dropped, so cudarc does not free it.
        let memory = unsafe { stream.upgrade_device_ptr::<T>(address, len) };
        let mut buffer = Self {
            memory: ManuallyDrop::new(memory),
            last: ManuallyDrop::new(last),
            library: library.clone(),
        };
        // The guard makes readers on other streams wait for the zeros.
        let (address, guard) = buffer.memory.device_ptr_mut(stream);
        // SAFETY: the allocation has as many bytes, and no other code has its address yet.
        let filled = unsafe { result::memset_d8_async(address, 0, bytes, stream.cu_stream()) };
        drop(guard);
        filled.map_err(Error::cuda("filling a buffer with zeros (cuMemsetD8Async)"))?;
        Ok(buffer)
    }

    /// Returns the number of elements.
    ///
    /// ```
    /// # fn example(x: &nccl::Buffer<f32>) {
    /// let bytes = x.len() * size_of::<f32>();
    /// # }
    /// ```
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns whether there are no elements.
    ///
    /// ```
    /// # fn example(x: &nccl::Buffer<f32>) {
    /// assert_eq!(x.is_empty(), x.len() == 0);
    /// # }
    /// ```
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// Returns the stream to which the buffer belongs.
    ///
    /// ```
    /// # fn example(x: &nccl::Buffer<f32>) {
    /// x.stream().synchronize().unwrap();
    /// # }
    /// ```
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        self.memory.stream()
    }

    /// Returns a view of all elements, to read, for functions that take cudarc's memory.
    ///
    /// ```
    /// # fn example(x: &nccl::Buffer<f32>) -> Result<(), nccl::cudarc::driver::DriverError> {
    /// let host: Vec<f32> = x.stream().clone_dtoh(&x.view())?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn view(&self) -> CudaView<'_, T> {
        self.memory.as_view()
    }

    /// Returns a view of all elements, to write, for functions that take cudarc's memory.
    ///
    /// ```
    /// # fn example(y: &mut nccl::Buffer<f32>) -> Result<(), nccl::cudarc::driver::DriverError> {
    /// let stream = y.stream().clone();
    /// stream.memset_zeros(&mut y.view_mut())?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.memory.as_view_mut()
    }

    /// Returns a view of some of the elements, to read.
    ///
    /// # Panics
    /// If `bounds` reach beyond the buffer.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, x: &nccl::Buffer<f32>) -> nccl::Result<()> {
    /// comm.group(|group| group.isend(x.slice(..16), 0))?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn slice(&self, bounds: impl RangeBounds<usize>) -> CudaView<'_, T> {
        self.memory.slice(bounds)
    }

    /// Returns a view of some of the elements, to write.
    ///
    /// # Panics
    /// If `bounds` reach beyond the buffer.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, y: &mut nccl::Buffer<f32>) -> nccl::Result<()> {
    /// comm.group(|group| group.irecv(y.slice_mut(16..), 0))?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> CudaViewMut<'_, T> {
        self.memory.slice_mut(bounds)
    }

    /// Returns mutable views of the elements before `mid` and from `mid` on.
    ///
    /// # Panics
    /// If `mid` is beyond the buffer.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, y: &mut nccl::Buffer<f32>) -> nccl::Result<()> {
    /// let (low, high) = y.split_at_mut(16);
    /// comm.group(|group| {
    ///     group.irecv(low, 0)?;
    ///     group.irecv(high, 1)
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn split_at_mut(&mut self, mid: usize) -> (CudaViewMut<'_, T>, CudaViewMut<'_, T>) {
        self.memory.split_at_mut(mid)
    }
}

lend!((, T: NcclType) &'a Buffer<T>, |_| T::DATA_TYPE, |buffer, on| buffer.view().view_ptr(on));
impl<'a, T: NcclType> SendBuffer<'a> for &'a Buffer<T> {
    type Element = T;
    fn erase(self) -> Erased<'a> {
        self.view().erase()
    }
}

lend!((, T: NcclType) &'a mut Buffer<T>, |_| T::DATA_TYPE, |buffer, on| {
    buffer.view_mut().view_ptr_mut(on)
});
impl<'a, T: NcclType> RecvBuffer<'a> for &'a mut Buffer<T> {
    type Element = T;
    fn erase_mut(self) -> ErasedMut<'a> {
        self.view_mut().erase_mut()
    }
}

/// Allocates with NCCL, on a thread that can be given up, because the call may have to wait for the device.
fn allocate(
    library: &Library,
    context: &Arc<CudaContext>,
    bytes: usize,
    timeout: Duration,
) -> Result<CUdeviceptr> {
    const CALL: &str = "ncclMemAlloc";
    let allocate = library.function(sys::Api::ncclMemAlloc)?;
    let (theirs, context, freeing) = (library.clone(), Arc::clone(context), library.clone());
    let allocated = detached_call::run(
        deadline_after(timeout),
        || false,
        move || {
            // NCCL allocates on the current device.
            cuda_driver::bind(&context).map_err(Error::cuda(
                "binding the context to this thread (cuCtxSetCurrent)",
            ))?;
            let mut address: *mut c_void = std::ptr::null_mut();
            // SAFETY: `address` is a valid location.
            let code = unsafe { allocate(&mut address, bytes) };
            ffi::check(&theirs, CALL, code)?;
            Ok::<_, Error>(address.addr() as CUdeviceptr)
        },
        move |allocated| {
            if let (Ok(address), Some(free)) = (allocated, freeing.api().ncclMemFree) {
                // SAFETY: an allocation of NCCL whose address no other code has.
                let _ = unsafe { free(std::ptr::with_exposed_provenance_mut(address as usize)) };
            }
        },
    );
    allocated.map_err(|not_back| not_back.into_error(CALL, timeout))?
}

/// The memory of a dropped buffer.
struct DeferredBuffer<T: NcclType> {
    /// `None` once the stream waits for the other users of the memory. A capturing stream cannot wait for them.
    memory: Option<ManuallyDrop<CudaSlice<T>>>,
    address: CUdeviceptr,
    bytes: usize,
    event: Option<CudaEvent>,
    behind: Option<StreamPoint>,
    stream: Arc<CudaStream>,
    library: Library,
}

impl<T: NcclType> DeferredBuffer<T> {
    /// Makes the stream wait for the other users that cudarc knows of, and records an event behind them.
    fn mark(&mut self) {
        if cuda_driver::is_capturing(&self.stream) {
            return;
        }
        if let Some(mut memory) = self.memory.take() {
            if wait_for_users(&mut memory, &self.stream).is_err() {
                // A later poll may succeed.
                self.memory = Some(memory);
                return;
            }
            self.address = ManuallyDrop::into_inner(memory).leak();
        }
        if let Some(event) = self.event.take() {
            self.behind = Some(StreamPoint::new(Arc::clone(&self.stream), event));
        }
    }
}

/// Makes the stream wait for the last reader and the last writer. cudarc's `leak` does that as well, but not if an
/// error is stored.
fn wait_for_users<T>(
    memory: &mut CudaSlice<T>,
    stream: &CudaStream,
) -> std::result::Result<(), DriverError> {
    if !stream.context().is_managing_stream_synchronization() {
        return Ok(());
    }
    let wait_for = |guard: SyncOnDrop<'_>| match *ManuallyDrop::new(guard) {
        SyncOnDrop::Record(Some((event, _))) => cuda_driver::wait(stream, event),
        SyncOnDrop::Record(None) | SyncOnDrop::Sync(_) => Ok(()),
    };
    cuda_driver::bind(stream.context())?;
    let context = stream.context();
    let (_, reader) = cuda_driver::ignoring_stored_error(context, || memory.device_ptr(stream));
    wait_for(reader)?;
    let (_, writer) = cuda_driver::ignoring_stored_error(context, || memory.device_ptr_mut(stream));
    wait_for(writer)
}

impl<T: NcclType> DeferredDrop for DeferredBuffer<T> {
    fn poll(&mut self) -> DropPoll {
        let _ = cuda_driver::bind(self.stream.context());
        if self.behind.is_none() {
            self.mark();
        }
        if self.behind.as_mut().is_some_and(StreamPoint::is_over) {
            DropPoll::Over
        } else {
            DropPoll::Wait
        }
    }

    fn release(self: Box<Self>) {
        let Some(free) = self.library.api().ncclMemFree else {
            return;
        };
        let _ = cuda_driver::bind(self.stream.context());
        // SAFETY: an allocation of NCCL, freed once. All work that was put on its stream before the buffer was dropped
        // is over, and so are all uses of the memory.
        let code = unsafe { free(std::ptr::with_exposed_provenance_mut(self.address as usize)) };
        if let Err(failure) = ffi::check(&self.library, "ncclMemFree", code) {
            let what = format!("a buffer of {} bytes", self.bytes);
            crate::events::leaked(&what, failure);
        }
    }

    fn describe(&self) -> String {
        format!(
            "a buffer of {} bytes at {:#x}, whose stream did not come to its end",
            self.bytes, self.address
        )
    }
}

impl<T: NcclType> Drop for Buffer<T> {
    /// Never waits; see the type.
    fn drop(&mut self) {
        // SAFETY: both are taken once, here, and not used afterwards.
        let (memory, event) = unsafe {
            (
                ManuallyDrop::take(&mut self.memory),
                ManuallyDrop::take(&mut self.last),
            )
        };
        let memory = ManuallyDrop::new(memory);
        if drop_queue::is_closed() {
            std::mem::forget(event);
            return;
        }
        let stream = Arc::clone(memory.stream());
        let _ = cuda_driver::bind(stream.context());
        let mut freed = DeferredBuffer {
            address: 0,
            bytes: memory.num_bytes(),
            memory: Some(memory),
            event: Some(event),
            behind: None,
            stream,
            library: self.library.clone(),
        };
        freed.mark();
        drop_queue::defer(Box::new(freed), drop_queue::TIMEOUT);
    }
}

impl<T: NcclType> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("data_type", &T::DATA_TYPE)
            .field("len", &self.len())
            .field("device", &self.memory.ordinal())
            .finish()
    }
}

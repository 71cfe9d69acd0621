//! Tensors on CUDA devices: NCCL reads and writes their memory, on the device's own stream.
//!
//! The result's memory is allocated on that stream, so that the stream's order is sufficient: behind the work that made the
//! tensor, and before the work that reads the result or frees either.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::{CudaDType, CudaStorage, CudaStorageSlice};
use candle_core::{CudaDevice, Layout, Shape};
use nccl::NcclType;
use nccl::cudarc::driver::{CudaSlice, DeviceRepr};
use nccl::{Communicator, ErrorKind};

use crate::collective::Collective;
use crate::communicator::{PER_THREAD_REASON, TensorCommunicator, is_per_thread};
use crate::cpu::of_elements;
use crate::error::Error;

/// Issues a collective from one storage to a new one. Waits for nothing.
pub(crate) fn forward(
    comm: &TensorCommunicator,
    collective: Collective,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape), Error> {
    let device = storage.device();
    let on = on_stream_of(comm, collective, device)?;
    of_elements!(
        comm,
        collective,
        (storage.dtype(), &storage.slice),
        CudaStorageSlice,
        |slice| {
            let shape = collective.shape(&on, layout.shape())?;
            let x = slice.slice(collective.span(&on, layout)?);
            let mut y = allocate(slice, device, shape.elem_count())?;
            let result = y.slice_mut(..shape.elem_count());
            // The stream's order does the rest, and the communicator's watchdog watches the operation.
            drop(collective.issue(&on, x, result)?);
            Ok((CudaDType::wrap_cuda_slice(y, device.clone()), shape))
        }
    )
}

/// Issues a collective that keeps the shape, within one storage. Waits for nothing.
pub(crate) fn in_place(
    comm: &TensorCommunicator,
    collective: Collective,
    storage: &mut CudaStorage,
    layout: &Layout,
) -> Result<(), Error> {
    let on = on_stream_of(comm, collective, &storage.device)?;
    of_elements!(
        comm,
        collective,
        (storage.dtype(), &mut storage.slice),
        CudaStorageSlice,
        |slice| {
            let y = slice.slice_mut(collective.span(&on, layout)?);
            drop(collective.issue_in_place(&on, y)?);
            Ok(())
        }
    )
}

/// Returns the communicator, with the device's stream.
fn on_stream_of(
    comm: &TensorCommunicator,
    collective: Collective,
    device: &CudaDevice,
) -> Result<Communicator, Error> {
    let stream = device.cuda_stream();
    if is_per_thread(&stream) {
        return Err(Error::Device {
            operation: collective.name(),
            comm: comm.communicator().name().to_owned(),
            reason: PER_THREAD_REASON,
        });
    }
    Ok(comm.communicator().on(&stream))
}

/// Allocates memory for a result, of the type of `like`.
fn allocate<T: NcclType + DeviceRepr>(
    _like: &CudaSlice<T>,
    device: &CudaDevice,
    elements: usize,
) -> Result<CudaSlice<T>, Error> {
    // CUDA allocates no memory of 0 bytes.
    // SAFETY: the operation writes all elements of the result on this stream, before work that is put there later
    // reads them; the one element of an empty result is never read.
    let memory = unsafe { device.cuda_stream().alloc::<T>(elements.max(1)) };
    let what = "memory for the result (cuMemAllocAsync)";
    memory.map_err(|error| Error::Nccl(nccl::Error::from(ErrorKind::Cuda { what, error })))
}

//! Tensors on the CPU: from candle's storage to bytes in the staging area, and back.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Shape, WithDType};
use nccl::NcclType;

use crate::collective::Collective;
use crate::communicator::TensorCommunicator;
use crate::error::Error;

/// Element types of both candle and NCCL whose bytes may be read, and may have any value.
trait Elements: WithDType + NcclType {}
impl Elements for u8 {}
impl Elements for u32 {}
impl Elements for i32 {}
impl Elements for i64 {}
impl Elements for half::bf16 {}
impl Elements for half::f16 {}
impl Elements for f32 {}
impl Elements for f64 {}
impl Elements for float8::F8E4M3 {}

fn bytes<T: Elements>(elements: &[T]) -> &[u8] {
    // SAFETY: the memory of the slice, whose elements have no padding (they are integers and floats).
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

fn bytes_mut<T: Elements>(elements: &mut [T]) -> &mut [u8] {
    let length = size_of_val(elements);
    // SAFETY: as above, borrowed exclusively; any bytes are values of an integer or a float.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), length) }
}

/// Runs `$body` for the elements of a storage (with its type), or returns the error for elements that NCCL does not have.
macro_rules! of_elements {
    ($comm:expr, $collective:expr, $storage:expr, $from:ident, |$elements:ident| $body:expr) => {{
        use $from::*;
        let (dtype, storage) = $storage;
        match storage {
            U8($elements) => $body,
            U32($elements) => $body,
            I32($elements) => $body,
            I64($elements) => $body,
            BF16($elements) => $body,
            F16($elements) => $body,
            F32($elements) => $body,
            F64($elements) => $body,
            F8E4M3($elements) => $body,
            I16(_) | F6E2M3(_) | F6E3M2(_) | F4(_) | F8E8M0(_) => Err(Error::DType {
                operation: $collective.name(),
                comm: $comm.communicator().name().to_owned(),
                dtype,
            }),
        }
    }};
}

#[cfg(feature = "cuda")]
pub(crate) use of_elements;

/// Runs a collective from one storage to a new one.
pub(crate) fn forward(
    comm: &TensorCommunicator,
    collective: Collective,
    storage: &CpuStorage,
    layout: &Layout,
) -> Result<(CpuStorage, Shape), Error> {
    of_elements!(
        comm,
        collective,
        (storage.dtype(), storage),
        CpuStorage,
        |elements| {
            let shape = collective.shape(comm.communicator(), layout.shape())?;
            let x = &elements[collective.span(comm.communicator(), layout)?];
            let y = run(comm, collective, x, shape.elem_count())?;
            Ok((WithDType::to_cpu_storage_owned(y), shape))
        }
    )
}

/// Runs a collective that keeps the shape, within one storage.
pub(crate) fn in_place(
    comm: &TensorCommunicator,
    collective: Collective,
    storage: &mut CpuStorage,
    layout: &Layout,
) -> Result<(), Error> {
    of_elements!(
        comm,
        collective,
        (storage.dtype(), storage),
        CpuStorage,
        |elements| {
            let view = &mut elements[collective.span(comm.communicator(), layout)?];
            let y = run(comm, collective, view, view.len())?;
            view.copy_from_slice(&y);
            Ok(())
        }
    )
}

fn run<T: Elements>(
    comm: &TensorCommunicator,
    collective: Collective,
    x: &[T],
    length: usize,
) -> Result<Vec<T>, Error> {
    let mut y = vec![T::zero(); length];
    comm.staging().run(
        comm.communicator(),
        (collective, T::DATA_TYPE),
        bytes(x),
        bytes_mut(&mut y),
    )?;
    Ok(y)
}

//! Tensors of other libraries, in DLPack's layout.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use nccl_base::data_type::DataType;

use crate::buffer::{Erased, ErasedMut};
use crate::config;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};

/// A tensor in DLPack's C layout (`DLTensor` of DLPack 0.2 and later). PyTorch, JAX, CuPy, TVM and others return it from
/// `__dlpack__`, as the first field of a `DLManagedTensor`.
///
/// A program that has a pointer to a `DLTensor` casts it to a pointer to this type, and calls [`to_read`](Self::to_read) or
/// [`to_write`](Self::to_write) to pass the tensor to an operation. The program must call the owner's deleter itself, after the
/// operation is done on the tensor's stream.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// use nccl::dlpack::{Device, ElementType, Tensor};
///
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// # let memory = stream.clone_htod(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
/// # let address = memory.leak();
/// let mut shape = [2i64, 3];
/// let tensor = Tensor {
///     data: std::ptr::with_exposed_provenance_mut(address as usize),
///     device: Device { kind: 2, id: 0 }, // kDLCUDA
///     dimensions: 2,
///     element: ElementType { code: 2, bits: 32, lanes: 1 }, // kDLFloat
///     shape: shape.as_mut_ptr(),
///     strides: std::ptr::null_mut(), // compact, rows first
///     byte_offset: 0,
/// };
/// // SAFETY: six floats on the device of `stream`, which nothing else uses; the shape has as many numbers as dimensions.
/// let y = unsafe { tensor.to_write(&stream)? };
/// assert_eq!(y.len(), 6);
/// comm.all_reduce_in_place(y, nccl::ReduceOp::Sum)?.wait()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Tensor {
    /// The address of the allocation on the device.
    pub data: *mut c_void,
    /// The device of the memory (`device`).
    pub device: Device,
    /// The number of dimensions (`ndim`).
    pub dimensions: i32,
    /// The type of the elements (`dtype`).
    pub element: ElementType,
    /// The length of each dimension.
    pub shape: *mut i64,
    /// The distance between consecutive elements in each dimension, in elements; null for a compact row-major tensor.
    pub strides: *mut i64,
    /// The distance of the first element from `data`, in bytes.
    pub byte_offset: u64,
}

/// The device of a tensor (`DLDevice`).
///
/// ```
/// let first_gpu = nccl::dlpack::Device { kind: 2, id: 0 };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Device {
    /// The kind of device (`device_type`): 2 for `kDLCUDA`, 13 for `kDLCUDAManaged`.
    pub kind: i32,
    /// The number of the device in this process.
    pub id: i32,
}

/// The type of a tensor's elements (`DLDataType`).
///
/// ```
/// let bf16 = nccl::dlpack::ElementType { code: 4, bits: 16, lanes: 1 };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ElementType {
    /// The type code (`code`): 0 for `kDLInt`, 1 for `kDLUInt`, 2 for `kDLFloat`, 4 for `kDLBfloat`, 6 for `kDLBool`; 8-bit
    /// floats have their own codes since DLPack 1.1.
    pub code: u8,
    /// The number of bits in a lane.
    pub bits: u8,
    /// The number of lanes in an element; 1 for every type of NCCL.
    pub lanes: u16,
}

const CUDA: i32 = 2;
const CUDA_MANAGED: i32 = 13;

impl ElementType {
    /// Returns NCCL's type with the same layout.
    fn data_type(self) -> Option<DataType> {
        let Self { code, bits, lanes } = self;
        if lanes != 1 {
            return None;
        }
        Some(match (code, bits) {
            (0, 8) => DataType::Int8,
            (0, 32) => DataType::Int32,
            (0, 64) => DataType::Int64,
            (1 | 6, 8) => DataType::UInt8,
            (1, 32) => DataType::UInt32,
            (1, 64) => DataType::UInt64,
            (2, 16) => DataType::Float16,
            (2, 32) => DataType::Float32,
            (2, 64) => DataType::Float64,
            (4, 16) => DataType::BFloat16,
            // kDLFloat8_e4m3fn and kDLFloat8_e5m2.
            (10, 8) => DataType::Float8E4M3,
            (12, 8) => DataType::Float8E5M2,
            _ => return None,
        })
    }
}

impl Tensor {
    /// Returns the elements as a buffer that an operation reads. `stream` is the stream on which the tensor's library uses the
    /// memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for a tensor that is not on the device of `stream`, is not compact and row-major, or has an
    /// element type that NCCL lacks; [`ErrorKind::Misaligned`] for an address that is not aligned for the type.
    ///
    /// # Safety
    /// As [`Erased::from_raw`], for all elements of the tensor. `shape`, and `strides` unless it is null, point to `dimensions`
    /// numbers each.
    ///
    /// ```
    /// # fn example(tensor: &nccl::dlpack::Tensor, stream: &std::sync::Arc<nccl::cudarc::driver::CudaStream>) -> nccl::Result<()> {
    /// // SAFETY: a tensor of another library, which keeps it until the operation is done.
    /// let x = unsafe { tensor.to_read(stream)? };
    /// println!("{} elements", x.len());
    /// # Ok(())
    /// # }
    /// ```
    pub unsafe fn to_read<'a>(&self, stream: &'a Arc<CudaStream>) -> Result<Erased<'a>> {
        // SAFETY: the caller's promise.
        let (address, len, data_type) = unsafe { self.elements(stream)? };
        // SAFETY: likewise.
        unsafe { Erased::from_raw(address, len, data_type, stream) }
    }

    /// Returns the elements as a buffer that an operation writes.
    ///
    /// # Errors
    /// As [`to_read`](Self::to_read).
    ///
    /// # Safety
    /// As [`ErasedMut::from_raw`], and as [`to_read`](Self::to_read).
    ///
    /// ```
    /// # fn example(tensor: &nccl::dlpack::Tensor, comm: &nccl::Communicator) -> nccl::Result<()> {
    /// // SAFETY: a tensor of another library, which does not touch it until the operation is done.
    /// let y = unsafe { tensor.to_write(comm.stream())? };
    /// comm.all_reduce_in_place(y, nccl::ReduceOp::Sum)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub unsafe fn to_write<'a>(&self, stream: &'a Arc<CudaStream>) -> Result<ErasedMut<'a>> {
        // SAFETY: the caller's promise.
        let (address, len, data_type) = unsafe { self.elements(stream)? };
        // SAFETY: likewise.
        unsafe { ErasedMut::from_raw(address, len, data_type, stream) }
    }

    /// Returns the address, number and type of the elements.
    ///
    /// # Safety
    /// `shape` and `strides` as in [`to_read`](Self::to_read).
    unsafe fn elements(&self, stream: &CudaStream) -> Result<(u64, usize, DataType)> {
        let Device { kind, id } = self.device;
        let own = stream.context().ordinal();
        if !matches!(kind, CUDA | CUDA_MANAGED) || usize::try_from(id) != Ok(own) {
            return Err(refused(format!(
                "it is on device {id} of DLPack's kind {kind}, and the stream on device {own} of kind {CUDA} (kDLCUDA)"
            )));
        }
        let Some(data_type) = self.element.data_type() else {
            let ElementType { code, bits, lanes } = self.element;
            return Err(refused(format!(
                "NCCL has no elements of DLPack's type code {code} with {bits} bits in {lanes} lanes"
            )));
        };
        let Ok(dimensions) = usize::try_from(self.dimensions) else {
            return Err(refused(format!("it has {} dimensions", self.dimensions)));
        };
        let numbers = |pointer: *mut i64| match dimensions {
            0 => &[][..],
            // SAFETY: the caller's promise.
            _ => unsafe { std::slice::from_raw_parts(pointer, dimensions) },
        };
        if dimensions > 0 && self.shape.is_null() {
            return Err(refused(String::from("it has no shape")));
        }
        let shape = numbers(self.shape);
        let lengths = shape.iter().map(|&length| usize::try_from(length).ok());
        let len = lengths
            .clone()
            .try_fold(1usize, |len, length| len.checked_mul(length?));
        let Some(len) = len else {
            return Err(refused(format!("its shape is {shape:?}")));
        };
        if !self.strides.is_null() && len > 0 {
            let strides = numbers(self.strides);
            let mut compact = 1i64;
            for (&length, &stride) in shape.iter().zip(strides).rev() {
                if length != 1 && stride != compact {
                    return Err(refused(format!(
                        "its shape is {shape:?} and its strides are {strides:?}, so that its elements are not one after another: copy it first"
                    )));
                }
                compact *= length;
            }
        }
        let address = (self.data.addr() as u64).checked_add(self.byte_offset);
        match address {
            Some(address) => Ok((address, len, data_type)),
            None => Err(refused(String::from(
                "its offset lies outside of the address space",
            ))),
        }
    }
}

fn refused(reason: String) -> Error {
    config::invalid("tensor", reason)
}

#[cfg(test)]
mod tests {
    use cudarc::driver::CudaContext;

    use super::*;

    const F32: ElementType = ElementType {
        code: 2,
        bits: 32,
        lanes: 1,
    };

    fn stream() -> Arc<CudaStream> {
        nccl_emulator::install().unwrap();
        CudaContext::new(0).unwrap().new_stream().unwrap()
    }

    /// A tensor with these shape and strides at an address.
    fn tensor(address: u64, shape: &mut [i64], strides: Option<&mut [i64]>) -> Tensor {
        Tensor {
            data: std::ptr::with_exposed_provenance_mut(address as usize),
            device: Device { kind: CUDA, id: 0 },
            dimensions: shape.len() as i32,
            element: F32,
            shape: shape.as_mut_ptr(),
            strides: strides.map_or(std::ptr::null_mut(), <[i64]>::as_mut_ptr),
            byte_offset: 0,
        }
    }

    fn refusal(tensor: Tensor) -> String {
        // SAFETY: shapes and strides are those of the test; nothing is read at the address.
        let refused = unsafe { tensor.to_read(&stream()).map(|x| x.len()) };
        refused.unwrap_err().to_string()
    }

    #[test]
    fn compact_tensors_are_taken_whatever_their_shape() {
        let stream = stream();
        for (shape, strides, len) in [
            (&mut [2i64, 3][..], None, 6),
            (&mut [2, 3][..], Some(&mut [3i64, 1][..]), 6),
            (&mut [2, 1, 3][..], Some(&mut [3, 77, 1][..]), 6),
            (&mut [][..], None, 1),
            (&mut [0, 5][..], Some(&mut [1, 9][..]), 0),
        ] {
            let mut tensor = tensor(0x1000, shape, strides);
            tensor.byte_offset = 16;
            // SAFETY: as in `refusal`.
            let x = unsafe { tensor.to_read(&stream) }.unwrap();
            assert_eq!((x.len(), x.data_type()), (len, DataType::Float32));
        }
    }

    #[test]
    fn what_nccl_cannot_take_is_refused_with_the_reason() {
        let shape = &mut [2i64, 3][..];
        assert!(refusal(tensor(0x1000, shape, Some(&mut [1, 2]))).contains("copy it first"));
        assert!(refusal(tensor(0x1000, &mut [2, -1], None)).contains("[2, -1]"));
        assert!(refusal(tensor(0x1000, &mut [i64::MAX, 8], None)).contains("shape"));
        assert!(refusal(tensor(0x1002, shape, None)).contains("multiple"));
        let good = tensor(0x1000, shape, None);
        let elsewhere = Device { kind: CUDA, id: 1 };
        let host = Device { kind: 1, id: 0 };
        for device in [elsewhere, host] {
            assert!(refusal(Tensor { device, ..good }).contains("device"));
        }
        let complex = ElementType {
            code: 5,
            bits: 64,
            lanes: 1,
        };
        let vector = ElementType { lanes: 4, ..F32 };
        for element in [complex, vector] {
            assert!(refusal(Tensor { element, ..good }).contains("no elements"));
        }
        let far = Tensor {
            byte_offset: u64::MAX,
            ..good
        };
        assert!(refusal(far).contains("address space"));
        let negative = Tensor {
            dimensions: -1,
            ..good
        };
        assert!(refusal(negative).contains("-1 dimensions"));
    }

    #[test]
    fn every_type_of_nccl_has_a_type_of_dlpack() {
        let all = (0..=16u8).flat_map(|code| [8u8, 16, 32, 64].map(|bits| (code, bits)));
        let mapped: Vec<_> = all
            .filter_map(|(code, bits)| {
                let element = ElementType {
                    code,
                    bits,
                    lanes: 1,
                };
                let data_type = element.data_type()?;
                assert_eq!(data_type.size_in_bytes(), Some(usize::from(bits) / 8));
                Some(data_type)
            })
            .collect();
        for data_type in DataType::ALL {
            assert!(mapped.contains(data_type), "{data_type}");
        }
    }
}

//! Device memory as operations accept it: typed, erased and raw.
//!
//! An operation accepts `&CudaSlice<T>` or `CudaView<T>` to read, `&mut CudaSlice<T>` or
//! `CudaViewMut<T>` to write, and [`Erased`]/[`ErasedMut`] where the element type is known only at run
//! time. The traits are sealed: cudarc's own `DevicePtr` is a safe trait, so any implementation could return an
//! invalid address through it. Memory that is not cudarc's enters through `unsafe fn from_raw`.
//!
//! Invariant: an erased buffer borrows its memory for `'a`; its stream is the stream on which
//! the memory is freed, because stream order is what keeps a free behind an operation.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop,
};

use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use nccl_base::data_type::DataType;

mod sealed {
    pub trait Sealed {}
}

/// The element type of a buffer as known at compile time: a [`NcclType`], or [`AtRunTime`] for an
/// [`Erased`] buffer.
///
/// All buffers of one operation must have the same element type, so an `f32` buffer and an `i32` buffer do not
/// compile together.
///
/// ```
/// fn elements<E: nccl::Element>() {}
/// elements::<f32>();
/// elements::<nccl::AtRunTime>();
/// ```
pub trait Element: sealed::Sealed {}

impl<T: NcclType> sealed::Sealed for T {}
impl<T: NcclType> Element for T {}

/// Stands for an element type that is known only at run time; see [`Erased`].
///
/// ```
/// # fn buffers<'a>(x: nccl::Erased<'a>) {
/// fn is_erased<'a>(_: impl nccl::SendBuffer<'a, Element = nccl::AtRunTime>) {}
/// is_erased(x);
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AtRunTime(());

impl sealed::Sealed for AtRunTime {}
impl Element for AtRunTime {}

/// Memory that an operation reads.
///
/// ```
/// use cudarc::driver::CudaSlice;
/// use nccl::SendBuffer;
///
/// fn count<'a>(buffer: impl SendBuffer<'a>) -> usize {
///     buffer.erase().len()
/// }
/// # fn example(x: &CudaSlice<f32>) {
/// assert_eq!(count(x), count(x.slice(..)));
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory that can be sent",
    label = "not a buffer of a device",
    note = "send a `&CudaSlice<T>`, a `CudaView<T>`, a `&nccl::Buffer<T>` or a `&nccl::Registered`; `stream.clone_htod(&values)` copies memory of the host to the device",
    note = "`T` is a `nccl::NcclType`; where the type is known at run time, send an `nccl::Erased`"
)]
pub trait SendBuffer<'a>: sealed_buffer::Lend<'a> {
    /// The element type as known at compile time.
    type Element: Element;

    /// Converts to an erased buffer, whose element type is known only at run time.
    fn erase(self) -> Erased<'a>;
}

/// Memory that an operation writes.
///
/// ```
/// use cudarc::driver::CudaSlice;
/// use nccl::{DataType, RecvBuffer};
///
/// # fn example(y: &mut CudaSlice<f32>) {
/// let erased = y.erase_mut();
/// assert_eq!(erased.data_type(), DataType::Float32);
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory that can be received into",
    label = "not a buffer of a device that can be written",
    note = "receive into a `&mut CudaSlice<T>`, a `CudaViewMut<T>`, a `&mut nccl::Buffer<T>` or a `&mut nccl::Registered`: borrowed by `&mut`, not by `&`",
    note = "`T` is a `nccl::NcclType`; where the type is known at run time, receive into an `nccl::ErasedMut`"
)]
pub trait RecvBuffer<'a>: sealed_buffer::Lend<'a> {
    /// The element type as known at compile time.
    type Element: Element;

    /// Converts to an erased buffer, whose element type is known only at run time.
    fn erase_mut(self) -> ErasedMut<'a>;
}

pub(crate) mod sealed_buffer {
    use std::sync::Arc;

    use cudarc::driver::sys::CUdeviceptr;
    use cudarc::driver::{CudaStream, SyncOnDrop};

    use nccl_base::data_type::DataType;

    /// What an operation needs from a buffer. Each kind of buffer implements this directly instead of being
    /// erased first, because a message has only a few nanoseconds for all of it.
    pub trait Lend<'a>: Sized {
        /// Returns the number of elements.
        fn count(&self) -> usize;

        /// Returns the element type; a constant where the type is known at compile time.
        fn element(&self) -> DataType;

        /// Returns the stream on which the memory is freed.
        fn owner_stream(&self) -> &Arc<CudaStream>;

        /// Returns the address, and cudarc's guard, which has to be dropped once the operation is on `on`.
        fn lease(self, on: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>);
    }
}

/// Device memory to read, whose element type is known at run time.
///
/// ```
/// use cudarc::driver::CudaContext;
/// use nccl::{DataType, Erased};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// nccl_emulator::install_unless_gpu()?;
/// let stream = CudaContext::new(0)?.new_stream()?;
/// let bytes = stream.alloc_zeros::<u8>(64)?;
/// let halves = Erased::from_bytes(bytes.as_view(), DataType::Float16)?;
/// assert_eq!(halves.len(), 32);
/// assert!(Erased::from_bytes(bytes.slice(..63), DataType::Float16).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Erased<'a> {
    memory: Memory<'a>,
    data_type: DataType,
    len: usize,
}

/// Device memory to write, whose element type is known at run time.
///
/// ```
/// use cudarc::driver::CudaContext;
/// use nccl::{DataType, ErasedMut};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// nccl_emulator::install_unless_gpu()?;
/// let stream = CudaContext::new(0)?.new_stream()?;
/// let mut bytes = stream.alloc_zeros::<u8>(64)?;
/// let doubles = ErasedMut::from_bytes(bytes.as_view_mut(), DataType::Float64)?;
/// assert_eq!(doubles.len(), 8);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ErasedMut<'a> {
    memory: Memory<'a>,
    data_type: DataType,
    len: usize,
}

#[derive(Debug)]
enum Memory<'a> {
    Read(CudaView<'a, u8>),
    Write(CudaViewMut<'a, u8>),
    Raw {
        ptr: CUdeviceptr,
        stream: &'a Arc<CudaStream>,
    },
}

impl<'a> Memory<'a> {
    #[inline]
    fn lease(self, on: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        match self {
            Self::Read(view) => view.view_ptr(on),
            Self::Write(view) => view.view_ptr_mut(on),
            Self::Raw { ptr, .. } => (ptr, SyncOnDrop::Record(None)),
        }
    }

    fn address(&self) -> CUdeviceptr {
        match self {
            Self::Read(view) => address(view),
            Self::Write(view) => address(&view.as_view()),
            Self::Raw { ptr, .. } => *ptr,
        }
    }

    fn stream(&self) -> &Arc<CudaStream> {
        match self {
            Self::Read(view) => view.stream(),
            Self::Write(view) => view.stream(),
            Self::Raw { stream, .. } => stream,
        }
    }
}

fn elements(bytes: usize, data_type: DataType) -> Result<usize> {
    let size = data_type
        .size_in_bytes()
        .ok_or_else(|| Error::new(ErrorKind::UnknownDataType(data_type)))?;
    if !bytes.is_multiple_of(size) {
        return Err(Error::new(ErrorKind::PartialElement { bytes, data_type }));
    }
    Ok(bytes / size)
}

/// Checks the alignment: NCCL's kernels access whole elements, and the device refuses a misaligned access.
fn aligned(ptr: CUdeviceptr, data_type: DataType) -> Result<()> {
    let size = data_type.size_in_bytes().unwrap_or(1) as CUdeviceptr;
    if ptr.is_multiple_of(size) {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::Misaligned {
            address: ptr,
            data_type,
        }))
    }
}

/// Returns the address of a view. cudarc returns it only together with a guard that marks a use of the
/// memory when dropped; there is no use here, so the guard is forgotten.
fn address(view: &CudaView<'_, u8>) -> CUdeviceptr {
    let (ptr, guard) = view.device_ptr(view.stream());
    std::mem::forget(guard);
    ptr
}

macro_rules! shared_methods {
    ($type:ident, $from:ident, $view:ident, $slice:ident) => {
        impl<'a> $type<'a> {
            /// Interprets bytes as elements of `data_type`.
            ///
            /// # Errors
            /// [`ErrorKind::PartialElement`] when the bytes are not a whole number of elements,
            /// [`ErrorKind::Misaligned`] when their address is not a multiple of the element size,
            /// [`ErrorKind::UnknownDataType`] when the element size is unknown.
            ///
            /// ```
            /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
            /// # nccl_emulator::install_unless_gpu()?;
            /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
            #[doc = concat!("use nccl::{DataType, ", stringify!($type), "};")]
            ///
            /// let mut bytes = stream.alloc_zeros::<u8>(64)?;
            #[doc = concat!(
                "let floats = ", stringify!($type), "::from_bytes(bytes.", stringify!($slice),
                "(4..12), DataType::Float32)?;"
            )]
            /// assert_eq!(floats.len(), 2);
            #[doc = concat!(
                "let error = ", stringify!($type), "::from_bytes(bytes.", stringify!($slice),
                "(1..9), DataType::Float32).unwrap_err();"
            )]
            /// assert!(matches!(error.kind(), nccl::ErrorKind::Misaligned { .. }));
            /// # Ok(())
            /// # }
            /// ```
            pub fn from_bytes(bytes: $view<'a, u8>, data_type: DataType) -> Result<Self> {
                let len = elements(bytes.len(), data_type)?;
                if data_type.size_in_bytes() != Some(1) {
                    aligned(address(&bytes.slice(..)), data_type)?;
                }
                Ok(Self {
                    memory: Memory::$from(bytes),
                    data_type,
                    len,
                })
            }

            /// Wraps memory that is not cudarc's: `len` elements of `data_type` at `ptr`.
            ///
            /// `stream` is the stream on which the memory is freed or reused; work of an operation on another
            /// stream is ordered before all work put on `stream` afterwards.
            ///
            /// # Safety
            /// `ptr` is an address on the device of `stream`, valid for `len` elements and for the accesses of
            /// the operation (reads, or writes without any other access) until everything
            /// that the operation put on its stream has finished. Freeing or reusing the memory on
            /// `stream` after the operation was issued meets this; freeing it from the host before
            /// the operation has finished does not.
            ///
            /// # Errors
            /// [`ErrorKind::UnknownDataType`] when the element size is unknown,
            /// [`ErrorKind::Misaligned`] when `ptr` is not a multiple of it.
            ///
            /// ```
            /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
            /// # nccl_emulator::install_unless_gpu()?;
            /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
            #[doc = concat!("use nccl::{DataType, ", stringify!($type), "};")]
            ///
            /// let memory = stream.alloc_zeros::<f64>(8)?;
            /// let ptr = memory.leak(); // as if another library had allocated it on `stream`
            /// // SAFETY: eight elements, which nothing else uses, and nobody frees.
            #[doc = concat!(
                "let raw = unsafe { ", stringify!($type),
                "::from_raw(ptr, 8, DataType::Float64, &stream)? };"
            )]
            /// assert_eq!(raw.len(), 8);
            /// # Ok(())
            /// # }
            /// ```
            pub unsafe fn from_raw(
                ptr: CUdeviceptr,
                len: usize,
                data_type: DataType,
                stream: &'a Arc<CudaStream>,
            ) -> Result<Self> {
                elements(0, data_type)?;
                aligned(ptr, data_type)?;
                Ok(Self {
                    memory: Memory::Raw { ptr, stream },
                    data_type,
                    len,
                })
            }

            /// Returns the number of elements.
            ///
            /// ```
            #[doc = concat!("# fn example(buffer: &nccl::", stringify!($type), "<'_>) {")]
            /// let bytes = buffer.len() * buffer.data_type().size_in_bytes().unwrap_or(1);
            /// # }
            /// ```
            #[must_use]
            pub fn len(&self) -> usize {
                self.len
            }

            /// Whether there are no elements.
            ///
            /// ```
            #[doc = concat!("# fn example(buffer: &nccl::", stringify!($type), "<'_>) {")]
            /// assert_eq!(buffer.is_empty(), buffer.len() == 0);
            /// # }
            /// ```
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// Returns the element type.
            ///
            /// ```
            #[doc = concat!("# fn example(buffer: &nccl::", stringify!($type), "<'_>) {")]
            /// if buffer.data_type() == nccl::DataType::BFloat16 { println!("bf16") }
            /// # }
            /// ```
            #[must_use]
            pub fn data_type(&self) -> DataType {
                self.data_type
            }

            /// Returns the stream on which the memory was allocated and will be freed.
            ///
            /// ```
            #[doc = concat!("# fn example(buffer: &nccl::", stringify!($type), "<'_>) {")]
            /// buffer.stream().synchronize().unwrap();
            /// # }
            /// ```
            #[must_use]
            pub fn stream(&self) -> &Arc<CudaStream> {
                self.memory.stream()
            }

            /// Returns the address range of the memory.
            pub(crate) fn range(&self) -> Range<CUdeviceptr> {
                let bytes = self.len * self.data_type.size_in_bytes().unwrap_or_default();
                let start = self.memory.address();
                start..start + bytes as CUdeviceptr
            }
        }
    };
}

shared_methods!(Erased, Read, CudaView, slice);
shared_methods!(ErasedMut, Write, CudaViewMut, slice_mut);

#[inline]
fn erase_view<T: NcclType>(view: CudaView<'_, T>) -> Erased<'_> {
    let len = view.len();
    // SAFETY: the bytes of any `NcclType` are valid `u8`s.
    let bytes = unsafe { view.transmute::<u8>(len * size_of::<T>()) };
    match bytes {
        Some(bytes) => Erased {
            memory: Memory::Read(bytes),
            data_type: T::DATA_TYPE,
            len,
        },
        // The view has exactly that many bytes.
        None => unreachable!("a view is as long as itself"),
    }
}

#[inline]
fn erase_view_mut<'a, T: NcclType>(mut view: CudaViewMut<'a, T>) -> ErasedMut<'a> {
    let len = view.len();
    // SAFETY: the bytes of any `NcclType` are valid `u8`s, and any bytes are valid values of it.
    let bytes = unsafe { view.transmute_mut::<u8>(len * size_of::<T>()) };
    let Some(bytes) = bytes else {
        // The view has exactly that many bytes.
        unreachable!("a view is as long as itself")
    };
    // SAFETY: only the lifetime changes. `view` borrows the memory exclusively for `'a`; this function
    // owns `view` and gives it up, so that `bytes` becomes the only access.
    let bytes = unsafe { std::mem::transmute::<CudaViewMut<'_, u8>, CudaViewMut<'a, u8>>(bytes) };
    ErasedMut {
        memory: Memory::Write(bytes),
        data_type: T::DATA_TYPE,
        len,
    }
}

/// Implements `Lend` for one kind of buffer.
macro_rules! lend {
    (($($generic:tt)*) $buffer:ty, $element:expr, |$this:ident, $on:ident| $lease:expr) => {
        impl<'a $($generic)*> $crate::buffer::sealed_buffer::Lend<'a> for $buffer {
            #[inline]
            fn count(&self) -> usize {
                self.len()
            }

            #[inline]
            fn element(&self) -> $crate::dtype::DataType {
                let element: fn(&Self) -> $crate::dtype::DataType = $element;
                element(self)
            }

            #[inline]
            fn owner_stream(&self) -> &std::sync::Arc<cudarc::driver::CudaStream> {
                self.stream()
            }

            #[inline]
            fn lease(
                self,
                $on: &'a cudarc::driver::CudaStream,
            ) -> (cudarc::driver::sys::CUdeviceptr, cudarc::driver::SyncOnDrop<'a>) {
                let $this = self;
                $lease
            }
        }
    };
}

pub(crate) use lend;

lend!(() Erased<'a>, |erased| erased.data_type, |erased, on| erased.memory.lease(on));
lend!(() ErasedMut<'a>, |erased| erased.data_type, |erased, on| erased.memory.lease(on));
lend!((, T: NcclType) &'a CudaSlice<T>, |_| T::DATA_TYPE, |slice, on| slice.device_ptr(on));
lend!((, T: NcclType) CudaView<'a, T>, |_| T::DATA_TYPE, |view, on| view.view_ptr(on));
lend!((, T: NcclType) &CudaView<'a, T>, |_| T::DATA_TYPE, |view, on| view.slice(..).view_ptr(on));
lend!((, T: NcclType) &'a CudaViewMut<'_, T>, |_| T::DATA_TYPE, |view, on| view.device_ptr(on));
lend!((, T: NcclType) &'a mut CudaSlice<T>, |_| T::DATA_TYPE, |slice, on| slice.device_ptr_mut(on));
lend!((, T: NcclType) CudaViewMut<'a, T>, |_| T::DATA_TYPE, |view, on| view.view_ptr_mut(on));
lend!((, T: NcclType) &'a mut CudaViewMut<'_, T>, |_| T::DATA_TYPE, |view, on| view.device_ptr_mut(on));

impl<'a> SendBuffer<'a> for Erased<'a> {
    type Element = AtRunTime;
    #[inline]
    fn erase(self) -> Erased<'a> {
        self
    }
}

impl<'a> RecvBuffer<'a> for ErasedMut<'a> {
    type Element = AtRunTime;
    #[inline]
    fn erase_mut(self) -> ErasedMut<'a> {
        self
    }
}

impl<'a, T: NcclType> SendBuffer<'a> for &'a CudaSlice<T> {
    type Element = T;
    #[inline]
    fn erase(self) -> Erased<'a> {
        erase_view(self.as_view())
    }
}

impl<'a, T: NcclType> SendBuffer<'a> for CudaView<'a, T> {
    type Element = T;
    #[inline]
    fn erase(self) -> Erased<'a> {
        erase_view(self)
    }
}

impl<'a, T: NcclType> SendBuffer<'a> for &CudaView<'a, T> {
    type Element = T;
    #[inline]
    fn erase(self) -> Erased<'a> {
        erase_view(self.slice(..))
    }
}

impl<'a, T: NcclType> RecvBuffer<'a> for &'a mut CudaSlice<T> {
    type Element = T;
    #[inline]
    fn erase_mut(self) -> ErasedMut<'a> {
        erase_view_mut(self.as_view_mut())
    }
}

impl<'a, T: NcclType> RecvBuffer<'a> for CudaViewMut<'a, T> {
    type Element = T;
    #[inline]
    fn erase_mut(self) -> ErasedMut<'a> {
        erase_view_mut(self)
    }
}

impl<'a, T: NcclType> SendBuffer<'a> for &'a CudaViewMut<'_, T> {
    type Element = T;
    #[inline]
    fn erase(self) -> Erased<'a> {
        erase_view(self.as_view())
    }
}

impl<'a, T: NcclType> RecvBuffer<'a> for &'a mut CudaViewMut<'_, T> {
    type Element = T;
    #[inline]
    fn erase_mut(self) -> ErasedMut<'a> {
        erase_view_mut(self.slice_mut(..))
    }
}

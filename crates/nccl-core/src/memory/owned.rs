//! Memory that can be moved into a registration or a captured plan.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut};

use super::Buffer;
use crate::buffer::{ErasedMut, RecvBuffer};
use crate::dtype::NcclType;
use crate::error::Result;

#[doc(hidden)]
pub mod sealed {
    use super::{ErasedMut, Result};

    /// The function that is called for each buffer.
    pub type Each<'f, 'a> = &'f mut dyn FnMut(ErasedMut<'a>) -> Result<()>;

    /// # Safety
    /// All memory of the value is visited, and is not freed or given out as anything but views as long as the value exists.
    pub unsafe trait Visit {
        /// Calls `each` for each buffer, until one fails.
        fn visit<'a>(&'a mut self, each: Each<'_, 'a>) -> Result<()>;
    }
}

/// Device memory that owns itself: [`CudaSlice`], [`Buffer`], or one of them [`Registered`](crate::Registered).
///
/// Only owned memory can be registered or put into a plan: with a borrowing value, a program could `forget` the value
/// and free the memory while NCCL still uses it.
///
/// ```
/// fn bytes<B: nccl::OwnedBuffer>(buffer: &B) -> usize {
///     buffer.view().len() * size_of::<B::Element>()
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not own device memory",
    label = "not a buffer that owns its memory",
    note = "give the buffer itself, a `CudaSlice<T>` or an `nccl::Buffer<T>`, not a view or a reference: it must stay allocated, and is given back by `into_inner` or `into_buffers`"
)]
pub trait OwnedBuffer: sealed::Visit + Send + Sized + 'static {
    /// The type of the elements.
    type Element: NcclType;

    /// Returns a view of all elements, to read.
    fn view(&self) -> CudaView<'_, Self::Element>;

    /// Returns a view of all elements, to write.
    fn view_mut(&mut self) -> CudaViewMut<'_, Self::Element>;

    /// Returns the stream to which the memory belongs.
    fn stream(&self) -> &Arc<CudaStream>;
}

// SAFETY: a slice is its memory, and a plan lends it as views only.
unsafe impl<T: NcclType> sealed::Visit for CudaSlice<T> {
    fn visit<'a>(&'a mut self, each: sealed::Each<'_, 'a>) -> Result<()> {
        each(self.erase_mut())
    }
}

impl<T: NcclType> OwnedBuffer for CudaSlice<T> {
    type Element = T;

    fn view(&self) -> CudaView<'_, T> {
        self.as_view()
    }

    fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.as_view_mut()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        CudaSlice::stream(self)
    }
}

// SAFETY: a buffer lends its memory as views only.
unsafe impl<T: NcclType> sealed::Visit for Buffer<T> {
    fn visit<'a>(&'a mut self, each: sealed::Each<'_, 'a>) -> Result<()> {
        each(self.erase_mut())
    }
}

impl<T: NcclType> OwnedBuffer for Buffer<T> {
    type Element = T;

    fn view(&self) -> CudaView<'_, T> {
        Buffer::view(self)
    }

    fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        Buffer::view_mut(self)
    }

    fn stream(&self) -> &Arc<CudaStream> {
        Buffer::stream(self)
    }
}

/// The buffers of a [`CapturedPlan`](crate::CapturedPlan): a buffer, a `Routing` of an `ExpertParallel`, a `Vec` of
/// buffers, or a tuple of up to eight of these.
///
/// ```
/// use nccl::cudarc::driver::CudaSlice;
///
/// fn fits<B: nccl::plan::PlanBuffers>() {}
/// fits::<CudaSlice<f32>>();
/// fits::<(nccl::Buffer<u8>, Vec<CudaSlice<f32>>)>();
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the buffers of a plan",
    label = "not buffers that own their memory",
    note = "a plan owns its buffers: give it one `CudaSlice<T>`, `nccl::Buffer<T>` or `nccl::Registered`, a tuple of up to eight, or a `Vec` of them; `into_buffers` gives them back"
)]
pub trait PlanBuffers: sealed::Visit + Send + 'static {
    /// Views of the buffers, to read, in the same arrangement.
    type Views<'a>
    where
        Self: 'a;

    /// Views of the buffers, to write, in the same arrangement.
    type ViewsMut<'a>
    where
        Self: 'a;

    /// Returns views to read; see [`Views`](Self::Views).
    fn views(&self) -> Self::Views<'_>;

    /// Returns views to write; see [`ViewsMut`](Self::ViewsMut).
    fn views_mut(&mut self) -> Self::ViewsMut<'_>;
}

impl<B: OwnedBuffer> PlanBuffers for B {
    type Views<'a> = CudaView<'a, B::Element>;
    type ViewsMut<'a> = CudaViewMut<'a, B::Element>;

    fn views(&self) -> Self::Views<'_> {
        self.view()
    }

    fn views_mut(&mut self) -> Self::ViewsMut<'_> {
        self.view_mut()
    }
}

// SAFETY: as its elements.
unsafe impl<B: PlanBuffers> sealed::Visit for Vec<B> {
    fn visit<'a>(&'a mut self, each: sealed::Each<'_, 'a>) -> Result<()> {
        self.iter_mut().try_for_each(|buffer| buffer.visit(each))
    }
}

impl<B: PlanBuffers> PlanBuffers for Vec<B> {
    type Views<'a> = Vec<B::Views<'a>>;
    type ViewsMut<'a> = Vec<B::ViewsMut<'a>>;

    fn views(&self) -> Self::Views<'_> {
        self.iter().map(B::views).collect()
    }

    fn views_mut(&mut self) -> Self::ViewsMut<'_> {
        self.iter_mut().map(B::views_mut).collect()
    }
}

macro_rules! tuples {
    ($(($($name:ident $at:tt),*))*) => {
        $(
            // SAFETY: as its elements.
            unsafe impl<$($name: PlanBuffers),*> sealed::Visit for ($($name,)*) {
                fn visit<'a>(&'a mut self, each: sealed::Each<'_, 'a>) -> Result<()> {
                    $(self.$at.visit(each)?;)*
                    Ok(())
                }
            }

            impl<$($name: PlanBuffers),*> PlanBuffers for ($($name,)*) {
                type Views<'a> = ($($name::Views<'a>,)*);
                type ViewsMut<'a> = ($($name::ViewsMut<'a>,)*);

                fn views(&self) -> Self::Views<'_> {
                    ($(self.$at.views(),)*)
                }

                fn views_mut(&mut self) -> Self::ViewsMut<'_> {
                    ($(self.$at.views_mut(),)*)
                }
            }
        )*
    };
}

tuples! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
}

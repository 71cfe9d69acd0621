//! The buffers of a measurement: free, or owned by a graph.

use cudarc::driver::{CudaView, CudaViewMut};
use nccl::OwnedBuffer;
use nccl::plan::CapturedPlan;

use crate::failure::{Exit, Failure};

/// Two buffers. Out of place, the first is sent; in place, the second is both source and destination.
pub(super) enum Buffers<B: OwnedBuffer> {
    Free(B, B),
    Captured(CapturedPlan<(B, B)>),
    /// Taken while changing from one state to the other; permanently if the change failed.
    Away,
}

impl<B: OwnedBuffer<Element = u8>> Buffers<B> {
    pub(super) fn take(&mut self) -> Result<(B, B), Failure> {
        match std::mem::replace(self, Self::Away) {
            Self::Free(first, second) => Ok((first, second)),
            Self::Captured(plan) => Ok(plan.into_buffers()?),
            Self::Away => Err(away()),
        }
    }

    /// Both buffers, for writing.
    pub(super) fn both(&mut self) -> Result<[CudaViewMut<'_, u8>; 2], Failure> {
        match self {
            Self::Free(first, second) => Ok([first.view_mut(), second.view_mut()]),
            _ => Err(away()),
        }
    }

    /// The first to read, the second to write; the other way round when `swapped`.
    pub(super) fn apart(
        &mut self,
        swapped: bool,
    ) -> Result<(CudaView<'_, u8>, CudaViewMut<'_, u8>), Failure> {
        match self {
            Self::Free(first, second) => Ok(match swapped {
                true => (second.view(), first.view_mut()),
                false => (first.view(), second.view_mut()),
            }),
            _ => Err(away()),
        }
    }
}

fn away() -> Failure {
    Failure::new(Exit::Failed, "the buffers of the measurement are lost")
}

//! Operations of several steps: groups one after another, with copies on the device in between.
//!
//! All steps are one operation: one acquisition of the communicator's lock, one number, one deadline, one request. A step
//! begins when the group before it is on the stream, so that the stream runs the steps in order, and the host does not wait
//! for the device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{self, CUdeviceptr};

use crate::communicator::Inner;
use crate::communicator::handle::RawComm;
use crate::error::{Error, Result};
use crate::queued_op::{self, Batch, CallContext};
use crate::recorder::Writer;

/// One step: first the copies, then the group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step<'f> {
    pub(crate) copies: &'f [DeviceCopy],
    pub(crate) batch: Batch<'f>,
}

/// Rows of bytes that are copied on the device, between buffers of one operation. The source and the
/// destination do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceCopy {
    pub(crate) to: CUdeviceptr,
    pub(crate) from: CUdeviceptr,
    /// The length of a row in bytes.
    pub(crate) width: usize,
    pub(crate) rows: usize,
    /// The distance between the beginnings of two rows, in bytes.
    pub(crate) to_pitch: usize,
    pub(crate) from_pitch: usize,
}

impl DeviceCopy {
    /// Puts the copy on the stream, whose context is bound to this thread.
    pub(crate) fn enqueue(&self, stream: &CudaStream) -> Result<()> {
        let one_row =
            self.rows == 1 || (self.to_pitch == self.width && self.from_pitch == self.width);
        if one_row {
            let bytes = self.width * self.rows;
            if bytes == 0 {
                return Ok(());
            }
            // SAFETY: both ends lie in these buffers, which were checked to be that long and are not freed before
            // the work on the stream is done; the stream is alive.
            let code =
                unsafe { sys::cuMemcpyDtoDAsync_v2(self.to, self.from, bytes, stream.cu_stream()) };
            return code
                .result()
                .map_err(Error::cuda("copying on the device (cuMemcpyDtoDAsync)"));
        }
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let description = sys::CUDA_MEMCPY2D {
            srcMemoryType: device,
            srcDevice: self.from,
            srcPitch: self.from_pitch,
            dstMemoryType: device,
            dstDevice: self.to,
            dstPitch: self.to_pitch,
            WidthInBytes: self.width,
            Height: self.rows,
            srcXInBytes: 0,
            srcY: 0,
            srcHost: std::ptr::null(),
            srcArray: std::ptr::null_mut(),
            dstXInBytes: 0,
            dstY: 0,
            dstHost: std::ptr::null_mut(),
            dstArray: std::ptr::null_mut(),
        };
        // SAFETY: as above, for all rows; the description is only read during the call.
        let code = unsafe { sys::cuMemcpy2DAsync_v2(&raw const description, stream.cu_stream()) };
        code.result()
            .map_err(Error::cuda("copying rows on the device (cuMemcpy2DAsync)"))
    }
}

/// Puts one step on the stream `on`, and returns when it is there.
#[cold]
pub(crate) fn launch_step(
    inner: &Inner,
    raw: RawComm,
    (started, timeout): (Instant, Duration),
    step: Step<'_>,
    on: &Arc<CudaStream>,
    calls: &CallContext<'_>,
    writer: &mut Writer,
) -> Result<()> {
    step.copies.iter().try_for_each(|copy| copy.enqueue(on))?;
    if step.batch.queued.is_empty() {
        return Ok(());
    }
    let remaining = timeout.saturating_sub(started.elapsed());
    inner.launch(raw, started, (timeout, remaining), || {
        queued_op::call(step.batch, calls, writer)
    })
}

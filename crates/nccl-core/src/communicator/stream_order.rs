//! Orders streams, so that memory stays allocated while an operation uses it.
//!
//! An operation runs on a stream S; each of its buffers is freed on the stream B it was allocated on.
//! - B is S: stream order suffices.
//! - B is another stream: S waits for the work on B before the operation, and B waits for the operation
//!   before any later work. cudarc's own events do not suffice for this: each buffer has one
//!   event for its readers, so a second reader on a third stream overwrites the first, and
//!   cudarc waits for none once the last stream of the context was dropped.
//! - Refused: the per-thread default stream, a capturing stream, a context that is not the primary one,
//!   and another `CudaContext` object for the same device, whose events are tracked separately.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};

use crate::cuda_driver;
use crate::error::{Error, ErrorKind, Result, StreamRefusal};

/// The name of an operation's stream in errors.
pub(crate) const OPERATION: &str = "the operation's stream";
/// The name of a buffer's stream in errors.
const BUFFERS: &str = "the buffer's stream";

const PER_THREAD: sys::CUstream = 0x2 as sys::CUstream;
const LEGACY: sys::CUstream = 0x1 as sys::CUstream;

/// Whether two handles refer to one stream of one context.
#[inline]
pub(crate) fn is_same(a: &Arc<CudaStream>, b: &Arc<CudaStream>) -> bool {
    Arc::ptr_eq(a, b) || (a.cu_stream() == b.cu_stream() && a.context() == b.context())
}

/// Refuses a stream that cannot carry, or be ordered with, an operation of `context`.
#[inline]
pub(crate) fn check_operation_stream(
    what: &'static str,
    stream: &CudaStream,
    context: &Arc<CudaContext>,
) -> Result<()> {
    let refuse = |reason| Err(Error::new(ErrorKind::Stream { what, reason }));
    if stream.cu_stream() == PER_THREAD {
        return refuse(StreamRefusal::PerThread);
    }
    if !Arc::ptr_eq(stream.context(), context) {
        return refuse(if stream.context().is_primary() {
            StreamRefusal::ForeignContext
        } else {
            StreamRefusal::NotPrimary
        });
    }
    Ok(())
}

/// Refuses a stream to which a buffer of `context` cannot belong.
pub(crate) fn check_buffer_context(stream: &CudaStream, context: &Arc<CudaContext>) -> Result<()> {
    check_operation_stream(BUFFERS, stream, context)
}

/// Refuses a stream on which NCCL cannot allocate.
pub(crate) fn check_allocation_stream(stream: &CudaStream) -> Result<()> {
    let context = stream.context();
    if !context.is_primary() {
        return Err(Error::new(ErrorKind::Stream {
            what: BUFFERS,
            reason: StreamRefusal::NotPrimary,
        }));
    }
    check_buffer_context(stream, context)?;
    check_not_capturing(BUFFERS, stream)
}

/// Refuses a stream that is capturing a graph. Binds its context to this thread.
#[inline]
pub(crate) fn check_not_capturing(what: &'static str, stream: &CudaStream) -> Result<()> {
    let status = cuda_driver::bind(stream.context())
        .and_then(|()| cuda_driver::capture_status(stream))
        .map_err(Error::cuda(
            "asking whether a stream is capturing (cuStreamIsCapturing)",
        ))?;
    if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::Stream {
            what,
            reason: StreamRefusal::Capturing,
        }))
    }
}

/// Checks the stream of one buffer; adds it to `foreign` if it has to be ordered with `on`.
#[inline]
pub(crate) fn check_buffer_stream(
    stream: &Arc<CudaStream>,
    on: &Arc<CudaStream>,
    foreign: &mut Vec<Arc<CudaStream>>,
) -> Result<()> {
    if Arc::ptr_eq(stream, on) {
        return Ok(());
    }
    check_operation_stream(BUFFERS, stream, on.context())?;
    if is_same(stream, on) || foreign.iter().any(|seen| is_same(seen, stream)) {
        return Ok(());
    }
    check_not_capturing(BUFFERS, stream)?;
    foreign.push(Arc::clone(stream));
    Ok(())
}

/// Makes the operation's stream wait for the streams of its buffers. Refuses the operation if one of them has begun to
/// capture.
#[inline]
pub(crate) fn order_before(
    on: &CudaStream,
    foreign: &[Arc<CudaStream>],
    ordering_event: &CudaEvent,
) -> Result<()> {
    // Also binds the context to this thread, on which everything below relies.
    check_not_capturing(OPERATION, on)?;
    if foreign.is_empty() {
        return Ok(());
    }
    for stream in foreign {
        // The program may have begun a capture since the buffer was recorded.
        check_not_capturing(BUFFERS, stream)?;
        cuda_driver::record(ordering_event, stream)
            .map_err(Error::cuda("recording an event on a buffer's stream"))?;
        cuda_driver::wait(on, ordering_event).map_err(Error::cuda(
            "making the operation wait for a buffer's stream",
        ))?;
    }
    // Another thread may have begun a capture: waiting for a capturing stream brings the waiting stream into the
    // capture.
    check_not_capturing(OPERATION, on)
}

/// The state of a capture that another thread has begun on a stream since the stream was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForeignCapture {
    /// The capture is void.
    Void,
    /// The capture has ended, and a graph may contain the operation.
    InGraph,
}

/// Returns the capture, if any, that another thread has begun on the stream since the stream was admitted, and invalidates
/// it: the operation may be in the capture, and its memory is only borrowed, so no replay may ever use it.
#[inline]
pub(crate) fn invalidate_foreign_capture(on: &CudaStream) -> Option<ForeignCapture> {
    // The handle of a default stream refers to the bound context, which in a group over several devices is that of the last
    // one.
    if on.cu_stream().addr() <= LEGACY.addr() {
        let _ = cuda_driver::bind(on.context());
    }
    match cuda_driver::capture_status(on) {
        Ok(sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE) | Err(_) => None,
        Ok(sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED) => {
            Some(ForeignCapture::Void)
        }
        Ok(sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE) => {
            Some(invalidate_capture(on))
        }
    }
}

#[cold]
fn invalidate_capture(on: &CudaStream) -> ForeignCapture {
    // SAFETY: the stream lives. CUDA invalidates a capture when one of its streams is queried.
    match unsafe { sys::cuStreamQuery(on.cu_stream()) } {
        // The stream is not capturing any more: the thread that began the capture has ended it.
        sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY => {
            ForeignCapture::InGraph
        }
        // The capture is void, or the context is lost with all of its graphs.
        _ => ForeignCapture::Void,
    }
}

/// Returns the error for an operation on whose stream another thread began a capture; `failed` is the error of its calls, if any.
#[cold]
pub(crate) fn capture_error(capture: ForeignCapture, failed: Option<Error>) -> Error {
    let kind = ErrorKind::Stream {
        what: OPERATION,
        reason: match capture {
            ForeignCapture::Void => StreamRefusal::CapturedMeanwhile,
            ForeignCapture::InGraph => StreamRefusal::InGraph,
        },
    };
    match failed {
        None => Error::new(kind),
        Some(error) => error.beside(kind),
    }
}

/// Makes the streams of the operation's buffers wait for the operation.
#[inline]
pub(crate) fn order_after(
    on: &CudaStream,
    foreign: &[Arc<CudaStream>],
    ordering_event: &CudaEvent,
) -> Result<()> {
    if foreign.is_empty() {
        return Ok(());
    }
    order_behind(on, foreign, ordering_event)
}

fn order_behind(
    on: &CudaStream,
    foreign: &[Arc<CudaStream>],
    ordering_event: &CudaEvent,
) -> Result<()> {
    cuda_driver::record(ordering_event, on)
        .map_err(Error::cuda("recording an event behind the operation"))?;
    // If one stream cannot wait, the others are still ordered.
    let mut ordered = Ok(());
    for stream in foreign {
        let waits = cuda_driver::wait(stream, ordering_event).map_err(|error| {
            // A capturing stream must not wait for work outside its capture.
            match cuda_driver::is_capturing(stream) {
                true => Error::new(ErrorKind::Stream {
                    what: BUFFERS,
                    reason: StreamRefusal::CapturedMeanwhile,
                }),
                false => Error::cuda("making a buffer's stream wait")(error),
            }
        });
        ordered = ordered.and(waits);
    }
    ordered
}

/// Whether `on` has unfinished work, or may have; for a capturing stream this is unknown. False after the device failed,
/// because no work runs then.
pub(crate) fn is_busy(on: &CudaStream) -> bool {
    let _ = cuda_driver::bind(on.context());
    matches!(
        cuda_driver::query(on),
        sys::CUresult::CUDA_ERROR_NOT_READY
            | sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            | sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            | sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    )
}

//! Which streams have to wait for which: the rules that keep memory alive under an operation.
//!
//! An operation runs on a stream S; each of its buffers is freed on the stream B it was allocated on.
//! - B is S: the order of the stream does everything.
//! - B is another stream: S waits for what is on B before the operation, and B waits for the operation
//!   before whatever is put on it next. cudarc's own events are not enough for this: each buffer has one
//!   event for its readers, so a second reader on a third stream makes the first one forgotten, and
//!   none is waited for once the last stream of the context was dropped.
//! - Refused: the per-thread default stream, a capturing stream, a context that is not the primary one,
//!   and another `CudaContext` object for the same device, whose events are tracked apart.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};

use crate::driver;
use crate::error::{Error, ErrorKind, Result, StreamRefusal};

/// What an error calls the stream of an operation.
pub(crate) const OPERATION: &str = "the operation's stream";
/// What it calls the stream of a buffer.
const BUFFERS: &str = "the buffer's stream";

const PER_THREAD: sys::CUstream = 0x2 as sys::CUstream;
const LEGACY: sys::CUstream = 0x1 as sys::CUstream;

/// Whether two handles stand for one stream of one context.
#[inline]
pub(crate) fn same(a: &Arc<CudaStream>, b: &Arc<CudaStream>) -> bool {
    Arc::ptr_eq(a, b) || (a.cu_stream() == b.cu_stream() && a.context() == b.context())
}

/// Refuses a stream that cannot carry, or be ordered with, an operation of `context`.
#[inline]
pub(crate) fn admit(
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
pub(crate) fn admit_buffer(stream: &CudaStream, context: &Arc<CudaContext>) -> Result<()> {
    admit(BUFFERS, stream, context)
}

/// Refuses a stream on which NCCL cannot allocate.
pub(crate) fn admit_owner(stream: &CudaStream) -> Result<()> {
    let context = stream.context();
    if !context.is_primary() {
        return Err(Error::new(ErrorKind::Stream {
            what: BUFFERS,
            reason: StreamRefusal::NotPrimary,
        }));
    }
    admit_buffer(stream, context)?;
    not_capturing(BUFFERS, stream)
}

/// Refuses a stream that is capturing a graph. Binds its context to this thread.
#[inline]
pub(crate) fn not_capturing(what: &'static str, stream: &CudaStream) -> Result<()> {
    let status = driver::bind(stream.context())
        .and_then(|()| driver::capture_status(stream))
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

/// Looks at the stream of one buffer; puts it into `foreign` if it has to be joined with `on`.
#[inline]
pub(crate) fn visit(
    stream: &Arc<CudaStream>,
    on: &Arc<CudaStream>,
    foreign: &mut Vec<Arc<CudaStream>>,
) -> Result<()> {
    if Arc::ptr_eq(stream, on) {
        return Ok(());
    }
    admit(BUFFERS, stream, on.context())?;
    if same(stream, on) || foreign.iter().any(|seen| same(seen, stream)) {
        return Ok(());
    }
    not_capturing(BUFFERS, stream)?;
    foreign.push(Arc::clone(stream));
    Ok(())
}

/// Before the operation: its stream waits for the streams of its buffers. Refuses it if one of them is capturing by now.
#[inline]
pub(crate) fn enter(on: &CudaStream, foreign: &[Arc<CudaStream>], join: &CudaEvent) -> Result<()> {
    // Binds the context to this thread, which all that follows relies on.
    not_capturing(OPERATION, on)?;
    if foreign.is_empty() {
        return Ok(());
    }
    for stream in foreign {
        // The program may have begun a capture since the buffer was recorded.
        not_capturing(BUFFERS, stream)?;
        driver::record(join, stream)
            .map_err(Error::cuda("recording an event on a buffer's stream"))?;
        driver::wait(on, join).map_err(Error::cuda(
            "making the operation wait for a buffer's stream",
        ))?;
    }
    // Another thread may have been faster: a wait for a stream that captures takes the waiting one into the capture.
    not_capturing(OPERATION, on)
}

/// What has become of a capture that another thread has begun on a stream since the stream was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capture {
    /// It is void.
    Void,
    /// It has ended, so that there may be a graph with the operation in it.
    InGraph,
}

/// The capture that another thread has begun on the stream since that was admitted, if there is one. Makes it void: the operation
/// may be in it, and what the operation uses is only borrowed, so that no replay must ever use it.
#[inline]
pub(crate) fn void_capture(on: &CudaStream) -> Option<Capture> {
    // The handle of a default stream means that of the context which is bound: in a group over several devices, the last one's.
    if on.cu_stream().addr() <= LEGACY.addr() {
        let _ = driver::bind(on.context());
    }
    match driver::capture_status(on) {
        Ok(sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE) | Err(_) => None,
        Ok(sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED) => Some(Capture::Void),
        Ok(sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE) => Some(spoil_capture(on)),
    }
}

#[cold]
fn spoil_capture(on: &CudaStream) -> Capture {
    // SAFETY: the stream lives. CUDA invalidates a capture when one of its streams is asked for its status.
    match unsafe { sys::cuStreamQuery(on.cu_stream()) } {
        // The stream is in no capture any more: the thread that began it has ended it meanwhile.
        sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY => Capture::InGraph,
        // The capture is void, or the context is lost, with all of its graphs.
        _ => Capture::Void,
    }
}

/// The error for an operation on whose stream a capture has begun meanwhile; `failed` is that of its calls, if they failed.
#[cold]
pub(crate) fn captured(capture: Capture, failed: Option<Error>) -> Error {
    let kind = ErrorKind::Stream {
        what: OPERATION,
        reason: match capture {
            Capture::Void => StreamRefusal::CapturedMeanwhile,
            Capture::InGraph => StreamRefusal::InGraph,
        },
    };
    match failed {
        None => Error::new(kind),
        Some(error) => error.beside(kind),
    }
}

/// After the operation: the streams of its buffers wait for it.
#[inline]
pub(crate) fn leave(on: &CudaStream, foreign: &[Arc<CudaStream>], join: &CudaEvent) -> Result<()> {
    if foreign.is_empty() {
        return Ok(());
    }
    join_behind(on, foreign, join)
}

fn join_behind(on: &CudaStream, foreign: &[Arc<CudaStream>], join: &CudaEvent) -> Result<()> {
    driver::record(join, on).map_err(Error::cuda("recording an event behind the operation"))?;
    // A stream that cannot wait is no reason to leave the others unordered.
    let mut ordered = Ok(());
    for stream in foreign {
        let waits = driver::wait(stream, join).map_err(|error| {
            // It must not wait for what is not in its capture.
            match driver::is_capturing(stream) {
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

/// Whether work is waiting or running on `on`, or may be: of a stream in a capture that is not known. Not if the device failed:
/// then none does.
pub(crate) fn is_busy(on: &CudaStream) -> bool {
    let _ = driver::bind(on.context());
    matches!(
        driver::query(on),
        sys::CUresult::CUDA_ERROR_NOT_READY
            | sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            | sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            | sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    )
}

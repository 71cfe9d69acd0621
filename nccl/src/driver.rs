//! Calls of CUDA's driver that do not ask for the error that cudarc keeps.
//!
//! A drop or a guard of cudarc's that fails keeps its error in the context; the next call of cudarc's on any thread
//! returns that error and does nothing else. It says nothing about an operation here, so what an operation needs calls the
//! driver itself.

use std::ffi::CStr;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use crate::sync::Mutex;

/// Makes the context current on this thread.
#[inline]
pub(crate) fn bind(context: &CudaContext) -> Result<(), DriverError> {
    if result::ctx::get_current()? == Some(context.cu_ctx()) {
        return Ok(());
    }
    // SAFETY: the context lives.
    unsafe { result::ctx::set_current(context.cu_ctx()) }
}

/// Records an event, of the context of the stream, which is bound to this thread.
#[inline]
pub(crate) fn record(event: &CudaEvent, stream: &CudaStream) -> Result<(), DriverError> {
    // SAFETY: both live.
    unsafe { result::event::record(event.cu_event(), stream.cu_stream()) }
}

/// Makes a stream wait for an event, of the context that is bound to this thread.
#[inline]
pub(crate) fn wait(stream: &CudaStream, event: &CudaEvent) -> Result<(), DriverError> {
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: both live.
    unsafe { result::stream::wait_event(stream.cu_stream(), event.cu_event(), flags) }
}

/// Whether a stream takes part in the capture of a graph. Its context is bound to this thread.
#[inline]
pub(crate) fn capture_status(
    stream: &CudaStream,
) -> Result<sys::CUstreamCaptureStatus, DriverError> {
    // SAFETY: the stream lives.
    unsafe { result::stream::is_capturing(stream.cu_stream()) }
}

/// Whether the stream takes part in the capture of a graph, or would break one: then nothing may be
/// recorded on it, or asked about it.
pub(crate) fn is_capturing(stream: &CudaStream) -> bool {
    match capture_status(stream) {
        Ok(status) => status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
        // The default stream, while a stream that waits for it is capturing.
        Err(error) => error.0 == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    }
}

/// While it lives, no call of this thread breaks a capture of the program's, as CUDA's default mode has it for calls that
/// may wait for the device: a capture in global mode forbids them to all threads.
pub(crate) struct Relaxed {
    before: sys::CUstreamCaptureMode,
    /// The mode is the thread's.
    _of_this_thread: PhantomData<*const ()>,
}

impl Relaxed {
    #[inline]
    pub(crate) fn begin() -> Self {
        let before = exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
        Self {
            before,
            _of_this_thread: PhantomData,
        }
    }
}

impl Drop for Relaxed {
    #[inline]
    fn drop(&mut self) {
        exchange(self.before);
    }
}

/// Gives this thread another capture mode; returns the one before.
#[inline]
fn exchange(mut mode: sys::CUstreamCaptureMode) -> sys::CUstreamCaptureMode {
    // SAFETY: `mode` is a valid place; the call changes the state of this thread only.
    let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    mode
}

/// The driver's library; other names that cudarc tries are links to it.
pub(crate) const LIBRARY: &CStr = c"libcuda.so.1";

/// Whether the driver's library is there: cudarc panics where it is not. Its own question exists in one of its ways of linking
/// only, which the program chooses.
pub(crate) fn is_present() -> bool {
    static IS_THERE: AtomicBool = AtomicBool::new(false);
    if IS_THERE.load(Ordering::Relaxed) {
        return true;
    }
    let is_there = [LIBRARY, c"libcuda.so"].iter().any(|name| {
        // SAFETY: loads the driver, as every call into it does; it is never closed.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        !handle.is_null()
    });
    IS_THERE.store(is_there, Ordering::Relaxed);
    is_there
}

/// Has no call of this thread break a capture of the program's, as long as the thread lives. Nothing where there is no driver.
pub(crate) fn relax_this_thread() {
    if is_present() {
        exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
    }
}

/// Whether an event was reached; asked without breaking a capture of the program's.
#[inline]
pub(crate) fn is_reached(event: &CudaEvent) -> Result<bool, DriverError> {
    let _relaxed = Relaxed::begin();
    event.try_is_complete()
}

/// What the driver says of the work on a stream, asked without breaking a capture on another one.
pub(crate) fn query(stream: &CudaStream) -> sys::CUresult {
    let _relaxed = Relaxed::begin();
    // SAFETY: the stream lives; the call waits for nothing.
    unsafe { sys::cuStreamQuery(stream.cu_stream()) }
}

/// Held while a lease is [`heard`], so that two of them do not take each other's errors.
static SET_ASIDE: Mutex<()> = Mutex::new(());

/// Makes calls of cudarc's that store their errors instead of returning them, and returns what they stored. An error that was there
/// before stays where it is, and hinders none of them; one that another thread stores meanwhile is taken for theirs. The calls
/// must not wait.
pub(crate) fn heard<T>(
    context: &CudaContext,
    calls: impl FnOnce() -> T,
) -> (T, Result<(), DriverError>) {
    let _alone = SET_ASIDE.lock();
    let before = context.check_err();
    let value = calls();
    let during = context.check_err();
    context.record_err(before);
    (value, during)
}

/// Makes calls of cudarc's that return their errors; one that was stored before hinders none of them, and stays.
pub(crate) fn undisturbed<T>(context: &CudaContext, calls: impl FnOnce() -> T) -> T {
    let before = context.check_err();
    let value = calls();
    context.record_err(before);
    value
}

/// Creates an event. The context is bound to this thread afterwards.
pub(crate) fn new_event(
    context: &Arc<CudaContext>,
    flags: Option<sys::CUevent_flags>,
) -> Result<CudaEvent, DriverError> {
    let create = || undisturbed(context, || context.new_event(flags));
    // An error that another thread has stored at this very moment is not that of the event.
    create().or_else(|_| create())
}

//! Calls of CUDA's driver that ignore the error that cudarc stores.
//!
//! When a drop or a guard of cudarc fails, cudarc stores the error in the context; the next call of cudarc on any thread
//! returns that error and does nothing else. The error says nothing about an operation here, so operations call the
//! driver directly.

use std::ffi::CStr;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use crate::sync::{Mutex, MutexGuard};

/// Makes the context current on this thread.
#[inline]
#[doc(hidden)]
pub fn bind(context: &CudaContext) -> Result<(), DriverError> {
    if result::ctx::get_current()? == Some(context.cu_ctx()) {
        return Ok(());
    }
    // SAFETY: the context lives.
    unsafe { result::ctx::set_current(context.cu_ctx()) }
}

/// Records an event. The event and the stream must have the same context, which must be bound to this thread.
#[inline]
#[doc(hidden)]
pub fn record(event: &CudaEvent, stream: &CudaStream) -> Result<(), DriverError> {
    // SAFETY: both live.
    unsafe { result::event::record(event.cu_event(), stream.cu_stream()) }
}

/// Makes a stream wait for an event of the context that is bound to this thread.
#[inline]
pub(crate) fn wait(stream: &CudaStream, event: &CudaEvent) -> Result<(), DriverError> {
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: both live.
    unsafe { result::stream::wait_event(stream.cu_stream(), event.cu_event(), flags) }
}

/// Whether a stream takes part in the capture of a graph. Its context must be bound to this thread.
#[inline]
pub(crate) fn capture_status(
    stream: &CudaStream,
) -> Result<sys::CUstreamCaptureStatus, DriverError> {
    // SAFETY: the stream lives.
    unsafe { result::stream::is_capturing(stream.cu_stream()) }
}

/// Whether the stream takes part in the capture of a graph, or a call on it would break a capture. Then nothing may be
/// recorded on it, and it must not be queried.
pub(crate) fn is_capturing(stream: &CudaStream) -> bool {
    match capture_status(stream) {
        Ok(status) => status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
        // The default stream, while a stream that waits for it is capturing.
        Err(error) => error.0 == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    }
}

/// While this value lives, calls of this thread do not break a capture of the program. A capture in global mode, CUDA's
/// default, forbids all threads the calls that may wait for the device.
pub(crate) struct Relaxed {
    before: sys::CUstreamCaptureMode,
    /// Not `Send`: the mode belongs to the thread.
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

/// Sets this thread's capture mode; returns the previous one.
#[inline]
fn exchange(mut mode: sys::CUstreamCaptureMode) -> sys::CUstreamCaptureMode {
    // SAFETY: `mode` is a valid location; the call changes only the state of this thread.
    let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    mode
}

/// The driver's library; other names that cudarc tries are links to it.
pub(crate) const LIBRARY: &CStr = c"libcuda.so.1";

/// Whether the driver's library exists; cudarc panics if it does not. cudarc's own check exists only with one of its ways of
/// linking, and the program chooses the way.
pub(crate) fn is_present() -> bool {
    static IS_PRESENT: AtomicBool = AtomicBool::new(false);
    if IS_PRESENT.load(Ordering::Relaxed) {
        return true;
    }
    let is_there = [LIBRARY, c"libcuda.so"].iter().any(|name| {
        // SAFETY: loads the driver, as every call into it does; it is never closed.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        !handle.is_null()
    });
    IS_PRESENT.store(is_there, Ordering::Relaxed);
    is_there
}

/// Keeps calls of this thread from breaking a capture of the program, until the thread ends. Without a driver this does
/// nothing.
pub(crate) fn relax_this_thread() {
    if is_present() {
        exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
    }
}

/// Whether an event was reached. Does not break a capture of the program.
#[inline]
#[doc(hidden)]
pub fn is_reached(event: &CudaEvent) -> Result<bool, DriverError> {
    let _relaxed = Relaxed::begin();
    event.try_is_complete()
}

/// Returns the driver's status of the work on a stream. Does not break a capture on another stream.
pub(crate) fn query(stream: &CudaStream) -> sys::CUresult {
    let _relaxed = Relaxed::begin();
    // SAFETY: the stream lives; the call does not wait.
    unsafe { sys::cuStreamQuery(stream.cu_stream()) }
}

/// How long to wait for another thread's calls whose errors cudarc stores; such calls do not block. Shorter than the
/// delay of a call after which the process is ended (`active_calls.rs`).
const STORED_ERROR_LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Locked while an error of a context is taken or put back, and during the calls of [`stored_error_of`], so that two threads do
/// not take each other's errors. A context always uses the same lock; a few contexts may share one.
static STORED_ERROR_LOCKS: [Mutex<()>; 64] = [const { Mutex::new(()) }; 64];

/// Returns `None` if another thread is inside a driver call that does not return.
#[inline]
fn lock_stored_error(context: &CudaContext, timeout: Duration) -> Option<MutexGuard<'static, ()>> {
    let place = std::ptr::from_ref(context).addr() / size_of::<CudaContext>();
    STORED_ERROR_LOCKS[place % STORED_ERROR_LOCKS.len()].try_lock_for(timeout)
}

/// Makes calls of cudarc that store their errors instead of returning them, and returns the stored error. An error that was
/// stored before stays stored, and does not affect the calls. An error that another thread of the program stores meanwhile
/// cannot be distinguished: it is returned, and also stays stored. The calls must not wait. If another thread does not return
/// from such calls, these calls count as failed.
pub(crate) fn stored_error_of<T>(
    context: &CudaContext,
    calls: impl FnOnce() -> T,
) -> (T, Result<(), DriverError>) {
    stored_error_of_unless_stuck(context, STORED_ERROR_LOCK_TIMEOUT, calls)
}

#[inline]
fn stored_error_of_unless_stuck<T>(
    context: &CudaContext,
    timeout: Duration,
    calls: impl FnOnce() -> T,
) -> (T, Result<(), DriverError>) {
    let Some(_alone) = lock_stored_error(context, timeout) else {
        return (calls(), Err(DriverError(sys::CUresult::CUDA_ERROR_TIMEOUT)));
    };
    let before = context.check_err();
    let value = calls();
    let during = context.check_err();
    context.record_err(before.and(during));
    (value, during)
}

/// Makes calls of cudarc that return their errors, and may wait; an error that was stored before does not affect them, and stays
/// stored.
#[doc(hidden)]
pub fn ignoring_stored_error<T>(context: &CudaContext, calls: impl FnOnce() -> T) -> T {
    let before = {
        let _alone = lock_stored_error(context, STORED_ERROR_LOCK_TIMEOUT);
        context.check_err()
    };
    let value = calls();
    if before.is_err() {
        let _alone = lock_stored_error(context, STORED_ERROR_LOCK_TIMEOUT);
        context.record_err(before);
    }
    value
}

/// Makes calls of cudarc that return their errors, and may wait. They do not break a capture of the program, and an error that
/// was stored before does not affect them.
#[doc(hidden)]
pub fn undisturbed<T>(context: &CudaContext, calls: impl FnOnce() -> T) -> T {
    let _relaxed = Relaxed::begin();
    ignoring_stored_error(context, calls)
}

/// Creates an event. The context is bound to this thread afterwards.
#[doc(hidden)]
pub fn new_event(
    context: &Arc<CudaContext>,
    flags: Option<sys::CUevent_flags>,
) -> Result<CudaEvent, DriverError> {
    let create = || ignoring_stored_error(context, || context.new_event(flags));
    // An error that another thread stored in the meantime does not belong to this event.
    create().or_else(|_| create())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const ERROR: DriverError = DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    fn context() -> Arc<CudaContext> {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        CudaContext::new(0).expect("a context")
    }

    #[test]
    fn an_error_that_is_stored_meanwhile_is_returned_and_stays_with_its_owner() {
        let context = context();
        let ((), during) = stored_error_of(&context, || context.record_err::<()>(Err(ERROR)));
        assert_eq!(during, Err(ERROR));
        assert_eq!(context.check_err(), Err(ERROR));
        // An error that was stored before is not returned.
        context.record_err::<()>(Err(ERROR));
        let ((), during) = stored_error_of(&context, || ());
        assert_eq!((during, context.check_err()), (Ok(()), Err(ERROR)));
    }

    #[test]
    fn calls_on_another_thread_take_no_error_of_those_that_are_heard() {
        let context = context();
        let (stored, is_stored) = mpsc::channel();
        let (undisturbed_ends, ended) = mpsc::channel();
        std::thread::scope(|scope| {
            let context = &context;
            scope.spawn(move || {
                is_stored.recv().expect("an error");
                ignoring_stored_error(context, || ());
                let _ = undisturbed_ends.send(());
            });
            let ((), during) = stored_error_of(context, || {
                context.record_err::<()>(Err(ERROR));
                stored.send(()).expect("another thread");
                // The other thread's calls end only after these.
                let early = ended.recv_timeout(Duration::from_millis(200));
                assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout));
            });
            assert_eq!(during, Err(ERROR));
        });
    }

    #[test]
    fn calls_are_taken_for_failed_while_those_of_another_thread_do_not_come_back() {
        let context = context();
        let (begun, begins) = mpsc::channel();
        let (over, wait) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let context = &context;
            scope.spawn(move || {
                stored_error_of(context, || {
                    begun.send(()).expect("another thread");
                    let _ = wait.recv();
                })
            });
            begins.recv().expect("it begins");
            let brief = Duration::from_millis(10);
            let (value, during) = stored_error_of_unless_stuck(context, brief, || 7);
            let stuck = DriverError(sys::CUresult::CUDA_ERROR_TIMEOUT);
            assert_eq!((value, during), (7, Err(stuck)));
            drop(over);
        });
    }
}

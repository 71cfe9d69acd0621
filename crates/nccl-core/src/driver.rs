//! Calls of CUDA's driver that do not ask for the error that cudarc keeps.
//!
//! A drop or a guard of cudarc's that fails keeps its error in the context; the next call of cudarc's on any thread
//! returns that error and does nothing else. It says nothing about an operation here, so what an operation needs calls the
//! driver itself.

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

/// How long the calls of another thread are waited for of which cudarc stores the errors: those do not wait. Less than a call may
/// be late before its process is ended (`inside.rs`).
const STUCK: Duration = Duration::from_secs(1);

/// Held while an error of a context is taken or put back, and while calls are [`heard`], so that two threads do not take each
/// other's errors. A context always has the same one; a few contexts may share it.
static SET_ASIDE: [Mutex<()>; 64] = [const { Mutex::new(()) }; 64];

/// `None` if another thread is in a call of the driver's that does not come back.
#[inline]
fn set_aside(context: &CudaContext, limit: Duration) -> Option<MutexGuard<'static, ()>> {
    let place = std::ptr::from_ref(context).addr() / size_of::<CudaContext>();
    SET_ASIDE[place % SET_ASIDE.len()].try_lock_for(limit)
}

/// Makes calls of cudarc's that store their errors instead of returning them, and returns what they stored. An error that was there
/// before stays where it is, and hinders none of them. One that another thread of the program stores meanwhile cannot be told from
/// theirs: it is returned, and stays stored as well. The calls must not wait. While another thread does not come back from such
/// calls, theirs are taken for failed.
pub(crate) fn heard<T>(
    context: &CudaContext,
    calls: impl FnOnce() -> T,
) -> (T, Result<(), DriverError>) {
    heard_unless_stuck(context, STUCK, calls)
}

#[inline]
fn heard_unless_stuck<T>(
    context: &CudaContext,
    limit: Duration,
    calls: impl FnOnce() -> T,
) -> (T, Result<(), DriverError>) {
    let Some(_alone) = set_aside(context, limit) else {
        return (calls(), Err(DriverError(sys::CUresult::CUDA_ERROR_TIMEOUT)));
    };
    let before = context.check_err();
    let value = calls();
    let during = context.check_err();
    context.record_err(before.and(during));
    (value, during)
}

/// Makes calls of cudarc's that return their errors, and may wait; an error that was stored before hinders none of them, and stays.
#[doc(hidden)]
pub fn undisturbed<T>(context: &CudaContext, calls: impl FnOnce() -> T) -> T {
    let before = {
        let _alone = set_aside(context, STUCK);
        context.check_err()
    };
    let value = calls();
    if before.is_err() {
        let _alone = set_aside(context, STUCK);
        context.record_err(before);
    }
    value
}

/// Creates an event. The context is bound to this thread afterwards.
#[doc(hidden)]
pub fn new_event(
    context: &Arc<CudaContext>,
    flags: Option<sys::CUevent_flags>,
) -> Result<CudaEvent, DriverError> {
    let create = || undisturbed(context, || context.new_event(flags));
    // An error that another thread has stored at this very moment is not that of the event.
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
        let ((), during) = heard(&context, || context.record_err::<()>(Err(ERROR)));
        assert_eq!(during, Err(ERROR));
        assert_eq!(context.check_err(), Err(ERROR));
        // One that was there before is not taken for theirs.
        context.record_err::<()>(Err(ERROR));
        let ((), during) = heard(&context, || ());
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
                undisturbed(context, || ());
                let _ = undisturbed_ends.send(());
            });
            let ((), during) = heard(context, || {
                context.record_err::<()>(Err(ERROR));
                stored.send(()).expect("another thread");
                // It does not come before these are over.
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
                heard(context, || {
                    begun.send(()).expect("another thread");
                    let _ = wait.recv();
                })
            });
            begins.recv().expect("it begins");
            let brief = Duration::from_millis(10);
            let (value, during) = heard_unless_stuck(context, brief, || 7);
            let stuck = DriverError(sys::CUresult::CUDA_ERROR_TIMEOUT);
            assert_eq!((value, during), (7, Err(stuck)));
            drop(over);
        });
    }
}

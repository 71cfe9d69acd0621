//! Stream capture, as far as it goes: a stream can be marked as capturing and asked whether it is.
//! Work that is given to it meanwhile is refused, and the capture gives no graph.
//!
//! What works fully is the part that hurts bystanders: while a capture in global mode is going on,
//! calls that CUDA holds for unsafe fail on every thread that did not switch itself to another
//! mode, and void the capture.

use std::cell::Cell;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{CUresult, enter, store, stream_of};
use crate::elf::Symbol;
use crate::exec::{Capture, Kind, Stream};

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuStreamBeginCapture_v2", begin as *const c_void),
        (c"cuStreamEndCapture", end as *const c_void),
        (c"cuStreamIsCapturing", is_capturing as *const c_void),
        (c"cuStreamGetCaptureInfo_v2", get_info_v2 as *const c_void),
        (c"cuStreamGetCaptureInfo_v3", get_info_v3 as *const c_void),
        (
            c"cuThreadExchangeStreamCaptureMode",
            exchange_mode as *const c_void,
        ),
    ]
}

const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

const STATUS_NONE: c_uint = 0;
const STATUS_ACTIVE: c_uint = 1;
const STATUS_INVALIDATED: c_uint = 2;

/// Streams that are being captured.
static ACTIVE: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

fn active() -> MutexGuard<'static, Vec<Arc<Stream>>> {
    ACTIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call that CUDA holds for unsafe while a capture goes on.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`, and the captures that forbid it are void.
pub(super) fn unsafe_call() -> Result<(), CUresult> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let (mode, me) = (MODE.get(), std::thread::current().id());
    let mut refused = Ok(());
    for stream in active().iter() {
        let Some(mut capture) = stream.capture() else {
            continue;
        };
        let own = capture.thread == me && capture.mode != RELAXED && mode != RELAXED;
        let foreign = capture.mode == GLOBAL && mode == GLOBAL;
        if own || foreign {
            capture.invalid = true;
            stream.set_capture(Some(capture));
            refused = Err(CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    refused
}

/// A wait for a stream, or a question after it, that CUDA holds for unsafe.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` if the stream itself is being captured, else as
/// [`unsafe_call`].
pub(super) fn unsafe_use_of(stream: &Stream) -> Result<(), CUresult> {
    if stream.capturing() {
        if let Some(mut capture) = stream.capture() {
            capture.invalid = true;
            stream.set_capture(Some(capture));
        }
        return Err(CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    unsafe_call()
}

unsafe extern "C" fn begin(handle: *mut c_void, mode: c_uint) -> CUresult {
    static ID: AtomicU64 = AtomicU64::new(1);
    enter(|| {
        let stream = stream_of(handle)?;
        stream.context().check()?;
        if mode > RELAXED {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        if stream.kind() == Kind::Legacy {
            return Err(CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        let mut active = active();
        if stream.capturing() {
            return Err(CUresult::ERROR_ILLEGAL_STATE);
        }
        let id = ID.fetch_add(1, Ordering::Relaxed);
        stream.set_capture(Some(Capture {
            id,
            mode,
            thread: std::thread::current().id(),
            invalid: false,
        }));
        active.push(stream);
        COUNT.fetch_add(1, Ordering::Release);
        Ok(())
    })
}

unsafe extern "C" fn end(handle: *mut c_void, graph: *mut *mut c_void) -> CUresult {
    enter(|| {
        let stream = stream_of(handle)?;
        let capture = stream.capture().ok_or(CUresult::ERROR_ILLEGAL_STATE)?;
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return Err(CUresult::ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        {
            let mut active = active();
            active.retain(|other| !Arc::ptr_eq(other, &stream));
            stream.set_capture(None);
            COUNT.fetch_sub(1, Ordering::Release);
        }
        // SAFETY: the caller passes null or a place for the graph.
        unsafe { store(graph, std::ptr::null_mut())? };
        if capture.invalid {
            Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED)
        } else {
            super::refused::say("cuStreamEndCapture", super::refused::NO_GRAPHS);
            Err(CUresult::ERROR_NOT_SUPPORTED)
        }
    })
}

/// Status and number of a stream's capture.
fn status(stream: &Stream) -> (c_uint, u64) {
    match stream.capture() {
        None => (STATUS_NONE, 0),
        Some(capture) if capture.invalid => (STATUS_INVALIDATED, capture.id),
        Some(capture) => (STATUS_ACTIVE, capture.id),
    }
}

/// The stream asked about. The legacy stream is not in use by anyone who only asks.
fn asked(handle: *mut c_void) -> Result<Arc<Stream>, CUresult> {
    stream_of(handle)
}

unsafe extern "C" fn is_capturing(handle: *mut c_void, place: *mut c_uint) -> CUresult {
    // SAFETY: the caller passes null or a place for the status.
    enter(|| unsafe { store(place, status(&*asked(handle)?).0) })
}

unsafe extern "C" fn get_info_v2(
    handle: *mut c_void,
    place: *mut c_uint,
    id: *mut u64,
    graph: *mut *mut c_void,
    dependencies: *mut *const c_void,
    count: *mut usize,
) -> CUresult {
    // SAFETY: the same promises; no edges are asked for.
    unsafe {
        get_info_v3(
            handle,
            place,
            id,
            graph,
            dependencies,
            std::ptr::null_mut(),
            count,
        )
    }
}

unsafe extern "C" fn get_info_v3(
    handle: *mut c_void,
    place: *mut c_uint,
    id: *mut u64,
    graph: *mut *mut c_void,
    dependencies: *mut *const c_void,
    edges: *mut *const c_void,
    count: *mut usize,
) -> CUresult {
    /// A place that may be left out.
    ///
    /// # Safety
    /// `place` is null or may be written.
    unsafe fn if_wanted<T>(place: *mut T, value: T) {
        if !place.is_null() {
            // SAFETY: not null, and the caller promises the rest.
            unsafe { place.write(value) };
        }
    }
    enter(|| {
        let (status, number) = status(&*asked(handle)?);
        // SAFETY: the caller passes a place for the status, and null or places for the others.
        unsafe {
            store(place, status)?;
            if_wanted(id, number);
            if_wanted(graph, std::ptr::null_mut());
            if_wanted(dependencies, std::ptr::null());
            if_wanted(edges, std::ptr::null());
            if_wanted(count, 0);
        }
        Ok(())
    })
}

unsafe extern "C" fn exchange_mode(place: *mut c_uint) -> CUresult {
    enter(|| {
        if place.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller passes a mode to read and replace.
        let wanted = unsafe { place.read() };
        if wanted > RELAXED {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: as above.
        unsafe { store(place, MODE.replace(wanted)) }
    })
}

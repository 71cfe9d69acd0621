//! Stream capture: begin, end, and the calls that are forbidden in between.
//!
//! Work on a stream that takes part in a capture becomes nodes ([`crate::exec::capture`]). A call that CUDA forbids during a
//! capture fails and invalidates the capture:
//!
//! - a wait for, or a query of, a stream or event that takes part, or a context or device that has such a stream;
//! - calls that may implicitly wait for the device, such as `cuMemAlloc`: on every thread, on the thread that began the
//!   capture, or nowhere, by the mode of the capture and that of the calling thread (`cuThreadExchangeStreamCaptureMode`);
//! - use of the legacy stream while one of the blocking streams that it is ordered with takes part.

use std::cell::Cell;
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use super::call::{enter, store};
use super::context::Context;
use super::handles::{places, stream_of};
use crate::exec::{self, Capture, Info, Kind, Standing, Stream};
use crate::result::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuStreamBeginCapture_v2", begin as *const c_void),
        (c"cuStreamEndCapture", end as *const c_void),
        (c"cuStreamIsCapturing", is_capturing as *const c_void),
        (c"cuStreamGetCaptureInfo_v2", get_info_v2 as *const c_void),
        (c"cuStreamGetCaptureInfo_v3", get_info_v3 as *const c_void),
        (
            c"cuStreamUpdateCaptureDependencies",
            update_dependencies as *const c_void,
        ),
        (
            c"cuStreamUpdateCaptureDependencies_v2",
            update_dependencies_v2 as *const c_void,
        ),
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

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Checks a call that CUDA considers unsafe during a capture.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` if a capture forbids the call; every such capture is invalidated.
pub(super) fn unsafe_call() -> Result<(), CUresult> {
    let (mode, me) = (MODE.get(), std::thread::current().id());
    let refused = exec::capture::invalidate_if(|capture| {
        let own = capture.thread == me && capture.mode != RELAXED && mode != RELAXED;
        let foreign = capture.mode == GLOBAL && mode == GLOBAL;
        own || foreign
    });
    if refused {
        Err(CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED)
    } else {
        Ok(())
    }
}

/// Checks a wait for a stream, or a query of it, which CUDA considers unsafe during a capture.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` if the stream itself is being captured, otherwise as [`unsafe_call`].
pub(super) fn unsafe_use_of(stream: &Stream) -> Result<(), CUresult> {
    let capture = stream.capture();
    if let Some(capture) = capture.filter(|capture| capture.standing() != Standing::Over) {
        capture.invalidate();
        return Err(CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    unsafe_call()
}

/// Checks a wait for all streams of a context.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` if one of them is being captured, in any mode; otherwise as [`unsafe_call`].
pub(super) fn unsafe_use_of_all(context: &std::sync::Arc<Context>) -> Result<(), CUresult> {
    if exec::capture::invalidate_in(context) {
        return Err(CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    unsafe_call()
}

/// Refuses a call that cannot be captured, if the stream is being captured.
///
/// # Errors
/// `code` if the stream is being captured, and the capture is invalidated; `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED` if it was
/// already invalid.
pub(super) fn refuse(stream: &Stream, code: CUresult) -> Result<(), CUresult> {
    let Some(capture) = stream.capture() else {
        return Ok(());
    };
    if capture.standing() == Standing::Invalid {
        return Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    capture.invalidate();
    Err(code)
}

unsafe extern "C" fn begin(handle: *mut c_void, mode: c_uint) -> CUresult {
    enter("cuStreamBeginCapture", || {
        let stream = stream_of(handle)?;
        stream.context().check()?;
        if mode > RELAXED {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        Capture::begin(&stream, mode)
    })
}

unsafe extern "C" fn end(handle: *mut c_void, place: *mut *mut c_void) -> CUresult {
    enter("cuStreamEndCapture", || {
        let stream = stream_of(handle)?;
        if place.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller passes a place for the graph.
        unsafe { store(place, std::ptr::null_mut())? };
        let capture = stream.capture().ok_or(CUresult::ERROR_ILLEGAL_STATE)?;
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return Err(CUresult::ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        let graph = capture.end(&stream)?;
        // SAFETY: as above.
        unsafe { store(place, graph) }
    })
}

/// Returns the status and the number of a stream's capture.
fn status(stream: &Stream) -> (c_uint, u64) {
    let Some(capture) = stream.capture() else {
        return (STATUS_NONE, 0);
    };
    match capture.standing() {
        Standing::Active => (STATUS_ACTIVE, capture.id),
        Standing::Invalid => (STATUS_INVALIDATED, capture.id),
        // Another thread is ending the capture and has not yet released the stream.
        Standing::Over => (STATUS_NONE, 0),
    }
}

/// Returns the stream of a capture query. Fails for the legacy stream while it is ordered with a stream that is being captured.
fn asked(handle: *mut c_void) -> Result<Arc<Stream>, CUresult> {
    let stream = stream_of(handle)?;
    exec::capture::may_ask(&stream)?;
    Ok(stream)
}

unsafe extern "C" fn is_capturing(handle: *mut c_void, place: *mut c_uint) -> CUresult {
    // SAFETY: the caller passes null or a place for the status.
    enter("cuStreamIsCapturing", || unsafe {
        // Shortcut for the common case: the stream is not being captured.
        let is_idle = |stream: &Arc<Stream>| stream.kind() != Kind::Legacy && !stream.capturing();
        match exec::look(handle, is_idle) {
            Some(true) => store(place, STATUS_NONE),
            _ => store(place, status(&*asked(handle)?).0),
        }
    })
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
    /// Writes to an optional place.
    ///
    /// # Safety
    /// `place` is null or may be written.
    unsafe fn if_wanted<T>(place: *mut T, value: T) {
        if !place.is_null() {
            // SAFETY: not null, and the caller promises the rest.
            unsafe { place.write(value) };
        }
    }
    enter("cuStreamGetCaptureInfo", || {
        let stream = asked(handle)?;
        let (status, number) = status(&stream);
        let wanted = !(graph.is_null() && dependencies.is_null() && count.is_null());
        let nothing = Info {
            graph: std::ptr::null_mut(),
            tips: std::ptr::null(),
            edges: std::ptr::null(),
            count: 0,
        };
        let info = match stream.capture() {
            Some(capture) if wanted && status == STATUS_ACTIVE => capture.info(&stream)?,
            _ => nothing,
        };
        // SAFETY: the caller passes a place for the status, and null or places for the others.
        unsafe {
            store(place, status)?;
            if_wanted(id, number);
            if_wanted(graph, info.graph);
            if_wanted(dependencies, info.tips.cast());
            if_wanted(edges, info.edges.cast());
            if_wanted(count, info.count);
        }
        Ok(())
    })
}

unsafe extern "C" fn update_dependencies(
    handle: *mut c_void,
    dependencies: *const *mut c_void,
    count: usize,
    flags: c_uint,
) -> CUresult {
    // SAFETY: the same promises; ordinary edges.
    unsafe { update_dependencies_v2(handle, dependencies, std::ptr::null(), count, flags) }
}

/// Treats edges of any kind as full dependencies: a node that could begin before its predecessor ends begins after it.
unsafe extern "C" fn update_dependencies_v2(
    handle: *mut c_void,
    dependencies: *const *mut c_void,
    _edges: *const c_void,
    count: usize,
    flags: c_uint,
) -> CUresult {
    /// Replaces the present dependencies; without this flag they are kept.
    const SET: c_uint = 1;
    enter("cuStreamUpdateCaptureDependencies", || {
        let stream = stream_of(handle)?;
        if flags > SET {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let capture = stream.capture().ok_or(CUresult::ERROR_ILLEGAL_STATE)?;
        // SAFETY: the caller passes `count` nodes.
        let tips = unsafe { places(dependencies, count, &capture.graph())? };
        capture.set_tips(&stream, &tips, flags == SET)
    })
}

unsafe extern "C" fn exchange_mode(place: *mut c_uint) -> CUresult {
    enter("cuThreadExchangeStreamCaptureMode", || {
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

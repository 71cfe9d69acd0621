//! `cuEvent*`.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use super::call::{enter, store};
use super::handles::{bad_handle, stream_of};
use super::{capture, context};
use crate::exec::{Event, Stream};
use crate::result::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuEventCreate", create as *const c_void),
        (c"cuEventDestroy", destroy as *const c_void),
        (c"cuEventDestroy_v2", destroy as *const c_void),
        (c"cuEventRecord", record as *const c_void),
        (
            c"cuEventRecordWithFlags",
            record_with_flags as *const c_void,
        ),
        (c"cuEventSynchronize", synchronize as *const c_void),
        (c"cuEventQuery", query as *const c_void),
        (c"cuEventElapsedTime", elapsed_time as *const c_void),
        (c"cuEventElapsedTime_v2", elapsed_time as *const c_void),
    ]
}

const BLOCKING_SYNC: c_uint = 1;
const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;

fn event_of(handle: *mut c_void) -> Result<Arc<Event>, CUresult> {
    Event::lookup(handle).map_err(|_| bad_handle("event", handle))
}

unsafe extern "C" fn create(place: *mut *mut c_void, flags: c_uint) -> CUresult {
    enter("cuEventCreate", || {
        if flags & INTERPROCESS != 0 {
            super::refused::say("cuEventCreate", super::refused::NO_IPC);
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        if place.is_null() || flags & !(BLOCKING_SYNC | DISABLE_TIMING) != 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let event = Event::create(&context::current()?, flags & DISABLE_TIMING == 0)?;
        // SAFETY: not null, and the caller passes a place for the event.
        unsafe { store(place, event) }
    })
}

unsafe extern "C" fn destroy(handle: *mut c_void) -> CUresult {
    enter("cuEventDestroy", || {
        Event::destroy(handle)
            .map_err(|_| bad_handle("event", handle))?
            .context()
            .check()
    })
}

unsafe extern "C" fn record(handle: *mut c_void, stream: *mut c_void) -> CUresult {
    enter("cuEventRecord", || {
        event_of(handle)?.record(&stream_of(stream)?, false)
    })
}

/// Records the event of a handle on a stream, as `cuEventRecord` does.
pub(super) fn record_on(handle: *mut c_void, stream: &Arc<Stream>) -> Result<(), CUresult> {
    event_of(handle)?.record(stream, false)
}

/// In a capture, adds a node that records the event at each launch of the graph.
const EXTERNAL: c_uint = 1;

unsafe extern "C" fn record_with_flags(
    handle: *mut c_void,
    stream: *mut c_void,
    flags: c_uint,
) -> CUresult {
    enter("cuEventRecordWithFlags", || {
        if flags & !EXTERNAL != 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        event_of(handle)?.record(&stream_of(stream)?, flags == EXTERNAL)
    })
}

unsafe extern "C" fn synchronize(handle: *mut c_void) -> CUresult {
    enter("cuEventSynchronize", || {
        let event = event_of(handle)?;
        event.check_captured()?;
        capture::unsafe_call()?;
        event.synchronize()
    })
}

unsafe extern "C" fn query(handle: *mut c_void) -> CUresult {
    enter("cuEventQuery", || {
        let event = event_of(handle)?;
        event.check_captured()?;
        capture::unsafe_call()?;
        if event.query()? {
            Ok(())
        } else {
            Err(CUresult::ERROR_NOT_READY)
        }
    })
}

unsafe extern "C" fn elapsed_time(
    place: *mut f32,
    start: *mut c_void,
    end: *mut c_void,
) -> CUresult {
    enter("cuEventElapsedTime", || {
        let (start, end) = (event_of(start)?, event_of(end)?);
        start.context().check()?;
        // SAFETY: the caller passes null or a place for the number.
        unsafe { store(place, start.elapsed(&end)?) }
    })
}

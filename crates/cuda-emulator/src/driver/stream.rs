//! `cuStream*` and host functions.

use std::ffi::{c_int, c_uint, c_void};

use super::call::{enter, store};
use super::ctx::GREATEST_PRIORITY;
use super::handles::{bad_handle, stream_of};
use super::{capture, context};
use crate::exec::{Event, HostCall, Kind, STREAMS, Stream};
use crate::result::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuStreamCreate", create as *const c_void),
        (
            c"cuStreamCreateWithPriority",
            create_with_priority as *const c_void,
        ),
        (c"cuStreamDestroy", destroy as *const c_void),
        (c"cuStreamDestroy_v2", destroy as *const c_void),
        (c"cuStreamSynchronize", synchronize as *const c_void),
        (c"cuStreamQuery", query as *const c_void),
        (c"cuStreamWaitEvent", wait_event as *const c_void),
        (c"cuStreamGetCtx", get_ctx as *const c_void),
        (c"cuStreamGetDevice", get_device as *const c_void),
        (c"cuStreamGetFlags", get_flags as *const c_void),
        (c"cuStreamGetPriority", get_priority as *const c_void),
        (c"cuStreamGetId", get_id as *const c_void),
        (c"cuLaunchHostFunc", launch_host_func as *const c_void),
    ]
}

const NON_BLOCKING: c_uint = 1;

unsafe extern "C" fn create(place: *mut *mut c_void, flags: c_uint) -> CUresult {
    make("cuStreamCreate", place, flags, 0)
}

unsafe extern "C" fn create_with_priority(
    place: *mut *mut c_void,
    flags: c_uint,
    priority: c_int,
) -> CUresult {
    make("cuStreamCreateWithPriority", place, flags, priority)
}

fn make(
    function: &'static str,
    place: *mut *mut c_void,
    flags: c_uint,
    priority: c_int,
) -> CUresult {
    enter(function, || {
        let context = context::current()?;
        let kind = match flags {
            0 => Kind::Blocking,
            NON_BLOCKING => Kind::NonBlocking,
            _ => return Err(CUresult::ERROR_INVALID_VALUE),
        };
        if place.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let stream = Stream::new(&context, kind, priority.clamp(GREATEST_PRIORITY, 0));
        let handle = match stream.publish() {
            Ok(handle) => handle,
            Err(error) => {
                stream.destroy();
                return Err(error);
            }
        };
        // SAFETY: not null, and the caller passes a place for the stream.
        unsafe { store(place, handle) }
    })
}

unsafe extern "C" fn destroy(handle: *mut c_void) -> CUresult {
    enter("cuStreamDestroy", || {
        if handle.addr() <= 2 {
            return Err(CUresult::ERROR_INVALID_HANDLE);
        }
        let stream = STREAMS
            .get(handle)
            .ok_or_else(|| bad_handle("stream", handle))?;
        stream.destroy();
        stream.context().check()
    })
}

unsafe extern "C" fn synchronize(handle: *mut c_void) -> CUresult {
    enter("cuStreamSynchronize", || {
        let stream = stream_of(handle)?;
        capture::unsafe_use_of(&stream)?;
        stream.synchronize()
    })
}

unsafe extern "C" fn query(handle: *mut c_void) -> CUresult {
    enter("cuStreamQuery", || {
        let stream = stream_of(handle)?;
        capture::unsafe_use_of(&stream)?;
        if stream.query()? {
            Ok(())
        } else {
            Err(CUresult::ERROR_NOT_READY)
        }
    })
}

unsafe extern "C" fn wait_event(
    handle: *mut c_void,
    event: *mut c_void,
    flags: c_uint,
) -> CUresult {
    /// In a capture, adds a node that waits for the job that the event marks at each launch of the graph.
    const EXTERNAL: c_uint = 1;
    enter("cuStreamWaitEvent", || {
        let stream = stream_of(handle)?;
        if flags & !EXTERNAL != 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        Event::lookup(event)
            .map_err(|_| bad_handle("event", event))?
            .make_wait(&stream, flags == EXTERNAL)
    })
}

unsafe extern "C" fn get_ctx(handle: *mut c_void, place: *mut *mut c_void) -> CUresult {
    // SAFETY: the caller passes null or a place for the context.
    enter("cuStreamGetCtx", || unsafe {
        store(place, stream_of(handle)?.context().handle())
    })
}

unsafe extern "C" fn get_device(handle: *mut c_void, place: *mut c_int) -> CUresult {
    // SAFETY: the caller passes null or a place for the device.
    enter("cuStreamGetDevice", || unsafe {
        store(place, stream_of(handle)?.device())
    })
}

unsafe extern "C" fn get_flags(handle: *mut c_void, place: *mut c_uint) -> CUresult {
    enter("cuStreamGetFlags", || {
        let flags = if stream_of(handle)?.kind() == Kind::NonBlocking {
            NON_BLOCKING
        } else {
            0
        };
        // SAFETY: the caller passes null or a place for the flags.
        unsafe { store(place, flags) }
    })
}

unsafe extern "C" fn get_priority(handle: *mut c_void, place: *mut c_int) -> CUresult {
    // SAFETY: the caller passes null or a place for the number.
    enter("cuStreamGetPriority", || unsafe {
        store(place, stream_of(handle)?.priority())
    })
}

unsafe extern "C" fn get_id(handle: *mut c_void, place: *mut u64) -> CUresult {
    // SAFETY: the caller passes null or a place for the number.
    enter("cuStreamGetId", || unsafe {
        store(place, stream_of(handle)?.number())
    })
}

unsafe extern "C" fn launch_host_func(
    handle: *mut c_void,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
) -> CUresult {
    enter("cuLaunchHostFunc", || {
        let function = function.ok_or(CUresult::ERROR_INVALID_VALUE)?;
        stream_of(handle)?.submit_host(HostCall { function, argument })
    })
}

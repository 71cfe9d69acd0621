//! `cuCtx*`: the current context and its properties.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::call::{enter, store};
use super::capture;
use super::context::{self, Context};
use crate::result::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuCtxCreate_v2", create_v2 as *const c_void),
        (c"cuCtxCreate_v3", create_v3 as *const c_void),
        (c"cuCtxCreate_v4", create_v4 as *const c_void),
        (c"cuCtxDestroy", destroy as *const c_void),
        (c"cuCtxDestroy_v2", destroy as *const c_void),
        (c"cuCtxGetCurrent", get_current as *const c_void),
        (c"cuCtxSetCurrent", set_current as *const c_void),
        (c"cuCtxPushCurrent", push_current as *const c_void),
        (c"cuCtxPushCurrent_v2", push_current as *const c_void),
        (c"cuCtxPopCurrent", pop_current as *const c_void),
        (c"cuCtxPopCurrent_v2", pop_current as *const c_void),
        (c"cuCtxGetDevice", get_device as *const c_void),
        (c"cuCtxGetDevice_v2", get_device_v2 as *const c_void),
        (c"cuCtxGetId", get_id as *const c_void),
        (c"cuCtxGetApiVersion", get_api_version as *const c_void),
        (c"cuCtxGetFlags", get_flags as *const c_void),
        (c"cuCtxSetFlags", set_flags as *const c_void),
        (c"cuCtxGetLimit", get_limit as *const c_void),
        (c"cuCtxSetLimit", set_limit as *const c_void),
        (c"cuCtxGetCacheConfig", get_cache_config as *const c_void),
        (c"cuCtxSetCacheConfig", set_cache_config as *const c_void),
        (
            c"cuCtxGetStreamPriorityRange",
            get_stream_priority_range as *const c_void,
        ),
        (c"cuCtxSynchronize", synchronize as *const c_void),
        (c"cuCtxSynchronize_v2", synchronize_v2 as *const c_void),
        (
            c"cuCtxEnablePeerAccess",
            enable_peer_access as *const c_void,
        ),
        (
            c"cuCtxDisablePeerAccess",
            disable_peer_access as *const c_void,
        ),
    ]
}

/// Stream priorities range from 0 to this value; they have no effect.
pub(super) const GREATEST_PRIORITY: c_int = -5;

fn create(place: *mut *mut c_void, flags: c_uint, device: c_int) -> CUresult {
    enter("cuCtxCreate", || {
        if place.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let context = Context::create_own(device, flags)?;
        // SAFETY: not null, and the caller passes a place for the context.
        unsafe { store(place, context.handle())? };
        context::push(context);
        Ok(())
    })
}

unsafe extern "C" fn create_v2(place: *mut *mut c_void, flags: c_uint, device: c_int) -> CUresult {
    create(place, flags, device)
}

unsafe extern "C" fn create_v3(
    place: *mut *mut c_void,
    _affinity: *mut c_void,
    affinities: c_int,
    flags: c_uint,
    device: c_int,
) -> CUresult {
    if affinities != 0 {
        return CUresult::ERROR_NOT_SUPPORTED;
    }
    create(place, flags, device)
}

unsafe extern "C" fn create_v4(
    place: *mut *mut c_void,
    parameters: *mut c_void,
    flags: c_uint,
    device: c_int,
) -> CUresult {
    if !parameters.is_null() {
        return CUresult::ERROR_NOT_SUPPORTED;
    }
    create(place, flags, device)
}

unsafe extern "C" fn destroy(handle: *mut c_void) -> CUresult {
    enter("cuCtxDestroy", || {
        let context = Context::lookup(handle)?;
        if context.primary() {
            return Err(CUresult::ERROR_INVALID_CONTEXT);
        }
        if context::current_handle() == handle {
            context::set_current(None);
        }
        context.destroy();
        Ok(())
    })
}

unsafe extern "C" fn get_current(place: *mut *mut c_void) -> CUresult {
    // SAFETY: the caller passes null or a place for the context.
    enter("cuCtxGetCurrent", || unsafe {
        store(place, context::current_handle())
    })
}

unsafe extern "C" fn set_current(handle: *mut c_void) -> CUresult {
    enter("cuCtxSetCurrent", || {
        let context = if handle.is_null() {
            None
        } else {
            Some(Context::lookup(handle)?)
        };
        context::set_current(context);
        Ok(())
    })
}

unsafe extern "C" fn push_current(handle: *mut c_void) -> CUresult {
    enter("cuCtxPushCurrent", || {
        context::push(Context::lookup(handle)?);
        Ok(())
    })
}

unsafe extern "C" fn pop_current(place: *mut *mut c_void) -> CUresult {
    enter("cuCtxPopCurrent", || {
        let context = context::pop()?;
        if place.is_null() {
            return Ok(());
        }
        // SAFETY: not null, and the caller passes a place for the context.
        unsafe { store(place, context.handle()) }
    })
}

unsafe extern "C" fn get_device(place: *mut c_int) -> CUresult {
    // SAFETY: the caller passes null or a place for the device.
    enter("cuCtxGetDevice", || unsafe {
        store(place, context::current_in_any_state()?.device())
    })
}

/// Returns the context of a handle, or the current one if the handle is null.
fn given_or_current(handle: *mut c_void) -> Result<Arc<Context>, CUresult> {
    if handle.is_null() {
        context::current()
    } else {
        Context::lookup(handle)
    }
}

unsafe extern "C" fn get_device_v2(place: *mut c_int, handle: *mut c_void) -> CUresult {
    // SAFETY: the caller passes null or a place for the device.
    enter("cuCtxGetDevice", || unsafe {
        store(place, given_or_current(handle)?.device())
    })
}

unsafe extern "C" fn get_id(handle: *mut c_void, place: *mut u64) -> CUresult {
    // SAFETY: the caller passes null or a place for the number.
    enter("cuCtxGetId", || unsafe {
        store(place, u64::from(given_or_current(handle)?.number()))
    })
}

unsafe extern "C" fn get_api_version(handle: *mut c_void, place: *mut c_uint) -> CUresult {
    enter("cuCtxGetApiVersion", || {
        given_or_current(handle)?;
        // SAFETY: the caller passes null or a place for the number.
        unsafe { store(place, 3020) }
    })
}

unsafe extern "C" fn get_flags(place: *mut c_uint) -> CUresult {
    // SAFETY: the caller passes null or a place for the flags.
    enter("cuCtxGetFlags", || unsafe {
        store(place, context::current()?.flags().load(Ordering::Relaxed))
    })
}

unsafe extern "C" fn set_flags(flags: c_uint) -> CUresult {
    enter("cuCtxSetFlags", || {
        context::current()?.flags().store(flags, Ordering::Relaxed);
        Ok(())
    })
}

unsafe extern "C" fn get_limit(place: *mut usize, limit: c_int) -> CUresult {
    enter("cuCtxGetLimit", || {
        context::current()?;
        let value = match limit {
            0 => 1 << 10, // stack of a thread
            1 => 1 << 20, // printf buffer
            2 => 8 << 20, // heap
            _ => return Err(CUresult::ERROR_INVALID_VALUE),
        };
        // SAFETY: the caller passes null or a place for the number.
        unsafe { store(place, value) }
    })
}

unsafe extern "C" fn set_limit(limit: c_int, _value: usize) -> CUresult {
    enter("cuCtxSetLimit", || {
        context::current()?;
        // These are limits of kernels on a GPU, which have no effect here.
        if (0..=2).contains(&limit) {
            Ok(())
        } else {
            Err(CUresult::ERROR_INVALID_VALUE)
        }
    })
}

unsafe extern "C" fn get_cache_config(place: *mut c_uint) -> CUresult {
    enter("cuCtxGetCacheConfig", || {
        context::current()?;
        // SAFETY: the caller passes null or a place for the value.
        unsafe { store(place, 0) }
    })
}

unsafe extern "C" fn set_cache_config(_config: c_uint) -> CUresult {
    enter("cuCtxSetCacheConfig", || context::current().map(drop))
}

unsafe extern "C" fn get_stream_priority_range(
    least: *mut c_int,
    greatest: *mut c_int,
) -> CUresult {
    enter("cuCtxGetStreamPriorityRange", || {
        context::current()?;
        for (place, value) in [(least, 0), (greatest, GREATEST_PRIORITY)] {
            if !place.is_null() {
                // SAFETY: not null, and the caller passes places for the two.
                unsafe { store(place, value)? };
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn synchronize() -> CUresult {
    enter("cuCtxSynchronize", || {
        let context = context::current()?;
        capture::unsafe_use_of_all(&context)?;
        context.synchronize()
    })
}

unsafe extern "C" fn synchronize_v2(handle: *mut c_void) -> CUresult {
    enter("cuCtxSynchronize", || {
        let context = given_or_current(handle)?;
        capture::unsafe_use_of_all(&context)?;
        context.synchronize()
    })
}

unsafe extern "C" fn enable_peer_access(peer: *mut c_void, flags: c_uint) -> CUresult {
    enter("cuCtxEnablePeerAccess", || {
        let (context, peer) = (context::current()?, Context::lookup(peer)?);
        if flags != 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        if peer.device() == context.device() {
            return Err(CUresult::ERROR_INVALID_DEVICE);
        }
        if context.set_peer(&peer, true) {
            Ok(())
        } else {
            Err(CUresult::ERROR_PEER_ACCESS_ALREADY_ENABLED)
        }
    })
}

unsafe extern "C" fn disable_peer_access(peer: *mut c_void) -> CUresult {
    enter("cuCtxDisablePeerAccess", || {
        let (context, peer) = (context::current()?, Context::lookup(peer)?);
        if context.set_peer(&peer, false) {
            Ok(())
        } else {
            Err(CUresult::ERROR_PEER_ACCESS_NOT_ENABLED)
        }
    })
}

//! Pinned host memory. Devices use the same addresses for it as the host.

use std::ffi::{c_uint, c_void};

use super::call::{enter, store};
use super::{capture, context};
use crate::exec;
use crate::memory;
use crate::result::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuMemHostAlloc", alloc as *const c_void),
        (c"cuMemAllocHost_v2", alloc_host as *const c_void),
        (c"cuMemFreeHost", free as *const c_void),
        (c"cuMemHostRegister_v2", register as *const c_void),
        (c"cuMemHostUnregister", unregister as *const c_void),
        (c"cuMemHostGetFlags", get_flags as *const c_void),
        (
            c"cuMemHostGetDevicePointer_v2",
            get_device_pointer as *const c_void,
        ),
    ]
}

unsafe extern "C" fn alloc(place: *mut *mut c_void, size: usize, flags: c_uint) -> CUresult {
    block("cuMemHostAlloc", place, size, flags)
}

unsafe extern "C" fn alloc_host(place: *mut *mut c_void, size: usize) -> CUresult {
    block("cuMemAllocHost", place, size, 0)
}

fn block(function: &'static str, place: *mut *mut c_void, size: usize, flags: c_uint) -> CUresult {
    enter(function, || {
        // PORTABLE, DEVICEMAP and WRITECOMBINED make no difference here.
        if place.is_null() || flags > 7 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        capture::unsafe_call()?;
        let context = context::current()?;
        let block = memory::allocate_host(size, context.device(), flags)?;
        // SAFETY: not null, and the caller passes a place for the address.
        unsafe { store(place, block.cast()) }
    })
}

/// Waits for all work that may use a block: on its device, and for a portable block on all devices.
fn settle(address: *mut c_void) -> Result<(), CUresult> {
    capture::unsafe_call()?;
    let block = memory::host_block(address.addr()).ok_or(CUresult::ERROR_INVALID_VALUE)?;
    exec::synchronize_device(block.device);
    if block.flags & PORTABLE != 0 {
        (0..crate::visible::count() as i32).for_each(exec::synchronize_device);
    }
    Ok(())
}

/// Pinned for all devices.
const PORTABLE: c_uint = 1;

unsafe extern "C" fn free(address: *mut c_void) -> CUresult {
    enter("cuMemFreeHost", || {
        if address.is_null() {
            return Ok(());
        }
        settle(address)?;
        memory::free_host(address.addr())?;
        context::current().map(drop)
    })
}

unsafe extern "C" fn register(address: *mut c_void, size: usize, flags: c_uint) -> CUresult {
    enter("cuMemHostRegister", || {
        let context = context::current()?;
        memory::register_host(address.expose_provenance(), size, context.device(), flags)
    })
}

unsafe extern "C" fn unregister(address: *mut c_void) -> CUresult {
    enter("cuMemHostUnregister", || {
        settle(address).map_err(|_| CUresult::ERROR_HOST_MEMORY_NOT_REGISTERED)?;
        memory::unregister_host(address.addr())
    })
}

unsafe extern "C" fn get_flags(place: *mut c_uint, address: *mut c_void) -> CUresult {
    enter("cuMemHostGetFlags", || {
        let block = memory::host_block(address.addr()).ok_or(CUresult::ERROR_INVALID_VALUE)?;
        // SAFETY: the caller passes null or a place for the flags.
        unsafe { store(place, block.flags) }
    })
}

unsafe extern "C" fn get_device_pointer(
    place: *mut u64,
    address: *mut c_void,
    flags: c_uint,
) -> CUresult {
    enter("cuMemHostGetDevicePointer", || {
        let block = memory::host_block(address.addr());
        if flags != 0 || block.is_none() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller passes null or a place for the address.
        unsafe { store(place, address.addr() as u64) }
    })
}

//! Sharing of `cuMemAlloc` memory between processes: `cuIpc*`.

use std::ffi::{c_uint, c_void};

use super::call::{enter, store};
use super::context;
use crate::exec;
use crate::memory::ipc::{self, Handle};
use crate::result::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuIpcGetMemHandle", get_mem_handle as *const c_void),
        (c"cuIpcOpenMemHandle_v2", open_mem_handle as *const c_void),
        (c"cuIpcCloseMemHandle", close_mem_handle as *const c_void),
    ]
}

/// `CUipcMemHandle`, which C passes by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct Sent {
    bytes: Handle,
}

unsafe extern "C" fn get_mem_handle(place: *mut Sent, address: u64) -> CUresult {
    enter("cuIpcGetMemHandle", || {
        let bytes = ipc::handle_of(address)?;
        // SAFETY: the caller passes null or a place for the handle.
        unsafe { store(place, Sent { bytes }) }
    })
}

unsafe extern "C" fn open_mem_handle(place: *mut u64, handle: Sent, flags: c_uint) -> CUresult {
    /// The only flag, which is mandatory.
    const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
    enter("cuIpcOpenMemHandle", || {
        let context = context::current()?;
        if place.is_null() || flags != LAZY_ENABLE_PEER_ACCESS {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let address = ipc::open(&handle.bytes, context.device(), context.number())?;
        // SAFETY: not null, and the caller passes a place for the address.
        unsafe { store(place, address) }
    })
}

unsafe extern "C" fn close_mem_handle(address: u64) -> CUresult {
    // Waits for all work on the device, which may still use the memory.
    enter("cuIpcCloseMemHandle", || {
        ipc::close(address, exec::synchronize_device)
    })
}

//! Functions of a table, called by name with their C argument types.

// Each test file uses its own part of this.
#![allow(dead_code, unused_macros, unused_imports)]

use std::ffi::{CStr, c_uint, c_void};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The address of a function of a table.
pub(crate) fn address_in(table: &[(&'static CStr, *const c_void)], name: &CStr) -> *const c_void {
    let found = table.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("{name:?}")).1
}

/// The address of a driver function.
pub(crate) fn driver(name: &CStr) -> *const c_void {
    address_in(&cuda_emulator::driver::symbols(), name)
}

/// Calls the function at an address.
macro_rules! call_at {
    ($address:expr; $($argument:expr => $type:ty),* $(,)?) => {{
        // SAFETY: the types are those of the function in C.
        let function: unsafe extern "C" fn($($type),*) -> u32 = unsafe { std::mem::transmute($address) };
        // SAFETY: the test keeps the function's contract, or breaks it where the function looks.
        unsafe { function($($argument),*) }
    }};
}
pub(crate) use call_at;

/// Calls a driver function by name.
macro_rules! cu {
    ($name:literal $(, $argument:expr => $type:ty)* $(,)?) => {
        crate::functions::call_at!(crate::functions::driver($name); $($argument => $type),*)
    };
}
pub(crate) use cu;

pub(crate) type Handle = *mut c_void;

pub(crate) const NULL: Handle = std::ptr::null_mut();

/// Returns the handle that a function creates.
pub(crate) fn made(make: impl FnOnce(*mut Handle) -> u32) -> Handle {
    let mut handle = NULL;
    assert_eq!(make(&raw mut handle), 0);
    handle
}

/// Makes the primary context of a device the calling thread's.
pub(crate) fn enter(device: i32) {
    assert_eq!(cu!(c"cuInit", 0 => c_uint), 0);
    let context =
        made(|place| cu!(c"cuDevicePrimaryCtxRetain", place => *mut Handle, device => i32));
    assert_eq!(cu!(c"cuCtxSetCurrent", context => Handle), 0);
}

/// Creates a non-blocking stream.
pub(crate) fn stream() -> Handle {
    made(|place| cu!(c"cuStreamCreate", place => *mut Handle, 1 => c_uint))
}

pub(crate) fn event() -> Handle {
    made(|place| cu!(c"cuEventCreate", place => *mut Handle, 2 => c_uint))
}

/// Begins a capture that forbids nothing to other threads.
pub(crate) fn begin(stream: Handle) {
    assert_eq!(
        cu!(c"cuStreamBeginCapture_v2", stream => Handle, 2 => c_uint),
        0
    );
}

pub(crate) fn end(stream: Handle) -> Handle {
    made(|place| cu!(c"cuStreamEndCapture", stream => Handle, place => *mut Handle))
}

/// Waits until the condition holds.
pub(crate) fn until(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

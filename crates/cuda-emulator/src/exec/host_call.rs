//! Host functions: a program's own functions that its streams and graphs call.

use std::cell::Cell;
use std::ffi::c_void;

/// A function of the caller's, with its argument.
#[derive(Clone, Copy)]
pub struct HostCall {
    /// The function.
    pub function: unsafe extern "C" fn(*mut c_void),
    /// Its argument.
    pub argument: *mut c_void,
}

// SAFETY: by the contract of `cuLaunchHostFunc` and `cuGraphAddHostNode` the driver may call the function on any thread.
unsafe impl Send for HostCall {}
// SAFETY: as above; two numbers that are only read.
unsafe impl Sync for HostCall {}

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the calling thread runs a host function.
pub(super) fn in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

impl HostCall {
    /// Calls the function; it may not call the driver meanwhile.
    pub(super) fn make(self) {
        let before = IN_HOST_FUNCTION.replace(true);
        // SAFETY: by the same contract function and argument are valid until the call has been made.
        unsafe { (self.function)(self.argument) };
        IN_HOST_FUNCTION.set(before);
    }
}

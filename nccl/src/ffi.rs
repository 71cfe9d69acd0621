//! The choke point of all calls into NCCL: turns a code into a result and captures NCCL's text at once.

use std::ffi::{CStr, c_char};

use nccl_sys as sys;

use crate::error::NcclFailure;
use crate::library::Library;

/// `c_char` is signed on x86-64 and unsigned on aarch64.
pub(crate) const fn byte(c: c_char) -> u8 {
    c.to_ne_bytes()[0]
}

/// See [`byte`].
pub(crate) const fn c_byte(b: u8) -> c_char {
    c_char::from_ne_bytes([b])
}

/// The outcome of `call`: `ncclSuccess` and `ncclInProgress` are no failures.
#[inline]
pub(crate) fn check(
    library: &Library,
    call: &'static str,
    code: sys::ncclResult_t,
) -> Result<Progress, NcclFailure> {
    match code {
        sys::ncclResult_t::ncclSuccess => Ok(Progress::Done),
        sys::ncclResult_t::ncclInProgress => Ok(Progress::Pending),
        code => Err(failure(library, call, code)),
    }
}

/// The failure of a function that every supported release has, found missing.
#[cold]
pub(crate) fn missing(library: &Library, call: &'static str) -> NcclFailure {
    failure(library, call, sys::ncclResult_t::ncclInternalError)
}

/// How far a call that did not fail has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    /// The communicator has to be polled before anything else is asked of it.
    Pending,
}

#[cold]
pub(crate) fn failure(
    library: &Library,
    call: &'static str,
    code: sys::ncclResult_t,
) -> NcclFailure {
    let last_error = match library.api().ncclGetLastError {
        // SAFETY: the communicator argument is ignored by every release and may be null; the result
        // is null or a NUL-terminated buffer of the library, copied before anything else is called.
        Some(get) => unsafe { text(get(std::ptr::null_mut())) },
        None => String::new(),
    };
    let description = match library.api().ncclGetErrorString {
        // SAFETY: any code is answered with a static string.
        Some(get) => unsafe { text(get(code)) },
        None => String::from("unknown result code"),
    };
    NcclFailure::new(call, code, description, last_error)
}

/// # Safety
/// `text` is null or points to a NUL-terminated string that nobody writes during the call.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, and NUL-terminated by the contract of this function.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .trim()
        .to_owned()
}

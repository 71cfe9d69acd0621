//! The single place through which results of NCCL calls pass: turns a code into a result and captures NCCL's error text at once.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU8, Ordering};

use nccl_sys as sys;

use crate::error::NcclFailure;
use crate::library::Library;
use nccl_base::warning::is_harmless;

/// `c_char` is signed on x86-64 and unsigned on aarch64.
pub(crate) const fn byte(c: c_char) -> u8 {
    c.to_ne_bytes()[0]
}

/// The inverse of [`byte`].
pub(crate) const fn c_byte(b: u8) -> c_char {
    c_char::from_ne_bytes([b])
}

/// Returns the outcome of `call`; `ncclSuccess` and `ncclInProgress` are not failures.
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

/// Returns the failure for a missing function, which every supported release should have.
#[cold]
pub(crate) fn missing(library: &Library, call: &'static str) -> NcclFailure {
    failure(library, call, sys::ncclResult_t::ncclInternalError)
}

/// The progress of a call that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    /// The communicator has to be polled before another call.
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
        // is null or a buffer of the library, whose last byte is never anything but NUL.
        Some(get) => unsafe { changing_text(get(std::ptr::null_mut())) },
        None => String::new(),
    };
    // A harmless warning does not explain a failure.
    let last_error = Some(last_error).filter(|text| !is_harmless(text));
    let last_error = last_error.unwrap_or_default();
    let description = match library.api().ncclGetErrorString {
        // SAFETY: any code is answered with a static string.
        Some(get) => unsafe { text(get(code)) },
        None => String::from("unknown result code"),
    };
    if !last_error.is_empty() {
        tracing::warn!(
            name: "nccl.ncclwarn",
            target: "nccl",
            call,
            code = code.0,
            warning = last_error,
            "NCCL's last warning, as {call} failed: {last_error}"
        );
    }
    NcclFailure::new(call, code, description, last_error)
}

/// Copies a C string that does not change.
///
/// # Safety
/// `text` is null or points to such a string.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller guarantees a C string.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().trim().to_owned()
}

/// Copies a C string that another thread may be changing. NCCL keeps its last error in one buffer for all threads;
/// the copy may mix two texts.
///
/// # Safety
/// `text` is null or points to a string in writable memory that contains a NUL at every moment, and stays at
/// this address.
unsafe fn changing_text(text: *const c_char) -> String {
    let mut bytes = Vec::new();
    if !text.is_null() {
        for index in 0.. {
            // SAFETY: not null, and no NUL came before this byte. Other threads write to it byte by byte.
            let read = unsafe { AtomicU8::from_ptr(text.add(index).cast_mut().cast()) };
            match read.load(Ordering::Relaxed) {
                0 => break,
                read => bytes.push(read),
            }
        }
    }
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_c_string_is_copied_up_to_its_end() {
        // SAFETY: a constant string.
        assert_eq!(unsafe { text(c" two words\n".as_ptr()) }, "two words");
        let mut changing = *b"two words\n\0and";
        // SAFETY: a writable string that no other code accesses.
        let read = unsafe { changing_text(changing.as_mut_ptr().cast()) };
        assert_eq!(read, "two words");
        // SAFETY: null is allowed.
        assert_eq!(unsafe { text(std::ptr::null()) }, "");
        // SAFETY: null is allowed.
        assert_eq!(unsafe { changing_text(std::ptr::null()) }, "");
    }
}

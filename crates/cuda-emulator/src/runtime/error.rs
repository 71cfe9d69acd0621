//! Codes, their names and texts, and the last error of each thread.
//!
//! A failed call sets the thread's last error; a successful call leaves it unchanged, and so does `cudaErrorNotReady`, which is
//! not a failure. A query of the last error resets it, unless it is the sticky error of the current context.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};

use crate::driver::call::caught;
use crate::driver::{CUresult, context};
use stand_in_object::Symbol;

/// A `cudaError_t`. It has the number of the `CUresult` of the same meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Code(pub u32);

impl From<CUresult> for Code {
    fn from(result: CUresult) -> Self {
        Self(result.0)
    }
}

macro_rules! codes {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        /// Number, name and text of each code that a function here may return.
        static NAMES: &[(u32, &CStr, &CStr)] = &[
            $(($value, {
                const NAME: &str = concat!(stringify!($name), "\0");
                match CStr::from_bytes_with_nul(NAME.as_bytes()) { Ok(name) => name, Err(_) => c"" }
            }, $text),)*
        ];
    };
}

impl Code {
    /// `cudaSuccess`.
    pub(super) const SUCCESS: Self = Self(0);
    /// `cudaErrorInvalidValue`.
    pub(super) const INVALID_VALUE: Self = Self(1);
    /// `cudaErrorInvalidConfiguration`.
    pub(super) const INVALID_CONFIGURATION: Self = Self(9);
    /// `cudaErrorInvalidMemcpyDirection`.
    pub(super) const INVALID_MEMCPY_DIRECTION: Self = Self(21);
    /// `cudaErrorInvalidDeviceFunction`.
    pub(super) const INVALID_DEVICE_FUNCTION: Self = Self(98);
    /// `cudaErrorInvalidDevice`.
    pub(super) const INVALID_DEVICE: Self = Self(101);
    /// `cudaErrorSymbolNotFound`.
    pub(super) const SYMBOL_NOT_FOUND: Self = Self(500);
    /// `cudaErrorNotReady`.
    const NOT_READY: Self = Self(600);
}

codes! {
    cudaSuccess = 0, c"no error";
    cudaErrorInvalidValue = 1, c"invalid argument";
    cudaErrorMemoryAllocation = 2, c"out of memory";
    cudaErrorInitializationError = 3, c"initialization error";
    cudaErrorCudartUnloading = 4, c"driver shutting down";
    cudaErrorInvalidConfiguration = 9, c"invalid configuration argument";
    cudaErrorInvalidMemcpyDirection = 21, c"invalid copy direction for memcpy";
    cudaErrorInsufficientDriver = 35, c"CUDA driver version is insufficient for CUDA runtime version";
    cudaErrorInvalidDeviceFunction = 98, c"invalid device function";
    cudaErrorNoDevice = 100, c"no CUDA-capable device is detected";
    cudaErrorInvalidDevice = 101, c"invalid device ordinal";
    cudaErrorDeviceUninitialized = 201, c"invalid device context";
    cudaErrorPeerAccessUnsupported = 217, c"peer access is not supported between these two devices";
    cudaErrorInvalidPtx = 218, c"a PTX JIT compilation failed";
    cudaErrorFileNotFound = 301, c"file not found";
    cudaErrorOperatingSystem = 304, c"OS call failed or operation not supported on this OS";
    cudaErrorInvalidResourceHandle = 400, c"invalid resource handle";
    cudaErrorIllegalState = 401, c"the operation cannot be performed in the present state";
    cudaErrorLossyQuery = 402, c"attempted introspection would be semantically lossy";
    cudaErrorSymbolNotFound = 500, c"named symbol not found";
    cudaErrorNotReady = 600, c"device not ready";
    cudaErrorIllegalAddress = 700, c"an illegal memory access was encountered";
    cudaErrorLaunchOutOfResources = 701, c"too many resources requested for launch";
    cudaErrorLaunchTimeout = 702, c"the launch timed out and was terminated";
    cudaErrorPeerAccessAlreadyEnabled = 704, c"peer access is already enabled";
    cudaErrorPeerAccessNotEnabled = 705, c"peer access has not been enabled";
    cudaErrorSetOnActiveProcess = 708, c"cannot set while device is active in this process";
    cudaErrorContextIsDestroyed = 709, c"context is destroyed";
    cudaErrorHostMemoryAlreadyRegistered = 712, c"part or all of the requested memory range is already mapped";
    cudaErrorHostMemoryNotRegistered = 713, c"pointer does not correspond to a registered memory region";
    cudaErrorIllegalInstruction = 715, c"an illegal instruction was encountered";
    cudaErrorMisalignedAddress = 716, c"misaligned address";
    cudaErrorLaunchFailure = 719, c"unspecified launch failure";
    cudaErrorNotPermitted = 800, c"operation not permitted";
    cudaErrorNotSupported = 801, c"operation not supported";
    cudaErrorSystemNotReady = 802, c"system not yet initialized";
    cudaErrorStreamCaptureUnsupported = 900, c"operation not permitted when stream is capturing";
    cudaErrorStreamCaptureInvalidated = 901, c"operation failed due to a previous error during capture";
    cudaErrorStreamCaptureMerge = 902, c"operation would result in a merge of separate capture sequences";
    cudaErrorStreamCaptureUnmatched = 903, c"capture was not ended in the same stream as it began";
    cudaErrorStreamCaptureUnjoined = 904, c"capturing stream has unjoined work";
    cudaErrorStreamCaptureIsolation = 905, c"dependency created on uncaptured work in another stream";
    cudaErrorStreamCaptureImplicit = 906, c"operation would make the legacy stream depend on a capturing blocking stream";
    cudaErrorCapturedEvent = 907, c"operation not permitted on an event last recorded in a capturing stream";
    cudaErrorStreamCaptureWrongThread = 908, c"attempt to terminate a thread-local capture sequence from another thread";
    cudaErrorTimeout = 909, c"wait operation timed out";
    cudaErrorUnknown = 999, c"unknown error";
}

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cudaGetLastError", get_last_error as *const c_void),
        (c"cudaPeekAtLastError", peek_at_last_error as *const c_void),
        (c"cudaGetErrorName", get_error_name as *const c_void),
        (c"cudaGetErrorString", get_error_string as *const c_void),
    ]
}

thread_local! {
    static LAST: Cell<Code> = const { Cell::new(Code::SUCCESS) };
}

/// Runs the body of a runtime function. Catches a panic, and sets the thread's last error.
pub(super) fn run(body: impl FnOnce() -> Result<(), Code>) -> Code {
    let code = caught(|| body().map_err(|code| CUresult(code.0))).into();
    if code != Code::SUCCESS && code != Code::NOT_READY {
        LAST.set(code);
    }
    code
}

unsafe extern "C" fn get_last_error() -> Code {
    let last = LAST.get();
    let sticks = context::current_in_any_state()
        .and_then(|context| context.check())
        .is_err_and(|sticky| Code::from(sticky) == last);
    if !sticks {
        LAST.set(Code::SUCCESS);
    }
    last
}

unsafe extern "C" fn peek_at_last_error() -> Code {
    LAST.get()
}

unsafe extern "C" fn get_error_name(code: u32) -> *const c_char {
    known(code)
        .map_or(c"unrecognized error code", |known| known.1)
        .as_ptr()
}

unsafe extern "C" fn get_error_string(code: u32) -> *const c_char {
    known(code)
        .map_or(c"unrecognized error code", |known| known.2)
        .as_ptr()
}

fn known(code: u32) -> Option<&'static (u32, &'static CStr, &'static CStr)> {
    NAMES.iter().find(|known| known.0 == code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result;

    #[test]
    fn every_code_of_the_driver_has_a_name_in_the_runtime_and_the_same_text() {
        for (code, name, text) in result::NAMES {
            let known = known(*code).unwrap_or_else(|| panic!("{name:?}"));
            assert_eq!(known.2, *text, "{name:?}");
        }
    }
}

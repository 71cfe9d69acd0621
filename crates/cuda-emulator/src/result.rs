//! `CUresult` as an open code: the values that every CUDA since 11.4 has.

/// A code that driver functions return. cudarc decodes it as a Rust enum, so only codes listed here
/// may leave the crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct CUresult(pub u32);

macro_rules! results {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        // Each code is defined for its name; not all of them are returned.
        #[allow(dead_code)]
        impl CUresult {
            $($(#[$doc])* #[doc = concat!("`CUDA_", stringify!($name), "`.")] pub const $name: Self = Self($value);)*
        }

        /// Name and text of each known code.
        pub static NAMES: &[(u32, &std::ffi::CStr, &std::ffi::CStr)] = &[
            $(($value, {
                const NAME: &str = concat!("CUDA_", stringify!($name), "\0");
                // The list below spells each name without its prefix.
                match std::ffi::CStr::from_bytes_with_nul(NAME.as_bytes()) { Ok(s) => s, Err(_) => panic!() }
            }, $text),)*
        ];
    };
}

results! {
    SUCCESS = 0, c"no error";
    ERROR_INVALID_VALUE = 1, c"invalid argument";
    ERROR_OUT_OF_MEMORY = 2, c"out of memory";
    ERROR_NOT_INITIALIZED = 3, c"initialization error";
    ERROR_DEINITIALIZED = 4, c"driver shutting down";
    ERROR_NO_DEVICE = 100, c"no CUDA-capable device is detected";
    ERROR_INVALID_DEVICE = 101, c"invalid device ordinal";
    ERROR_INVALID_CONTEXT = 201, c"invalid device context";
    ERROR_INVALID_PTX = 218, c"a PTX JIT compilation failed";
    ERROR_FILE_NOT_FOUND = 301, c"file not found";
    ERROR_OPERATING_SYSTEM = 304, c"OS call failed or operation not supported on this OS";
    ERROR_INVALID_HANDLE = 400, c"invalid resource handle";
    ERROR_ILLEGAL_STATE = 401, c"the operation cannot be performed in the present state";
    ERROR_NOT_FOUND = 500, c"named symbol not found";
    ERROR_NOT_READY = 600, c"device not ready";
    ERROR_ILLEGAL_ADDRESS = 700, c"an illegal memory access was encountered";
    ERROR_PEER_ACCESS_ALREADY_ENABLED = 704, c"peer access is already enabled";
    ERROR_PEER_ACCESS_NOT_ENABLED = 705, c"peer access has not been enabled";
    ERROR_PRIMARY_CONTEXT_ACTIVE = 708, c"cannot set while device is active in this process";
    ERROR_CONTEXT_IS_DESTROYED = 709, c"context is destroyed";
    ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712, c"part or all of the requested memory range is already mapped";
    ERROR_HOST_MEMORY_NOT_REGISTERED = 713, c"pointer does not correspond to a registered memory region";
    ERROR_MISALIGNED_ADDRESS = 716, c"misaligned address";
    ERROR_LAUNCH_FAILED = 719, c"unspecified launch failure";
    ERROR_NOT_PERMITTED = 800, c"operation not permitted";
    ERROR_NOT_SUPPORTED = 801, c"operation not supported";
    ERROR_STREAM_CAPTURE_UNSUPPORTED = 900, c"operation not permitted when stream is capturing";
    ERROR_STREAM_CAPTURE_INVALIDATED = 901, c"operation failed due to a previous error during capture";
    ERROR_STREAM_CAPTURE_MERGE = 902, c"operation would result in a merge of separate capture sequences";
    ERROR_STREAM_CAPTURE_UNMATCHED = 903, c"capture was not ended in the same stream as it began";
    ERROR_STREAM_CAPTURE_UNJOINED = 904, c"capturing stream has unjoined work";
    ERROR_STREAM_CAPTURE_ISOLATION = 905, c"dependency created on uncaptured work in another stream";
    ERROR_STREAM_CAPTURE_IMPLICIT = 906, c"operation would make the legacy stream depend on a capturing blocking stream";
    ERROR_CAPTURED_EVENT = 907, c"operation not permitted on an event last recorded in a capturing stream";
    ERROR_STREAM_CAPTURE_WRONG_THREAD = 908, c"attempt to terminate a thread-local capture sequence from another thread";
    ERROR_TIMEOUT = 909, c"wait operation timed out";
    ERROR_UNKNOWN = 999, c"unknown error";
}

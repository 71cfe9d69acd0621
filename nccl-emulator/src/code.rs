//! `ncclResult_t` inside the emulator, and the texts of the codes.

use std::ffi::CStr;

use nccl_sys::ncclResult_t;

use crate::version;

/// The result of NCCL functions: `Ok`, or a code other than success. [`IN_PROGRESS`] is an error here, so that `?` also returns
/// early on it.
pub(crate) type Result<T = ()> = std::result::Result<T, Code>;

/// A code other than `ncclSuccess`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(u32);

pub(crate) const UNHANDLED_CUDA: Code = Code(1);
pub(crate) const SYSTEM: Code = Code(2);
pub(crate) const INTERNAL: Code = Code(3);
pub(crate) const INVALID_ARGUMENT: Code = Code(4);
pub(crate) const INVALID_USAGE: Code = Code(5);
pub(crate) const REMOTE: Code = Code(6);
pub(crate) const IN_PROGRESS: Code = Code(7);

impl Code {
    /// Returns the code with this number, `None` for success.
    pub(crate) fn new(number: u32) -> Option<Self> {
        (number != 0).then_some(Self(number))
    }

    /// Returns the number of the code.
    pub(crate) fn number(self) -> u32 {
        self.0
    }
}

/// Returns the number of a result, 0 for success.
pub(crate) fn number(result: Result) -> u32 {
    result.map_or_else(Code::number, |()| 0)
}

/// Returns the result with this number.
pub(crate) fn result(number: u32) -> Result {
    Code::new(number).map_or(Ok(()), Err)
}

/// Converts a result for C.
pub(crate) fn to_c(result: Result) -> ncclResult_t {
    ncclResult_t(number(result))
}

/// Returns the text of `ncclGetErrorString`.
pub(crate) fn text(result: ncclResult_t) -> &'static CStr {
    match result.0 {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        8 if version::is_at_least(2, 30, 3) => c"timeout",
        _ => c"unknown result code",
    }
}

//! NCCL's log function, which is passed to plugins.
//!
//! Like `ncclDebugLogger_t` in C it takes the arguments of `printf` after the format. Stable Rust has no such functions: on
//! x86-64 an assembly function makes a `va_list` of the arguments; on other targets the format is printed without them.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::debug::{Level, enabled, print, subsystem};

/// The most bytes of a line.
const LONGEST: usize = 2048;

/// See the module.
///
/// # Safety
/// `format` is null or a C string, and the arguments after it are those that it asks for.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
pub(super) unsafe extern "C" fn log(
    level: c_int,
    flags: u64,
    file: *const c_char,
    line: c_int,
    format: *const c_char,
) {
    // The five named arguments stay where they are; the sixth is the `va_list`. Five registers are named, so that the first general argument
    // behind them is in the sixth, 40 bytes into the area of saved registers.
    std::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "sub rsp, 208",
        "mov [rsp + 40], r9",
        "test al, al",
        "je 2f",
        "movaps [rsp + 48], xmm0",
        "movaps [rsp + 64], xmm1",
        "movaps [rsp + 80], xmm2",
        "movaps [rsp + 96], xmm3",
        "movaps [rsp + 112], xmm4",
        "movaps [rsp + 128], xmm5",
        "movaps [rsp + 144], xmm6",
        "movaps [rsp + 160], xmm7",
        "2:",
        "mov dword ptr [rsp + 176], 40",
        "mov dword ptr [rsp + 180], 48",
        "lea rax, [rbp + 16]",
        "mov [rsp + 184], rax",
        "mov [rsp + 192], rsp",
        "lea r9, [rsp + 176]",
        "call {write}",
        "leave",
        "ret",
        write = sym write,
    )
}

/// See the module.
///
/// # Safety
/// `format` is null or a C string.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe extern "C" fn log(
    level: c_int,
    flags: u64,
    file: *const c_char,
    line: c_int,
    format: *const c_char,
) {
    // SAFETY: the caller's promise.
    unsafe { write(level, flags, file, line, format, std::ptr::null_mut()) };
}

/// Prints a line; without `arguments`, a `va_list`, the format as it is.
///
/// # Safety
/// As [`log`].
unsafe extern "C" fn write(
    level: c_int,
    flags: u64,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) {
    unsafe extern "C" {
        fn vsnprintf(
            to: *mut c_char,
            size: usize,
            format: *const c_char,
            arguments: *mut c_void,
        ) -> c_int;
    }
    let level = match level {
        1 => Level::Version,
        2 => Level::Warn,
        3 => Level::Info,
        _ => return,
    };
    let about = match level {
        Level::Info => flags as u32,
        _ => subsystem::ALL,
    };
    if format.is_null() || !enabled(level, about) {
        return;
    }
    let mut line = [0; LONGEST];
    let text = if arguments.is_null() {
        format
    } else {
        // SAFETY: writes at most as many bytes as there are; the rest is the caller's promise.
        unsafe { vsnprintf(line.as_mut_ptr(), line.len(), format, arguments) };
        line.as_ptr()
    };
    // SAFETY: a C string: the format, or what the call above has written and ended.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    print(level, None, format_args!("{}", text.trim_end()));
}

//! The registry of parameters: the seven that NCCL publishes, all of which are texts here.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

use nccl_sys::{ncclParamHandle_t, ncclResult_t};

use super::guard::{call, guarded, not_null};
use crate::code::{INVALID_ARGUMENT, Result};
use crate::nccl::debug::{Level, enabled, print, subsystem, warn};
use crate::nccl::environment;
use crate::version;

const KEYS: [&CStr; 7] = [
    c"NCCL_DEBUG",
    c"NCCL_DEBUG_FILE",
    c"NCCL_DEBUG_SUBSYS",
    c"NCCL_DEBUG_TIMESTAMP_FORMAT",
    c"NCCL_DEBUG_TIMESTAMP_LEVELS",
    c"NCCL_SET_THREAD_NAME",
    // Last, because older releases do not have it.
    c"NCCL_DEBUG_LEVELS",
];

/// Returns the number of parameters in the release.
fn count() -> usize {
    KEYS.len() - usize::from(!version::is_at_least(2, 32, 0))
}

/// The keys for C. C code gets the address of the table, and no code writes to it.
struct Table([*const c_char; KEYS.len()]);

// SAFETY: the pointers are to constants.
unsafe impl Sync for Table {}

static TABLE: Table = {
    let mut table = [std::ptr::null(); KEYS.len()];
    let mut at = 0;
    while at < KEYS.len() {
        table[at] = KEYS[at].as_ptr();
        at += 1;
    }
    Table(table)
};

thread_local! {
    /// The result of the last call of this thread, valid until the next one.
    static VALUE: RefCell<CString> = RefCell::default();
}

/// # Safety
/// `key` is null or a C string.
unsafe fn find(key: *const c_char) -> Result<usize> {
    not_null(key, "ncclParam", "key")?;
    // SAFETY: not null, so a C string by the caller's promise.
    let key = unsafe { CStr::from_ptr(key) };
    // Like NCCL, fails without a log line.
    KEYS[..count()]
        .iter()
        .position(|known| *known == key)
        .ok_or(INVALID_ARGUMENT)
}

fn value(at: usize) -> String {
    environment::text(&KEYS[at].to_string_lossy()).unwrap_or_default()
}

/// A handle is the address of the key in the table.
fn from_handle(handle: ncclParamHandle_t) -> Result<usize> {
    let first = TABLE.0.as_ptr().addr();
    let at = handle.addr().wrapping_sub(first) / size_of::<*const c_char>();
    if at < KEYS.len() {
        return Ok(at);
    }
    warn!("ncclParam : invalid handle {handle:p}");
    Err(INVALID_ARGUMENT)
}

pub(super) unsafe extern "C" fn ncclParamBind(
    out: *mut ncclParamHandle_t,
    key: *const c_char,
) -> ncclResult_t {
    call("ncclParamBind", std::ptr::null_mut(), || {
        not_null(out, "ncclParamBind", "out")?;
        // SAFETY: the function's contract.
        let at = unsafe { find(key)? };
        let handle = std::ptr::from_ref(&TABLE.0[at]).cast_mut().cast();
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { out.write(handle) };
        Ok(())
    })
}

macro_rules! numbers {
    ($($name:ident $type:ty;)*) => {$(
        /// Fails: no published parameter is a number.
        pub(super) unsafe extern "C" fn $name(h: ncclParamHandle_t, out: *mut $type) -> ncclResult_t {
            let _ = out;
            call(stringify!($name), std::ptr::null_mut(), || {
                let at = from_handle(h)?;
                warn!("{}: parameter {} is of another type", stringify!($name), KEYS[at].to_string_lossy());
                Err(INVALID_ARGUMENT)
            })
        }
    )*};
}

numbers! {
    ncclParamGetI8 i8;
    ncclParamGetI16 i16;
    ncclParamGetI32 i32;
    ncclParamGetI64 i64;
    ncclParamGetU8 u8;
    ncclParamGetU16 u16;
    ncclParamGetU32 u32;
    ncclParamGetU64 u64;
}

/// Stores the value for the thread and returns its address.
fn keep(value: String) -> (*const c_char, c_int) {
    let value = CString::new(value).unwrap_or_default();
    let length = value.as_bytes().len() as c_int;
    VALUE.with_borrow_mut(|kept| {
        *kept = value;
        (kept.as_ptr(), length)
    })
}

pub(super) unsafe extern "C" fn ncclParamGetStr(
    h: ncclParamHandle_t,
    out: *mut *const c_char,
) -> ncclResult_t {
    call("ncclParamGetStr", std::ptr::null_mut(), || {
        not_null(out, "ncclParamGetStr", "out")?;
        let (text, _) = keep(value(from_handle(h)?));
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { out.write(text) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclParamGet(
    h: ncclParamHandle_t,
    out: *mut c_void,
    maxLen: c_int,
    len: *mut c_int,
) -> ncclResult_t {
    call("ncclParamGet", std::ptr::null_mut(), || {
        not_null(out, "ncclParamGet", "out")?;
        let value = value(from_handle(h)?);
        if value.len() > usize::try_from(maxLen).unwrap_or(0) {
            warn!(
                "ncclParamGet : the value has {} bytes, there is room for {maxLen}",
                value.len()
            );
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the function's contract: room for `maxLen` bytes, which are enough; `len` is null
        // or writable.
        unsafe {
            std::ptr::copy_nonoverlapping(value.as_ptr(), out.cast(), value.len());
            if !len.is_null() {
                len.write(value.len() as c_int);
            }
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclParamGetParameter(
    key: *const c_char,
    out: *mut *const c_char,
    valueLen: *mut c_int,
) -> ncclResult_t {
    call("ncclParamGetParameter", std::ptr::null_mut(), || {
        not_null(out, "ncclParamGetParameter", "value")?;
        // SAFETY: the function's contract.
        let (text, length) = keep(value(unsafe { find(key)? }));
        // SAFETY: the function's contract: `out` is writable, `valueLen` is null or writable.
        unsafe {
            out.write(text);
            if !valueLen.is_null() {
                valueLen.write(length);
            }
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclParamGetAllParameterKeys(
    table: *mut *mut *const c_char,
    tableLen: *mut c_int,
) -> ncclResult_t {
    call("ncclParamGetAllParameterKeys", std::ptr::null_mut(), || {
        not_null(table, "ncclParamGetAllParameterKeys", "table")?;
        not_null(tableLen, "ncclParamGetAllParameterKeys", "tableLen")?;
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe {
            table.write(TABLE.0.as_ptr().cast_mut());
            tableLen.write(count() as c_int);
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclParamDumpAll() {
    guarded("ncclParamDumpAll", || {
        if enabled(Level::Info, subsystem::ALL) {
            for (at, key) in KEYS[..count()].iter().enumerate() {
                print(
                    Level::Info,
                    None,
                    format_args!("{}={}", key.to_string_lossy(), value(at)),
                );
            }
        }
        Ok(())
    });
}

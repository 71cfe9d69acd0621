//! Initialization of the driver, its version, and the names of errors.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use super::call::{READY, STATE, VERSION, caught, store};
use crate::forks;
use crate::result::{self, CUresult};
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuInit", init as *const c_void),
        (c"cuDriverGetVersion", driver_get_version as *const c_void),
        (c"cuGetErrorName", get_error_name as *const c_void),
        (c"cuGetErrorString", get_error_string as *const c_void),
    ]
}

unsafe extern "C" fn init(flags: c_uint) -> CUresult {
    caught(|| {
        if flags != 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        if crate::visible::count() == 0 {
            return Err(CUresult::ERROR_NO_DEVICE);
        }
        if forks::is_child() {
            eprintln!(
                "nccl-emulator: this process was forked from one that used CUDA; as with CUDA itself, it must exec \
                 before it can use it"
            );
            return Err(CUresult::ERROR_NOT_INITIALIZED);
        }
        forks::watch();
        STATE.store(READY, Ordering::Release);
        Ok(())
    })
}

unsafe extern "C" fn driver_get_version(version: *mut c_int) -> CUresult {
    // SAFETY: the caller passes null or a place for the number.
    caught(|| unsafe { store(version, VERSION) })
}

fn describe(
    error: u32,
    place: *mut *const c_char,
    text: fn(&(u32, &'static CStr, &'static CStr)) -> &'static CStr,
) -> CUresult {
    caught(|| {
        let known = result::NAMES.iter().find(|(code, _, _)| *code == error);
        // SAFETY: the caller passes null or a place for the pointer; the texts live for ever.
        unsafe {
            store(
                place,
                known.map_or(std::ptr::null(), |entry| text(entry).as_ptr()),
            )?
        };
        known.map(drop).ok_or(CUresult::ERROR_INVALID_VALUE)
    })
}

unsafe extern "C" fn get_error_name(error: u32, name: *mut *const c_char) -> CUresult {
    describe(error, name, |entry| entry.1)
}

unsafe extern "C" fn get_error_string(error: u32, text: *mut *const c_char) -> CUresult {
    describe(error, text, |entry| entry.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_names() {
        let mut name = std::ptr::null();
        // SAFETY: a place for the pointer.
        let known = unsafe { get_error_name(700, &raw mut name) };
        assert_eq!(known, CUresult::SUCCESS);
        // SAFETY: success means a C string.
        let text = unsafe { CStr::from_ptr(name) };
        assert_eq!(text, c"CUDA_ERROR_ILLEGAL_ADDRESS");
        // SAFETY: a place for the pointer.
        let unknown = unsafe { get_error_string(12_345, &raw mut name) };
        assert_eq!(unknown, CUresult::ERROR_INVALID_VALUE);
        assert!(name.is_null());
    }
}

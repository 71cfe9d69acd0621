//! Starting the driver, its version, names of errors, and `cuGetProcAddress`.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use super::{CUresult, FORKED, NEW, READY, STATE, VERSION, caught, result, store};
use crate::elf::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuInit", init as *const c_void),
        (c"cuDriverGetVersion", driver_get_version as *const c_void),
        (c"cuGetErrorName", get_error_name as *const c_void),
        (c"cuGetErrorString", get_error_string as *const c_void),
        (c"cuGetProcAddress", get_proc_address as *const c_void),
        (c"cuGetProcAddress_v2", get_proc_address_v2 as *const c_void),
    ]
}

unsafe extern "C" fn after_fork() {
    STATE.store(FORKED, Ordering::Release);
}

unsafe extern "C" fn init(flags: c_uint) -> CUresult {
    caught(|| {
        if flags != 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        if super::visible::count() == 0 {
            return Err(CUresult::ERROR_NO_DEVICE);
        }
        match STATE.compare_exchange(NEW, READY, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                // SAFETY: the handler only stores to an atomic.
                unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
                Ok(())
            }
            Err(READY) => Ok(()),
            Err(_) => {
                eprintln!(
                    "nccl-emulator: this process was forked from one that used CUDA; as with CUDA itself, it must exec \
                     before it can use it"
                );
                Err(CUresult::ERROR_NOT_INITIALIZED)
            }
        }
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

/// All functions by name.
fn table() -> &'static HashMap<&'static CStr, usize> {
    static TABLE: OnceLock<HashMap<&'static CStr, usize>> = OnceLock::new();
    TABLE.get_or_init(|| {
        super::symbols()
            .into_iter()
            .map(|(name, address)| (name, address.expose_provenance()))
            .collect()
    })
}

/// The function that `name` means to a caller built for `version` of CUDA: the newest spelling that
/// this version had.
fn find(name: &CStr, version: c_int) -> Option<*mut c_void> {
    let spelled = |suffix: &str| {
        let mut full = name.to_bytes().to_vec();
        full.extend_from_slice(suffix.as_bytes());
        full.push(0);
        let full = CStr::from_bytes_with_nul(&full).ok()?;
        // Later than their predecessors, with other arguments.
        let since = match full.to_bytes() {
            b"cuCtxCreate_v3" => 11_040,
            b"cuCtxCreate_v4" => 12_050,
            b"cuStreamGetCaptureInfo_v2" => 11_030,
            b"cuStreamGetCaptureInfo_v3"
            | b"cuStreamUpdateCaptureDependencies_v2"
            | b"cuGraphAddDependencies_v2" => 12_030,
            b"cuGetProcAddress_v2" => 12_000,
            b"cuCtxGetDevice_v2" | b"cuCtxSynchronize_v2" => 13_000,
            b"cuEventElapsedTime_v2" => 12_080,
            b"cuMemcpyBatchAsync" => 12_080,
            b"cuMemcpyBatchAsync_v2" => 13_000,
            _ => 0,
        };
        (version >= since)
            .then(|| table().get(full).copied())
            .flatten()
    };
    let address = ["_v4", "_v3", "_v2", ""].into_iter().find_map(spelled)?;
    Some(std::ptr::with_exposed_provenance_mut(address))
}

unsafe extern "C" fn get_proc_address(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> CUresult {
    // SAFETY: the same promises, without a status.
    unsafe { get_proc_address_v2(name, function, version, flags, std::ptr::null_mut()) }
}

unsafe extern "C" fn get_proc_address_v2(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    _flags: u64,
    status: *mut c_uint,
) -> CUresult {
    const NOT_FOUND: c_uint = 1;
    caught(|| {
        if name.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller passes a C string.
        let found = find(unsafe { CStr::from_ptr(name) }, version);
        if !status.is_null() {
            // SAFETY: not null, so the caller's place for the status.
            unsafe { status.write(if found.is_some() { 0 } else { NOT_FOUND }) };
        }
        // SAFETY: the caller passes null or a place for the pointer.
        unsafe { store(function, found.unwrap_or(std::ptr::null_mut()))? };
        found.map(drop).ok_or(CUresult::ERROR_NOT_FOUND)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_suffix_means_the_newest_that_the_caller_knows() {
        let exact = |name: &CStr| table()[name];
        assert_eq!(
            find(c"cuMemAlloc", 12_000).unwrap().addr(),
            exact(c"cuMemAlloc_v2")
        );
        assert_eq!(
            find(c"cuCtxCreate", 11_000).unwrap().addr(),
            exact(c"cuCtxCreate_v2")
        );
        assert_eq!(
            find(c"cuCtxCreate", 12_000).unwrap().addr(),
            exact(c"cuCtxCreate_v3")
        );
        assert_eq!(
            find(c"cuCtxCreate", 13_000).unwrap().addr(),
            exact(c"cuCtxCreate_v4")
        );
        assert_eq!(find(c"cuInit", 13_000).unwrap().addr(), exact(c"cuInit"));
        assert_eq!(find(c"cuNoSuchThing", 13_000), None);
    }

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

//! `cuGetProcAddress`: functions by name, for a caller built for a given version of CUDA.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use super::call::{caught, store};
use super::table;
use crate::result::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuGetProcAddress", get_proc_address as *const c_void),
        (c"cuGetProcAddress_v2", get_proc_address_v2 as *const c_void),
    ]
}

/// Returns all functions by name.
fn by_name() -> &'static HashMap<&'static CStr, usize> {
    static TABLE: OnceLock<HashMap<&'static CStr, usize>> = OnceLock::new();
    TABLE.get_or_init(|| {
        table::symbols()
            .into_iter()
            .chain(symbols())
            .map(|(name, address)| (name, address.expose_provenance()))
            .collect()
    })
}

/// Returns the function `name` for a caller built for `version` of CUDA: the newest variant that existed in this version.
fn find(name: &CStr, version: c_int) -> Option<*mut c_void> {
    let spelled = |suffix: &str| {
        let mut full = name.to_bytes().to_vec();
        full.extend_from_slice(suffix.as_bytes());
        full.push(0);
        let full = CStr::from_bytes_with_nul(&full).ok()?;
        // The versions of CUDA that introduced these variants, whose arguments differ from their predecessors'.
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
            .then(|| by_name().get(full).copied())
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
        let exact = |name: &CStr| by_name()[name];
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
}

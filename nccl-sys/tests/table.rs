//! The table of functions, without a library.

use std::ffi::{c_int, c_void};
use std::ptr;

use nccl_sys::{Api, MissingFunction, Version, ncclResult_t};

unsafe extern "C" fn version(out: *mut c_int) -> ncclResult_t {
    // SAFETY: the tests pass a pointer to an integer of theirs.
    unsafe { *out = 22707 };
    ncclResult_t::ncclSuccess
}

#[test]
fn an_empty_table_lacks_everything() {
    let api = Api::empty();
    assert_eq!(api.missing().collect::<Vec<_>>(), Api::NAMES);
    assert_eq!(api.missing().count(), Api::default().missing().count());
}

#[test]
fn a_table_can_be_made_of_functions_of_ones_own() {
    let api = Api {
        ncclGetVersion: Some(version),
        ..Api::empty()
    };
    let mut code = 0;
    // SAFETY: it is the function above, and `code` outlives the call.
    let result = unsafe { api.ncclGetVersion().unwrap()(&mut code) };
    assert_eq!((result, code), (ncclResult_t::ncclSuccess, 22707));
    assert!(!api.missing().any(|name| name == "ncclGetVersion"));
    assert_eq!(api.missing().count(), Api::NAMES.len() - 1);
}

#[test]
fn every_function_is_asked_for_once_by_its_name() {
    let mut asked = Vec::new();
    // SAFETY: every answer is null.
    let api = unsafe {
        Api::load(|name| {
            asked.push(name.to_str().unwrap().to_owned());
            ptr::null_mut()
        })
    };
    assert_eq!(asked, Api::NAMES);
    assert_eq!(api.missing().count(), Api::NAMES.len());
}

#[test]
fn an_address_goes_to_the_function_of_its_name() {
    // SAFETY: the one address given out is that of a function with this prototype.
    let api = unsafe {
        Api::load(|name| match name.to_bytes() {
            b"ncclGetVersion" => version as *mut c_void,
            _ => ptr::null_mut(),
        })
    };
    assert!(api.ncclGetVersion.is_some_and(|found| ptr::fn_addr_eq(
        found,
        version as unsafe extern "C" fn(*mut c_int) -> ncclResult_t
    )));
    assert_eq!(api.missing().count(), Api::NAMES.len() - 1);
}

#[test]
fn a_missing_function_says_its_name_and_its_first_release() {
    let missing: MissingFunction = Api::empty().ncclAllReduceConfig().unwrap_err();
    assert_eq!(missing.function, "ncclAllReduceConfig");
    assert_eq!(missing.needs, Version::new(2, 31, 2));
    assert_eq!(
        missing.to_string(),
        "ncclAllReduceConfig needs NCCL 2.31.2 or newer"
    );
}

#[test]
fn a_table_can_be_shared_by_threads() {
    fn shared<T: Send + Sync + Copy + 'static>() {}
    shared::<Api>();
    fn loaded<T: Send + Sync + Clone + 'static>() {}
    loaded::<nccl_sys::Loaded>();
    loaded::<nccl_sys::LoadError>();
}

#[test]
fn the_table_prints_what_it_lacks() {
    let api = Api {
        ncclGetVersion: Some(version),
        ..Api::empty()
    };
    let text = format!("{api:?}");
    assert!(text.contains("functions: 1"), "{text}");
    assert!(text.contains("ncclSend"), "{text}");
}

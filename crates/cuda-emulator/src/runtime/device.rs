//! Devices, the current one of each thread, and contexts.
//!
//! A thread's device is 0 until the thread sets another. Its context is the one that the driver's functions made current, or
//! else the primary context of its device, which the runtime retains once per process and makes current.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};

use super::caller::{Cuda, caller};
use super::driver;
use super::error::{Code, run};
use super::layouts::Property;
use crate::driver::{CUresult, context};
use crate::sync::Mutex;
use stand_in_object::Symbol;

pub(super) fn symbols(cuda: Cuda) -> Vec<Symbol> {
    let properties = match cuda {
        Cuda::V12 => c"cudaGetDeviceProperties_v2",
        Cuda::V13 => c"cudaGetDeviceProperties",
    };
    vec![
        (c"cudaGetDeviceCount", get_count as *const c_void),
        (c"cudaGetDevice", get as *const c_void),
        (c"cudaSetDevice", set as *const c_void),
        (properties, get_properties as *const c_void),
        (
            c"cudaDeviceEnablePeerAccess",
            enable_peer_access as *const c_void,
        ),
        (
            c"cudaDeviceDisablePeerAccess",
            disable_peer_access as *const c_void,
        ),
        (c"cudaDriverGetVersion", driver_version as *const c_void),
        (c"cudaRuntimeGetVersion", runtime_version as *const c_void),
        (c"cudaGetDriverEntryPoint", entry_point as *const c_void),
        (
            c"cudaGetDriverEntryPointByVersion",
            entry_point_by_version as *const c_void,
        ),
    ]
}

thread_local! {
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

/// Initializes the driver, if it is not yet initialized.
pub(super) fn start() -> Result<(), Code> {
    // SAFETY: asks nothing of its caller.
    unsafe { driver::cuInit(0) }
}

/// Returns the device of the calling thread's context, if it has one that was not destroyed.
fn device_of_context() -> Option<c_int> {
    context::current_in_any_state()
        .ok()
        .filter(|context| context.check() != Err(CUresult::ERROR_CONTEXT_IS_DESTROYED))
        .map(|context| context.device())
}

/// Makes sure that the calling thread has a context.
pub(super) fn context() -> Result<(), Code> {
    start()?;
    match device_of_context() {
        Some(_) => Ok(()),
        None => make_current(DEVICE.get()),
    }
}

fn make_current(device: c_int) -> Result<(), Code> {
    let context = primary(device)?;
    // SAFETY: a context of the driver's.
    unsafe { driver::cuCtxSetCurrent(context) }
}

/// Returns the primary context of a device, which the runtime retains once.
fn primary(device: c_int) -> Result<*mut c_void, Code> {
    static RETAINED: Mutex<Vec<c_int>> = Mutex::new(Vec::new());
    let mut retained = RETAINED.lock();
    let mut context = std::ptr::null_mut();
    // SAFETY: a place for the context.
    unsafe { driver::cuDevicePrimaryCtxRetain(&raw mut context, device) }?;
    if retained.contains(&device) {
        // SAFETY: retained a line above, and once before: it does not end here.
        unsafe { driver::cuDevicePrimaryCtxRelease_v2(device) }?;
    } else {
        retained.push(device);
    }
    Ok(context)
}

fn count() -> Result<c_int, Code> {
    let mut count = 0;
    // SAFETY: a place for the number.
    unsafe { driver::cuDeviceGetCount(&raw mut count) }?;
    Ok(count)
}

/// Stores a value at the caller's place, which must not be null.
///
/// # Safety
/// `place` is null or may be written.
pub(super) unsafe fn store<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller promises the rest.
    unsafe { place.write(value) };
    Ok(())
}

unsafe extern "C" fn get_count(place: *mut c_int) -> Code {
    run(|| {
        let started = start();
        let count = if started.is_ok() { count()? } else { 0 };
        // SAFETY: the caller passes null or a place for the number.
        unsafe { store(place, count) }?;
        started
    })
}

unsafe extern "C" fn get(place: *mut c_int) -> Code {
    run(|| {
        start()?;
        // SAFETY: the caller passes null or a place for the device.
        unsafe { store(place, device_of_context().unwrap_or(DEVICE.get())) }
    })
}

unsafe extern "C" fn set(device: c_int) -> Code {
    run(|| {
        start()?;
        if !(0..count()?).contains(&device) {
            return Err(Code::INVALID_DEVICE);
        }
        make_current(device)?;
        DEVICE.set(device);
        Ok(())
    })
}

unsafe extern "C" fn get_properties(place: *mut u8, device: c_int) -> Code {
    run(|| {
        start()?;
        let layout = &caller()?.layouts.properties;
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let mut properties = layout.empty();
        for (field, property) in &layout.fields {
            match property {
                Property::Name => {
                    let mut text = [0; 256];
                    // SAFETY: a buffer of as many characters.
                    unsafe { driver::cuDeviceGetName(text.as_mut_ptr(), 256, device) }?;
                    properties.put(*field, &text.map(c_char::cast_unsigned));
                }
                Property::Uuid => {
                    let mut uuid = [0u8; 16];
                    // SAFETY: a place for the 16 bytes.
                    unsafe { driver::cuDeviceGetUuid_v2((&raw mut uuid).cast(), device) }?;
                    properties.put(*field, &uuid);
                }
                Property::Memory => {
                    let mut size = 0usize;
                    // SAFETY: a place for the number.
                    unsafe { driver::cuDeviceTotalMem_v2(&raw mut size, device) }?;
                    properties.put(*field, &size.to_ne_bytes());
                }
                Property::Attributes(first) => {
                    for (element, attribute) in field.elements().zip(*first..) {
                        let mut value = 0;
                        // SAFETY: a place for the number.
                        unsafe { driver::cuDeviceGetAttribute(&raw mut value, attribute, device) }?;
                        properties.put_number(element, value);
                    }
                }
            }
        }
        // SAFETY: not null, and the caller passes a `cudaDeviceProp` of its build.
        unsafe { properties.copy_to(place) };
        Ok(())
    })
}

unsafe extern "C" fn enable_peer_access(peer: c_int, flags: c_uint) -> Code {
    run(|| {
        context()?;
        // SAFETY: a context of the driver's.
        unsafe { driver::cuCtxEnablePeerAccess(primary(peer)?, flags) }
    })
}

unsafe extern "C" fn disable_peer_access(peer: c_int) -> Code {
    run(|| {
        context()?;
        // SAFETY: a context of the driver's.
        unsafe { driver::cuCtxDisablePeerAccess(primary(peer)?) }
    })
}

unsafe extern "C" fn driver_version(place: *mut c_int) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    run(|| unsafe { driver::cuDriverGetVersion(place) })
}

unsafe extern "C" fn runtime_version(place: *mut c_int) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    run(|| unsafe { store(place, caller()?.version) })
}

unsafe extern "C" fn entry_point(
    name: *const c_char,
    place: *mut *mut c_void,
    flags: u64,
    status: *mut c_uint,
) -> Code {
    // SAFETY: the same promises.
    run(|| unsafe { look_up(name, place, caller()?.version, flags, status) })
}

unsafe extern "C" fn entry_point_by_version(
    name: *const c_char,
    place: *mut *mut c_void,
    version: c_uint,
    flags: u64,
    status: *mut c_uint,
) -> Code {
    // SAFETY: the same promises.
    run(|| unsafe { look_up(name, place, version.cast_signed(), flags, status) })
}

/// Looks up a driver function. An unknown function is not an error if the caller has a place for the status.
///
/// # Safety
/// `name` is null or a C string; the others are null or may be written.
unsafe fn look_up(
    name: *const c_char,
    place: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_uint,
) -> Result<(), Code> {
    const NOT_FOUND: c_uint = 1;
    if name.is_null() || place.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller promises the rest.
    let found =
        unsafe { driver::cuGetProcAddress_v2(name, place, version, flags, std::ptr::null_mut()) };
    match found {
        Err(error) if error != Code::SYMBOL_NOT_FOUND => return Err(error),
        Err(error) if status.is_null() => return Err(error),
        _ => {}
    }
    if !status.is_null() {
        // SAFETY: not null, and the caller passes a place for the answer.
        unsafe { status.write(if found.is_ok() { 0 } else { NOT_FOUND }) };
    }
    Ok(())
}

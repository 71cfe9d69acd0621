//! What the calls of NVML have in common: their codes, their checks, the handles of devices.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use super::faults;
use crate::driver::CUresult;
use crate::driver::call::caught;
use crate::settings::settings;

/// A `nvmlReturn_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Code(pub(super) u32);

impl Code {
    pub(super) const UNINITIALIZED: Self = Self(1);
    pub(super) const INVALID_ARGUMENT: Self = Self(2);
    pub(super) const NOT_SUPPORTED: Self = Self(3);
    pub(super) const NOT_FOUND: Self = Self(6);
    pub(super) const INSUFFICIENT_SIZE: Self = Self(7);
    pub(super) const DRIVER_NOT_LOADED: Self = Self(9);
    pub(super) const GPU_IS_LOST: Self = Self(15);
    pub(super) const ARGUMENT_VERSION_MISMATCH: Self = Self(25);
    pub(super) const UNKNOWN: Self = Self(999);

    pub(super) fn text(self) -> &'static CStr {
        match self.0 {
            0 => c"Success",
            1 => c"Uninitialized",
            2 => c"Invalid Argument",
            3 => c"Not Supported",
            4 => c"Insufficient Permissions",
            6 => c"Not Found",
            7 => c"Insufficient Size",
            9 => c"Driver Not Loaded",
            13 => c"Function Not Found",
            15 => c"GPU is lost",
            25 => c"Argument version mismatch",
            _ => c"Unknown Error",
        }
    }
}

/// The number of initializations of NVML without a shutdown.
pub(super) static USERS: AtomicU32 = AtomicU32::new(0);

/// Runs the body of a function; a panic becomes an unknown error.
pub(super) fn caught_here(body: impl FnOnce() -> Result<(), Code>) -> Code {
    // Success and unknown error have the same numbers as in the driver.
    Code(caught(|| body().map_err(|code| CUresult(code.0))).0)
}

/// Runs the body of a function that requires an initialized NVML.
pub(super) fn run(body: impl FnOnce() -> Result<(), Code>) -> Code {
    if USERS.load(Ordering::Acquire) == 0 {
        return Code::UNINITIALIZED;
    }
    caught_here(body)
}

/// # Safety
/// `place` is null or may be written.
pub(super) unsafe fn store<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and the caller promises the rest.
    unsafe { place.write(value) };
    Ok(())
}

/// # Safety
/// `place` is null or has room for `length` characters.
pub(super) unsafe fn store_text(
    place: *mut c_char,
    length: c_uint,
    text: &CStr,
) -> Result<(), Code> {
    let bytes = text.count_bytes() + 1;
    if place.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    if bytes > length as usize {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    // SAFETY: the text with its zero is no longer than the room that the caller promises.
    unsafe { place.copy_from_nonoverlapping(text.as_ptr(), bytes) };
    Ok(())
}

/// The first handle; the next ones are 16 apart.
const FIRST: usize = 0x53 << 56;

pub(super) fn handle_of(device: u32) -> *mut c_void {
    std::ptr::without_provenance_mut(FIRST + device as usize * 16)
}

/// Returns the number on this host of the device of a handle, which has to be reachable.
pub(super) fn device_of(handle: *mut c_void) -> Result<u32, Code> {
    let distance = handle.addr().wrapping_sub(FIRST);
    let device = u32::try_from(distance / 16)
        .ok()
        .filter(|&device| distance.is_multiple_of(16) && device < settings().devices)
        .ok_or(Code::INVALID_ARGUMENT)?;
    reachable(device)
}

/// Fails for a lost device; never returns for a hanging device.
pub(super) fn reachable(device: u32) -> Result<u32, Code> {
    let state = faults::state_of(device);
    if state.hangs {
        loop {
            std::thread::park();
        }
    }
    match state.is_lost {
        true => Err(Code::GPU_IS_LOST),
        false => Ok(device),
    }
}

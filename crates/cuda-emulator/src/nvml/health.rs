//! The health of a device as NVML reports it: memory errors, links, clocks, and processes. Devices are healthy except for
//! injected states (`faults`).

use std::ffi::{c_int, c_uint, c_void};

use super::call::{Code, device_of, run, store};
use super::faults::{LINKS, PCIE, State, state_of};
use stand_in_object::Symbol;

/// Returns name and address of each of these functions.
pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (
            c"nvmlDeviceGetTotalEccErrors",
            get_ecc_errors as *const c_void,
        ),
        (
            c"nvmlDeviceGetRemappedRows",
            get_remapped_rows as *const c_void,
        ),
        (
            c"nvmlDeviceGetRetiredPagesPendingStatus",
            get_retirement as *const c_void,
        ),
        (
            c"nvmlDeviceGetTemperature",
            get_temperature as *const c_void,
        ),
        (
            c"nvmlDeviceGetCurrentClocksThrottleReasons",
            get_throttle as *const c_void,
        ),
        (
            c"nvmlDeviceGetCurrentClocksEventReasons",
            get_throttle as *const c_void,
        ),
        (
            c"nvmlDeviceGetPcieLinkMaxSpeed",
            get_pcie_speed as *const c_void,
        ),
        (
            c"nvmlDeviceGetCurrPcieLinkGeneration",
            get_pcie_generation as *const c_void,
        ),
        (
            c"nvmlDeviceGetMaxPcieLinkGeneration",
            get_most_pcie_generation as *const c_void,
        ),
        (
            c"nvmlDeviceGetCurrPcieLinkWidth",
            get_pcie_width as *const c_void,
        ),
        (
            c"nvmlDeviceGetMaxPcieLinkWidth",
            get_most_pcie_width as *const c_void,
        ),
        (
            c"nvmlDeviceGetPcieReplayCounter",
            get_pcie_replays as *const c_void,
        ),
        (c"nvmlDeviceGetNvLinkState", get_link_state as *const c_void),
        (
            c"nvmlDeviceGetNvLinkErrorCounter",
            get_link_errors as *const c_void,
        ),
        (
            c"nvmlDeviceGetComputeRunningProcesses_v3",
            get_processes as *const c_void,
        ),
        (
            c"nvmlDeviceGetFieldValues",
            get_field_values as *const c_void,
        ),
    ]
}

/// Answers a query of a device with a value of its state.
///
/// # Safety
/// `place` is null or may be written.
unsafe fn answer<T>(
    handle: *mut c_void,
    place: *mut T,
    value: impl FnOnce(&State) -> Result<T, Code>,
) -> Code {
    run(|| {
        let value = value(&state_of(device_of(handle)?))?;
        // SAFETY: the caller's promise.
        unsafe { store(place, value) }
    })
}

/// Error types are 0 (corrected) and 1 (uncorrected), counter types 0 (volatile) and 1 (aggregate).
unsafe extern "C" fn get_ecc_errors(
    handle: *mut c_void,
    kind: c_uint,
    counter: c_uint,
    place: *mut u64,
) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    unsafe {
        answer(handle, place, |state| match (kind, counter) {
            (0, 0 | 1) => Ok(0),
            (1, 0 | 1) => Ok(state.ecc),
            _ => Err(Code::INVALID_ARGUMENT),
        })
    }
}

unsafe extern "C" fn get_remapped_rows(
    handle: *mut c_void,
    corrected: *mut c_uint,
    uncorrected: *mut c_uint,
    pending: *mut c_uint,
    failed: *mut c_uint,
) -> Code {
    run(|| {
        let state = state_of(device_of(handle)?);
        // SAFETY: the caller passes null or places for the numbers.
        unsafe {
            store(corrected, 0)?;
            store(uncorrected, u32::from(state.remap_pending))?;
            store(pending, u32::from(state.remap_pending))?;
            store(failed, u32::from(state.remap_failed))
        }
    })
}

unsafe extern "C" fn get_retirement(handle: *mut c_void, place: *mut c_uint) -> Code {
    // SAFETY: the caller passes null or a place for the state.
    unsafe {
        answer(handle, place, |state| {
            Ok(u32::from(state.retirement_pending))
        })
    }
}

unsafe extern "C" fn get_temperature(
    handle: *mut c_void,
    sensor: c_uint,
    place: *mut c_uint,
) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    unsafe {
        answer(handle, place, |state| match sensor {
            0 => Ok(state.celsius),
            _ => Err(Code::INVALID_ARGUMENT),
        })
    }
}

unsafe extern "C" fn get_throttle(handle: *mut c_void, place: *mut u64) -> Code {
    // SAFETY: the caller passes null or a place for the bits.
    unsafe { answer(handle, place, |state| Ok(state.throttle)) }
}

unsafe extern "C" fn get_pcie_speed(handle: *mut c_void, place: *mut c_uint) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    unsafe { answer(handle, place, |_| Ok(PCIE.0)) }
}

unsafe extern "C" fn get_pcie_generation(handle: *mut c_void, place: *mut c_uint) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    unsafe { answer(handle, place, |state| Ok(state.pcie_generation)) }
}

unsafe extern "C" fn get_most_pcie_generation(handle: *mut c_void, place: *mut c_uint) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    unsafe { answer(handle, place, |_| Ok(PCIE.1)) }
}

unsafe extern "C" fn get_pcie_width(handle: *mut c_void, place: *mut c_uint) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    unsafe { answer(handle, place, |state| Ok(state.pcie_width)) }
}

unsafe extern "C" fn get_most_pcie_width(handle: *mut c_void, place: *mut c_uint) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    unsafe { answer(handle, place, |_| Ok(PCIE.2)) }
}

unsafe extern "C" fn get_pcie_replays(handle: *mut c_void, place: *mut c_uint) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    unsafe { answer(handle, place, |state| Ok(state.pcie_replays)) }
}

/// Checks the number of a link of a device that has links.
fn known_link(state: &State, link: c_uint) -> Result<c_uint, Code> {
    match state.has_links {
        false => Err(Code::NOT_SUPPORTED),
        true if link < LINKS => Ok(link),
        true => Err(Code::INVALID_ARGUMENT),
    }
}

unsafe extern "C" fn get_link_state(handle: *mut c_void, link: c_uint, place: *mut c_uint) -> Code {
    // SAFETY: the caller passes null or a place for the state.
    unsafe {
        answer(handle, place, |state| {
            let link = known_link(state, link)?;
            Ok(u32::from(!state.down.contains(&link)))
        })
    }
}

unsafe extern "C" fn get_link_errors(
    handle: *mut c_void,
    link: c_uint,
    kind: c_uint,
    place: *mut u64,
) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    unsafe {
        answer(handle, place, |state| {
            let link = known_link(state, link)?;
            Ok(state.link_errors.get(&(link, kind)).copied().unwrap_or(0))
        })
    }
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
struct Process {
    pid: c_uint,
    memory: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// Returns this process, the only one that the emulator knows, and the injected processes.
unsafe extern "C" fn get_processes(
    handle: *mut c_void,
    count: *mut c_uint,
    places: *mut Process,
) -> Code {
    const NOT_AVAILABLE: u64 = u64::MAX;
    run(|| {
        let state = state_of(device_of(handle)?);
        if count.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        let pids: Vec<c_uint> = [std::process::id()]
            .into_iter()
            .chain(state.processes)
            .collect();
        let found = c_uint::try_from(pids.len()).map_err(|_| Code::UNKNOWN)?;
        // SAFETY: not null, and the caller passes a number.
        let room = unsafe { count.read() };
        // SAFETY: as above.
        unsafe { count.write(found) };
        if places.is_null() || room < found {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        for (at, pid) in pids.into_iter().enumerate() {
            let process = Process {
                pid,
                memory: NOT_AVAILABLE,
                gpu_instance: c_uint::MAX,
                compute_instance: c_uint::MAX,
            };
            // SAFETY: not null, and there is room for as many as were found.
            unsafe { places.add(at).write(process) };
        }
        Ok(())
    })
}

/// `nvmlFieldValue_t`.
#[repr(C)]
struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency: i64,
    kind: c_uint,
    code: Code,
    value: u64,
}

/// Answers each field separately; only the fields of remapped rows are supported.
unsafe extern "C" fn get_field_values(
    handle: *mut c_void,
    count: c_int,
    values: *mut FieldValue,
) -> Code {
    const UNSIGNED_INT: c_uint = 1;
    run(|| {
        let state = state_of(device_of(handle)?);
        let count = usize::try_from(count).map_err(|_| Code::INVALID_ARGUMENT)?;
        if values.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        for at in 0..count {
            // SAFETY: not null, and the caller passes `count` of them.
            let value = unsafe { &mut *values.add(at) };
            let found = match value.field {
                142 => Some(false),
                143 | 144 => Some(state.remap_pending),
                145 => Some(state.remap_failed),
                _ => None,
            };
            match found {
                Some(found) => {
                    value.kind = UNSIGNED_INT;
                    value.value = u64::from(found);
                    value.code = Code(0);
                }
                None => value.code = Code::NOT_SUPPORTED,
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_nvmls_sizes() {
        assert_eq!(size_of::<FieldValue>(), 40);
        assert_eq!(size_of::<Process>(), 24);
    }
}

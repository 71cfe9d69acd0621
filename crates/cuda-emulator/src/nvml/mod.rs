//! Functions of libnvidia-ml: those that NCCL calls, and those that tools call first.
//!
//! NVML numbers all devices of the host, regardless of `CUDA_VISIBLE_DEVICES`. Each device has a PCI bus of its own; devices
//! reach each other over PCI and have no NVLink. To present a machine with NVLink to NCCL, use a topology file. Of the
//! functions that only make sense for a GPU, those that report its health are supported (`health`); the others return
//! `NVML_ERROR_NOT_SUPPORTED` or do not exist. All supported functions that take a device check it with `reachable`. `faults`
//! injects states of devices.

mod call;
pub mod faults;
mod health;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use call::{Code, USERS, caught_here, device_of, handle_of, reachable, run, store, store_text};

use crate::driver::call::VERSION;
use crate::driver::device;
use crate::memory;
use crate::settings::settings;
use crate::visible;
use stand_in_object::Symbol;

/// Functions for properties that the devices do not have.
macro_rules! not_supported {
    ($($name:ident)*) => {
        /// Declared without arguments: in the C calling conventions of Linux only the caller handles them.
        unsafe extern "C" fn not_supported() -> Code {
            run(|| Err(Code::NOT_SUPPORTED))
        }

        fn refused() -> Vec<Symbol> {
            vec![$({
                const NAME: &str = concat!(stringify!($name), "\0");
                let name = CStr::from_bytes_with_nul(NAME.as_bytes()).unwrap_or_default();
                (name, not_supported as *const c_void)
            },)*]
        }
    };
}

not_supported! {
    nvmlDeviceGetNvLinkVersion nvmlDeviceGetNvLinkCapability
    nvmlDeviceGetNvLinkRemotePciInfo nvmlDeviceGetNvLinkRemotePciInfo_v2 nvmlDeviceGetNvLinkRemoteDeviceType
    nvmlDeviceGetPlatformInfo nvmlDeviceGetTemperatureV nvmlDeviceGetFanSpeed nvmlDeviceGetPowerUsage
    nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetPowerManagementLimit nvmlDeviceGetUtilizationRates
    nvmlDeviceGetClockInfo nvmlDeviceGetMaxClockInfo nvmlDeviceGetEccMode
    nvmlDeviceGetMemoryErrorCounter nvmlDeviceGetRetiredPages nvmlDeviceGetMigMode nvmlDeviceGetSerial
}

/// Returns name and address of every supported function of libnvidia-ml.
pub fn symbols() -> Vec<Symbol> {
    let mut all = vec![
        (c"nvmlInit", init as *const c_void),
        (c"nvmlInit_v2", init as *const c_void),
        (c"nvmlInitWithFlags", init_with_flags as *const c_void),
        (c"nvmlShutdown", shutdown as *const c_void),
        (c"nvmlErrorString", error_string as *const c_void),
        (
            c"nvmlSystemGetDriverVersion",
            driver_version as *const c_void,
        ),
        (c"nvmlSystemGetNVMLVersion", nvml_version as *const c_void),
        (
            c"nvmlSystemGetCudaDriverVersion",
            cuda_version as *const c_void,
        ),
        (
            c"nvmlSystemGetCudaDriverVersion_v2",
            cuda_version as *const c_void,
        ),
        (
            c"nvmlSystemGetConfComputeState",
            conf_compute_state as *const c_void,
        ),
        (
            c"nvmlSystemGetConfComputeSettings",
            conf_compute_settings as *const c_void,
        ),
        (c"nvmlDeviceGetCount", get_count as *const c_void),
        (c"nvmlDeviceGetCount_v2", get_count as *const c_void),
        (c"nvmlDeviceGetHandleByIndex", by_index as *const c_void),
        (c"nvmlDeviceGetHandleByIndex_v2", by_index as *const c_void),
        (c"nvmlDeviceGetHandleByPciBusId", by_bus as *const c_void),
        (c"nvmlDeviceGetHandleByPciBusId_v2", by_bus as *const c_void),
        (c"nvmlDeviceGetHandleByUUID", by_uuid as *const c_void),
        (c"nvmlDeviceGetIndex", get_index as *const c_void),
        (c"nvmlDeviceGetMinorNumber", get_index as *const c_void),
        (c"nvmlDeviceGetName", get_name as *const c_void),
        (c"nvmlDeviceGetUUID", get_uuid as *const c_void),
        (c"nvmlDeviceGetMemoryInfo", get_memory as *const c_void),
        (
            c"nvmlDeviceGetCudaComputeCapability",
            get_compute_capability as *const c_void,
        ),
        (c"nvmlDeviceGetPciInfo", get_pci as *const c_void),
        (c"nvmlDeviceGetPciInfo_v2", get_pci as *const c_void),
        (c"nvmlDeviceGetPciInfo_v3", get_pci as *const c_void),
        (c"nvmlDeviceGetPciInfoExt", get_pci_ext as *const c_void),
        (c"nvmlDeviceGetP2PStatus", get_p2p_status as *const c_void),
        (
            c"nvmlDeviceGetGpuFabricInfo",
            get_fabric_info as *const c_void,
        ),
        (
            c"nvmlDeviceGetGpuFabricInfoV",
            get_fabric_info_of_version as *const c_void,
        ),
    ];
    all.extend(health::symbols());
    all.extend(refused());
    all
}

/// The version of a driver with CUDA 13.0, marked as the emulator's.
const DRIVER: &CStr = c"580.00 (CPU emulator)";
const NVML: &CStr = c"13.580.00 (CPU emulator)";

unsafe extern "C" fn init() -> Code {
    caught_here(|| {
        if settings().devices == 0 {
            return Err(Code::DRIVER_NOT_LOADED);
        }
        USERS.fetch_add(1, Ordering::AcqRel);
        Ok(())
    })
}

unsafe extern "C" fn init_with_flags(_flags: c_uint) -> Code {
    // SAFETY: asks nothing of its caller.
    unsafe { init() }
}

unsafe extern "C" fn shutdown() -> Code {
    let left = USERS.fetch_update(Ordering::AcqRel, Ordering::Acquire, |users| {
        users.checked_sub(1)
    });
    match left {
        Ok(_) => Code(0),
        Err(_) => Code::UNINITIALIZED,
    }
}

unsafe extern "C" fn error_string(code: Code) -> *const c_char {
    code.text().as_ptr()
}

unsafe extern "C" fn driver_version(place: *mut c_char, length: c_uint) -> Code {
    // SAFETY: the caller passes null or `length` characters.
    run(|| unsafe { store_text(place, length, DRIVER) })
}

unsafe extern "C" fn nvml_version(place: *mut c_char, length: c_uint) -> Code {
    // SAFETY: the caller passes null or `length` characters.
    caught_here(|| unsafe { store_text(place, length, NVML) })
}

unsafe extern "C" fn cuda_version(place: *mut c_int) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    caught_here(|| unsafe { store(place, VERSION) })
}

/// Confidential computing is off: all three numbers are zero.
unsafe extern "C" fn conf_compute_state(place: *mut [c_uint; 3]) -> Code {
    // SAFETY: the caller passes null or a place for the state, which is three numbers.
    run(|| unsafe { store(place, [0; 3]) })
}

/// The same in a versioned structure.
unsafe extern "C" fn conf_compute_settings(place: *mut [c_uint; 5]) -> Code {
    const VERSION_1: c_uint = 0x0100_0014;
    // SAFETY: the caller passes null or settings with their version.
    run(|| unsafe { fill_versioned(place.cast(), &[VERSION_1]) })
}

/// Zeroes a structure except for its version, whose low 24 bits are its size.
///
/// # Safety
/// `place` is null or a structure that begins with its version. If that is one of `known`, the structure has the size in it.
unsafe fn fill_versioned(place: *mut u8, known: &[c_uint]) -> Result<(), Code> {
    if place.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, so it begins with its version.
    let version = unsafe { place.cast::<c_uint>().read() };
    if !known.contains(&version) {
        return Err(Code::ARGUMENT_VERSION_MISMATCH);
    }
    let size = (version & 0xff_ffff) as usize;
    // SAFETY: the version is known, so the structure has this size.
    unsafe { place.add(4).write_bytes(0, size - 4) };
    Ok(())
}

unsafe extern "C" fn get_count(place: *mut c_uint) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    run(|| unsafe { store(place, settings().devices) })
}

unsafe extern "C" fn by_index(index: c_uint, place: *mut *mut c_void) -> Code {
    run(|| {
        if index >= settings().devices {
            return Err(Code::INVALID_ARGUMENT);
        }
        reachable(index)?;
        // SAFETY: the caller passes null or a place for the handle.
        unsafe { store(place, handle_of(index)) }
    })
}

/// Reads a text of the caller.
///
/// # Safety
/// `text` is null or a C string.
unsafe fn text_of(text: *const c_char) -> Result<String, Code> {
    if text.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, so a C string.
    Ok(unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned())
}

/// Parses the bus in "00000000:01:00.0", "0000:01:00.0" or "01:00.0".
fn bus_in(id: &str) -> Option<u32> {
    let mut parts = id.rsplit(':');
    let slot = parts.next()?;
    let bus = u32::from_str_radix(parts.next()?, 16).ok()?;
    let domain = u32::from_str_radix(parts.next().unwrap_or("0"), 16).ok()?;
    let first = slot
        .split('.')
        .all(|part| u32::from_str_radix(part, 16) == Ok(0));
    (first && domain == 0 && parts.next().is_none()).then_some(bus)
}

unsafe extern "C" fn by_bus(id: *const c_char, place: *mut *mut c_void) -> Code {
    run(|| {
        // SAFETY: the caller passes null or a C string.
        let bus = bus_in(&unsafe { text_of(id) }?).ok_or(Code::INVALID_ARGUMENT)?;
        let device = (0..settings().devices)
            .find(|&device| device::bus_of(device) == bus)
            .ok_or(Code::NOT_FOUND)?;
        reachable(device)?;
        // SAFETY: the caller passes null or a place for the handle.
        unsafe { store(place, handle_of(device)) }
    })
}

unsafe extern "C" fn by_uuid(uuid: *const c_char, place: *mut *mut c_void) -> Code {
    run(|| {
        // SAFETY: the caller passes null or a C string.
        let uuid = unsafe { text_of(uuid) }?;
        let device = (0..settings().devices)
            .find(|&device| visible::text(device::uuid(device)).eq_ignore_ascii_case(&uuid))
            .ok_or(Code::NOT_FOUND)?;
        reachable(device)?;
        // SAFETY: the caller passes null or a place for the handle.
        unsafe { store(place, handle_of(device)) }
    })
}

unsafe extern "C" fn get_index(handle: *mut c_void, place: *mut c_uint) -> Code {
    // SAFETY: the caller passes null or a place for the number.
    run(|| unsafe { store(place, device_of(handle)?) })
}

unsafe extern "C" fn get_name(handle: *mut c_void, place: *mut c_char, length: c_uint) -> Code {
    run(|| {
        device_of(handle)?;
        // SAFETY: the caller passes null or `length` characters.
        unsafe { store_text(place, length, device::NAME) }
    })
}

unsafe extern "C" fn get_uuid(handle: *mut c_void, place: *mut c_char, length: c_uint) -> Code {
    run(|| {
        let uuid = visible::text(device::uuid(device_of(handle)?));
        let uuid = CString::new(uuid).map_err(|_| Code::UNKNOWN)?;
        // SAFETY: the caller passes null or `length` characters.
        unsafe { store_text(place, length, &uuid) }
    })
}

/// Total, free and used bytes, as known to this process.
unsafe extern "C" fn get_memory(handle: *mut c_void, place: *mut [u64; 3]) -> Code {
    run(|| {
        let ordinal = visible::ordinal(device_of(handle)?);
        let usage = ordinal.and_then(|ordinal| memory::pool(ordinal).ok());
        let all = settings().memory;
        let (free, all) = usage.map_or((all, all), |pool| pool.usage());
        // SAFETY: the caller passes null or a `nvmlMemory_t`, which is three numbers.
        unsafe { store(place, [all, free, all - free]) }
    })
}

unsafe extern "C" fn get_compute_capability(
    handle: *mut c_void,
    major: *mut c_int,
    minor: *mut c_int,
) -> Code {
    run(|| {
        device_of(handle)?;
        // SAFETY: the caller passes null or places for the numbers.
        unsafe {
            store(major, device::COMPUTE_CAPABILITY.0)?;
            store(minor, device::COMPUTE_CAPABILITY.1)
        }
    })
}

/// `nvmlPciInfo_t`.
#[repr(C)]
struct Pci {
    short_id: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    /// Device and vendor: 0 stands for no vendor.
    ids: c_uint,
    subsystem: c_uint,
    id: [u8; 32],
}

/// Returns a text, padded with zeros.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    // The last byte stays zero.
    for (to, from) in bytes.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from;
    }
    bytes
}

unsafe extern "C" fn get_pci(handle: *mut c_void, place: *mut Pci) -> Code {
    run(|| {
        let bus = device::bus_of(device_of(handle)?);
        let pci = Pci {
            short_id: padded(&format!("0000:{bus:02X}:00.0")),
            domain: 0,
            bus,
            device: 0,
            ids: 0,
            subsystem: 0,
            id: padded(&format!("00000000:{bus:02X}:00.0")),
        };
        // SAFETY: the caller passes null or a place for the structure.
        unsafe { store(place, pci) }
    })
}

/// `nvmlPciInfoExt_v1_t`.
#[repr(C)]
struct PciExt {
    version: c_uint,
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    ids: c_uint,
    subsystem: c_uint,
    class: c_uint,
    subclass: c_uint,
    id: [u8; 32],
}

unsafe extern "C" fn get_pci_ext(handle: *mut c_void, place: *mut PciExt) -> Code {
    const VERSION_1: c_uint = 0x0100_0040;
    /// A 3D controller.
    const CLASS: (c_uint, c_uint) = (0x03, 0x02);
    run(|| {
        let bus = device::bus_of(device_of(handle)?);
        // SAFETY: the caller passes null or a structure with its version.
        unsafe { fill_versioned(place.cast(), &[VERSION_1]) }?;
        let pci = PciExt {
            version: VERSION_1,
            domain: 0,
            bus,
            device: 0,
            ids: 0,
            subsystem: 0,
            class: CLASS.0,
            subclass: CLASS.1,
            id: padded(&format!("00000000:{bus:02X}:00.0")),
        };
        // SAFETY: as above, and the version is this one.
        unsafe { store(place, pci) }
    })
}

unsafe extern "C" fn get_p2p_status(
    handle: *mut c_void,
    peer: *mut c_void,
    capability: c_uint,
    place: *mut c_uint,
) -> Code {
    const OK: c_uint = 0;
    const NOT_SUPPORTED: c_uint = 5;
    run(|| {
        device_of(handle)?;
        device_of(peer)?;
        let status = match capability {
            0 | 1 | 4 => OK,        // reading, writing, over PCI
            2 | 3 => NOT_SUPPORTED, // over NVLink, with atomics
            _ => return Err(Code::INVALID_ARGUMENT),
        };
        // SAFETY: the caller passes null or a place for the status.
        unsafe { store(place, status) }
    })
}

/// `nvmlGpuFabricInfo_t`, which has no version: 16 bytes of a UUID and three numbers.
unsafe extern "C" fn get_fabric_info(handle: *mut c_void, place: *mut [c_uint; 7]) -> Code {
    run(|| {
        device_of(handle)?;
        // SAFETY: the caller passes null or a place for the structure.
        unsafe { store(place, [0; 7]) }
    })
}

/// The device belongs to no fabric: the state is 0.
unsafe extern "C" fn get_fabric_info_of_version(handle: *mut c_void, place: *mut c_void) -> Code {
    const VERSIONS: [c_uint; 2] = [0x0200_0024, 0x0300_0028];
    run(|| {
        device_of(handle)?;
        // SAFETY: the caller passes null or a structure with its version.
        unsafe { fill_versioned(place.cast(), &VERSIONS) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_that_their_versions_say() {
        assert_eq!(size_of::<PciExt>(), 0x40);
        assert_eq!(size_of::<Pci>(), 68);
    }

    #[test]
    fn a_bus_is_read_in_each_way_that_it_is_written() {
        for id in ["00000000:0A:00.0", "0000:0a:00.0", "0a:00.0", "0A:00"] {
            assert_eq!(bus_in(id), Some(10), "{id}");
        }
        for id in [
            "",
            "0A",
            "0001:0A:00.0",
            "0000:0A:01.0",
            "0:0:0:0",
            "0000:XX:00.0",
        ] {
            assert_eq!(bus_in(id), None, "{id}");
        }
    }
}

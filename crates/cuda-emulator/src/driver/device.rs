//! Devices: their number and their properties.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::call::{enter, store};
use super::context;
use crate::result::CUresult;
use crate::settings::settings;
use crate::visible;
use stand_in_object::Symbol;

pub use crate::visible::uuid;

/// The name of every device. It prevents numbers measured here from passing for a GPU's.
pub(crate) const NAME: &CStr = c"CPU emulator, not a GPU";
/// The compute capability of a Hopper, so that programs that query it take their modern paths.
pub(crate) const COMPUTE_CAPABILITY: (c_int, c_int) = (9, 0);

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuDeviceGet", get as *const c_void),
        (c"cuDeviceGetCount", get_count as *const c_void),
        (c"cuDeviceGetName", get_name as *const c_void),
        (c"cuDeviceGetUuid", get_uuid as *const c_void),
        (c"cuDeviceGetUuid_v2", get_uuid as *const c_void),
        (c"cuDeviceGetAttribute", get_attribute as *const c_void),
        (c"cuDeviceTotalMem_v2", total_mem as *const c_void),
        (
            c"cuDeviceComputeCapability",
            compute_capability as *const c_void,
        ),
        (c"cuDeviceGetPCIBusId", get_pci_bus_id as *const c_void),
        (c"cuDeviceGetByPCIBusId", get_by_pci_bus_id as *const c_void),
        (c"cuDeviceCanAccessPeer", can_access_peer as *const c_void),
        (
            c"cuDeviceGetP2PAttribute",
            get_p2p_attribute as *const c_void,
        ),
        (
            c"cuDevicePrimaryCtxRetain",
            primary_ctx_retain as *const c_void,
        ),
        (
            c"cuDevicePrimaryCtxRelease",
            primary_ctx_release as *const c_void,
        ),
        (
            c"cuDevicePrimaryCtxRelease_v2",
            primary_ctx_release as *const c_void,
        ),
        (
            c"cuDevicePrimaryCtxReset",
            primary_ctx_reset as *const c_void,
        ),
        (
            c"cuDevicePrimaryCtxReset_v2",
            primary_ctx_reset as *const c_void,
        ),
        (
            c"cuDevicePrimaryCtxGetState",
            primary_ctx_get_state as *const c_void,
        ),
        (
            c"cuDevicePrimaryCtxSetFlags",
            primary_ctx_set_flags as *const c_void,
        ),
        (
            c"cuDevicePrimaryCtxSetFlags_v2",
            primary_ctx_set_flags as *const c_void,
        ),
    ]
}

fn known(device: c_int) -> Result<u32, CUresult> {
    u32::try_from(device)
        .ok()
        .filter(|&device| device < visible::count())
        .ok_or(CUresult::ERROR_INVALID_DEVICE)
}

unsafe extern "C" fn get(device: *mut c_int, ordinal: c_int) -> CUresult {
    enter("cuDeviceGet", || {
        known(ordinal)?;
        // SAFETY: the caller passes null or a place for the device.
        unsafe { store(device, ordinal) }
    })
}

unsafe extern "C" fn get_count(count: *mut c_int) -> CUresult {
    // SAFETY: the caller passes null or a place for the number.
    enter("cuDeviceGetCount", || unsafe {
        store(count, visible::count() as c_int)
    })
}

/// Writes a C string into a buffer, cut to fit.
///
/// # Safety
/// `place` is null or has room for `len` characters.
unsafe fn store_text(place: *mut c_char, len: c_int, text: &CStr) -> Result<(), CUresult> {
    let len = usize::try_from(len).map_err(|_| CUresult::ERROR_INVALID_VALUE)?;
    if place.is_null() || len == 0 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let cut = text.count_bytes().min(len - 1);
    // SAFETY: `cut` bytes and a zero are no more than the `len` that the caller promises.
    unsafe {
        place.copy_from_nonoverlapping(text.as_ptr(), cut);
        place.add(cut).write(0);
    }
    Ok(())
}

unsafe extern "C" fn get_name(name: *mut c_char, len: c_int, device: c_int) -> CUresult {
    enter("cuDeviceGetName", || {
        known(device)?;
        // SAFETY: the caller passes a buffer of `len` characters.
        unsafe { store_text(name, len, NAME) }
    })
}

unsafe extern "C" fn get_uuid(place: *mut [u8; 16], device: c_int) -> CUresult {
    enter("cuDeviceGetUuid", || {
        let device = known(device)?;
        // SAFETY: the caller passes null or a place for a CUuuid, which is 16 bytes.
        unsafe { store(place, uuid(visible::physical(device))) }
    })
}

unsafe extern "C" fn get_attribute(value: *mut c_int, attribute: c_int, device: c_int) -> CUresult {
    enter("cuDeviceGetAttribute", || {
        let device = known(device)?;
        let answer = match attribute {
            1..=3 => 1024,                  // MAX_THREADS_PER_BLOCK, MAX_BLOCK_DIM_X and Y
            4 => 64,                        // MAX_BLOCK_DIM_Z
            5 => i32::MAX,                  // MAX_GRID_DIM_X
            6 | 7 => 65_535,                // MAX_GRID_DIM_Y, Z
            8 => 48 << 10,                  // MAX_SHARED_MEMORY_PER_BLOCK
            9 => 64 << 10,                  // TOTAL_CONSTANT_MEMORY
            10 => 32,                       // WARP_SIZE
            11 => i32::MAX,                 // MAX_PITCH
            12 => 65_536,                   // MAX_REGISTERS_PER_BLOCK
            13 => 1_000_000,                // CLOCK_RATE
            14 => 512,                      // TEXTURE_ALIGNMENT
            15 => 1,                        // GPU_OVERLAP
            16 => 132,                      // MULTIPROCESSOR_COUNT
            19 => 1,                        // CAN_MAP_HOST_MEMORY
            31 => 1,                        // CONCURRENT_KERNELS
            33 => pci_bus(device) as c_int, // PCI_BUS_ID
            34 | 50 => 0,                   // PCI_DEVICE_ID, PCI_DOMAIN_ID
            36 => 1_000_000,                // MEMORY_CLOCK_RATE
            37 => 64,                       // GLOBAL_MEMORY_BUS_WIDTH
            38 => 50 << 20,                 // L2_CACHE_SIZE
            39 => 2048,                     // MAX_THREADS_PER_MULTIPROCESSOR
            40 => 1,                        // ASYNC_ENGINE_COUNT
            41 => 1,                        // UNIFIED_ADDRESSING
            75 => COMPUTE_CAPABILITY.0,
            76 => COMPUTE_CAPABILITY.1,
            78 => 1,                                    // STREAM_PRIORITIES_SUPPORTED
            81 => 228 << 10,                            // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
            82 => 65_536,                               // MAX_REGISTERS_PER_MULTIPROCESSOR
            91 => 1,                                    // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
            92..=94 | 122 | 123 => 1, // memory operations in streams, also of 64 bits and with NOR
            95 => 1,                  // COOPERATIVE_LAUNCH
            97 => super::shape::SHARED_OPT_IN as c_int, // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
            99 => 1,                  // HOST_REGISTER_SUPPORTED
            102 => 1,                 // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            103 => 1,                 // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            106 => 32,                // MAX_BLOCKS_PER_MULTIPROCESSOR
            111 => 1 << 10,           // RESERVED_SHARED_MEMORY_PER_BLOCK
            115 => 1,                 // MEMORY_POOLS_SUPPORTED
            120 => 1,                 // CLUSTER_LAUNCH
            126 => 4,                 // MEM_SYNC_DOMAIN_COUNT
            134 => 0,                 // HOST_NUMA_ID
            141 | 145 => 1,           // memory of the host in virtual memory management
            ..=0 | 161.. => return Err(CUresult::ERROR_INVALID_VALUE),
            // Features that are not supported: managed memory, GPUDirect, fabric handles, multicast, DMA buffers, …
            _ => 0,
        };
        // SAFETY: the caller passes null or a place for the number.
        unsafe { store(value, answer) }
    })
}

unsafe extern "C" fn total_mem(bytes: *mut usize, device: c_int) -> CUresult {
    enter("cuDeviceTotalMem", || {
        known(device)?;
        // SAFETY: the caller passes null or a place for the number.
        unsafe { store(bytes, settings().memory as usize) }
    })
}

unsafe extern "C" fn compute_capability(
    major: *mut c_int,
    minor: *mut c_int,
    device: c_int,
) -> CUresult {
    enter("cuDeviceComputeCapability", || {
        known(device)?;
        // SAFETY: the caller passes null or places for the numbers.
        unsafe {
            store(major, COMPUTE_CAPABILITY.0)?;
            store(minor, COMPUTE_CAPABILITY.1)
        }
    })
}

fn pci_bus(device: u32) -> u32 {
    bus_of(visible::physical(device))
}

/// Returns the bus of a device by its number on this host. Each device has its own bus; bus 0 belongs to the host.
pub(crate) fn bus_of(physical: u32) -> u32 {
    physical + 1
}

unsafe extern "C" fn get_pci_bus_id(text: *mut c_char, len: c_int, device: c_int) -> CUresult {
    enter("cuDeviceGetPCIBusId", || {
        let device = known(device)?;
        let id = format!("0000:{:02X}:00.0\0", pci_bus(device));
        let id = CStr::from_bytes_with_nul(id.as_bytes()).map_err(|_| CUresult::ERROR_UNKNOWN)?;
        // SAFETY: the caller passes a buffer of `len` characters.
        unsafe { store_text(text, len, id) }
    })
}

unsafe extern "C" fn get_by_pci_bus_id(device: *mut c_int, text: *const c_char) -> CUresult {
    enter("cuDeviceGetByPCIBusId", || {
        if text.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller passes a C string.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        // "0000:01:00.0", "01:00.0"
        let mut parts = text.rsplit(':');
        let bus = parts
            .nth(1)
            .and_then(|bus| u32::from_str_radix(bus, 16).ok());
        let found = bus
            .and_then(|bus| bus.checked_sub(1))
            .ok_or(CUresult::ERROR_INVALID_VALUE)?;
        let found = visible::ordinal(found).ok_or(CUresult::ERROR_INVALID_DEVICE)?;
        // SAFETY: the caller passes null or a place for the device.
        unsafe { store(device, found) }
    })
}

unsafe extern "C" fn can_access_peer(answer: *mut c_int, device: c_int, peer: c_int) -> CUresult {
    enter("cuDeviceCanAccessPeer", || {
        let other = known(device)? != known(peer)?;
        // SAFETY: the caller passes null or a place for the answer.
        unsafe { store(answer, c_int::from(other)) }
    })
}

unsafe extern "C" fn get_p2p_attribute(
    value: *mut c_int,
    attribute: c_uint,
    from: c_int,
    to: c_int,
) -> CUresult {
    enter("cuDeviceGetP2PAttribute", || {
        if known(from)? == known(to)? {
            return Err(CUresult::ERROR_INVALID_DEVICE);
        }
        let answer = match attribute {
            1 => 0,     // PERFORMANCE_RANK
            2 => 1,     // ACCESS_SUPPORTED
            3..=5 => 0, // native atomics, arrays
            _ => return Err(CUresult::ERROR_INVALID_VALUE),
        };
        // SAFETY: the caller passes null or a place for the answer.
        unsafe { store(value, answer) }
    })
}

unsafe extern "C" fn primary_ctx_retain(place: *mut *mut c_void, device: c_int) -> CUresult {
    enter("cuDevicePrimaryCtxRetain", || {
        known(device)?;
        if place.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let context = context::retain(device)?;
        // SAFETY: not null, and the caller passes a place for the context.
        unsafe { store(place, context.handle()) }
    })
}

unsafe extern "C" fn primary_ctx_release(device: c_int) -> CUresult {
    enter("cuDevicePrimaryCtxRelease", || context::release(device))
}

unsafe extern "C" fn primary_ctx_reset(device: c_int) -> CUresult {
    enter("cuDevicePrimaryCtxReset", || context::reset(device))
}

unsafe extern "C" fn primary_ctx_get_state(
    device: c_int,
    flags: *mut c_uint,
    active: *mut c_int,
) -> CUresult {
    enter("cuDevicePrimaryCtxGetState", || {
        let (set, alive) = context::primary_state(device)?;
        // SAFETY: the caller passes null or places for the two.
        unsafe {
            store(flags, set)?;
            store(active, c_int::from(alive))
        }
    })
}

unsafe extern "C" fn primary_ctx_set_flags(device: c_int, flags: c_uint) -> CUresult {
    enter("cuDevicePrimaryCtxSetFlags", || {
        context::set_primary_flags(device, flags)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_one_host_have_fixed_and_different_uuids() {
        assert_eq!(uuid(0), uuid(0));
        assert_ne!(uuid(0), uuid(1));
        assert_ne!(uuid(0)[..8], uuid(0)[8..]);
    }
}

//! Properties of addresses: `cuPointerGetAttribute(s)`, `cuPointerSetAttribute`, `cuMemGetAddressRange`.

use std::collections::HashSet;
use std::ffi::{c_int, c_uint, c_void};

use super::call::{enter, store};
use super::context;
use super::virtual_memory::DESCRIPTOR;
use crate::memory::{self, Location};
use crate::result::CUresult;
use crate::sync::Mutex;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuPointerGetAttribute", get_attribute as *const c_void),
        (c"cuPointerGetAttributes", get_attributes as *const c_void),
        (c"cuPointerSetAttribute", set_attribute as *const c_void),
        (
            c"cuMemGetAddressRange_v2",
            get_address_range as *const c_void,
        ),
    ]
}

const HOST: c_uint = 1;
const DEVICE: c_uint = 2;

/// The properties of an address that CUDA knows.
struct Known {
    host: bool,
    device: i32,
    start: u64,
    size: u64,
    /// The number of the allocation, unique in this process.
    id: u64,
    /// Whether `cuIpcGetMemHandle` accepts the allocation.
    ipc: bool,
    /// The handle types that the memory can be exported as.
    handle_types: u64,
    /// The memory pool of the allocation, if it comes from one of `cuMemPoolCreate` or from a device's default pool.
    pool: usize,
}

/// Each kind of memory numbers its allocations separately; these bits keep the numbers distinct.
const MAPPED_IDS: u64 = 1 << 62;
const HOST_IDS: u64 = 1 << 61;

fn identify(address: u64) -> Option<Known> {
    if let Some(found) = memory::allocation_at(address) {
        return Some(Known {
            host: false,
            device: found.device,
            start: found.start,
            size: found.size,
            id: found.id,
            ipc: found.ipc,
            handle_types: 0,
            pool: found.mempool,
        });
    }
    if let Some(piece) = memory::piece_at(address) {
        let (host, device) = match piece.memory().location() {
            Location::Device(device) => (false, device),
            _ => (true, 0),
        };
        return Some(Known {
            host,
            device,
            start: piece.address(),
            size: piece.size(),
            id: MAPPED_IDS | piece.memory().number(),
            ipc: false,
            handle_types: u64::from(piece.memory().handle_types() & DESCRIPTOR),
            pool: 0,
        });
    }
    let block = memory::host_block(address as usize)?;
    Some(Known {
        host: true,
        device: block.device,
        start: block.start as u64,
        size: block.len as u64,
        id: HOST_IDS | block.number,
        ipc: false,
        handle_types: 0,
        pool: 0,
    })
}

/// The allocations with `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
static SYNCHRONOUS: Mutex<Option<HashSet<u64>>> = Mutex::new(None);

fn is_synchronous(id: u64) -> bool {
    let set = SYNCHRONOUS.lock();
    set.as_ref().is_some_and(|set| set.contains(&id))
}

/// # Safety
/// `place` is null or has room for the attribute's type.
unsafe fn answer(
    known: &Known,
    address: u64,
    attribute: c_int,
    place: *mut c_void,
) -> Result<(), CUresult> {
    // SAFETY: each arm writes the type that CUDA documents for the attribute.
    unsafe {
        match attribute {
            // CONTEXT
            1 => store(place.cast(), context::primary(known.device)?.handle()),
            // MEMORY_TYPE
            2 => store(place.cast(), if known.host { HOST } else { DEVICE }),
            // DEVICE_POINTER: pinned memory has the same address on every device
            3 => store(place.cast(), address),
            // HOST_POINTER
            4 if known.host => store(place.cast(), address),
            4 => Err(CUresult::ERROR_INVALID_VALUE),
            // SYNC_MEMOPS
            6 => store(
                place.cast::<c_uint>(),
                c_uint::from(is_synchronous(known.id)),
            ),
            // BUFFER_ID, MEMORY_BLOCK_ID
            7 | 20 => store(place.cast(), known.id),
            // IS_MANAGED, IS_GPU_DIRECT_RDMA_CAPABLE, IS_HW_DECOMPRESS_CAPABLE
            8 | 15 | 21 => store(place.cast::<c_uint>(), 0),
            // DEVICE_ORDINAL
            9 => store(place.cast(), known.device),
            // IS_LEGACY_CUDA_IPC_CAPABLE
            10 => store(place.cast::<c_uint>(), c_uint::from(known.ipc)),
            // RANGE_START_ADDR, MAPPING_BASE_ADDR; RANGE_SIZE, MAPPING_SIZE
            11 | 19 => store(place.cast(), known.start),
            12 | 18 => store(place.cast(), known.size as usize),
            // MAPPED
            13 => store(place.cast::<c_uint>(), 1),
            // ALLOWED_HANDLE_TYPES
            14 => store(place.cast(), known.handle_types),
            // ACCESS_FLAGS: reading and writing
            16 => store(place.cast::<c_uint>(), 3),
            // MEMPOOL_HANDLE
            17 => store(place.cast(), known.pool),
            _ => Err(CUresult::ERROR_NOT_SUPPORTED),
        }
    }
}

unsafe extern "C" fn get_attribute(place: *mut c_void, attribute: c_int, address: u64) -> CUresult {
    enter("cuPointerGetAttribute", || {
        let known = identify(address).ok_or(CUresult::ERROR_INVALID_VALUE)?;
        // SAFETY: the caller passes null or a place for this attribute.
        unsafe { answer(&known, address, attribute, place) }
    })
}

unsafe extern "C" fn get_attributes(
    count: c_uint,
    attributes: *const c_int,
    places: *const *mut c_void,
    address: u64,
) -> CUresult {
    enter("cuPointerGetAttributes", || {
        if attributes.is_null() || places.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let known = identify(address);
        for index in 0..count as usize {
            // SAFETY: the caller passes `count` of each.
            let (attribute, place) =
                unsafe { (attributes.add(index).read(), places.add(index).read()) };
            let answered = match &known {
                // SAFETY: the caller passes a place for each attribute.
                Some(known) => unsafe { answer(known, address, attribute, place) },
                None => Err(CUresult::ERROR_INVALID_VALUE),
            };
            if answered.is_err() {
                // Unlike `cuPointerGetAttribute`, this function succeeds, with zeros (device -2), where there is no value: for an
                // unknown address, and for an attribute that a known address does not have.
                match attribute {
                    // SAFETY: these are 64 bits wide.
                    1 | 3 | 4 | 7 | 11 | 12 | 14 | 17..=20 => unsafe {
                        store(place.cast::<u64>(), 0)?
                    },
                    // SAFETY: a signed 32 bit number.
                    9 => unsafe { store(place.cast::<c_int>(), -2)? },
                    // SAFETY: these are 32 bits wide.
                    2 | 6 | 8 | 10 | 13 | 15 | 16 | 21 => unsafe {
                        store(place.cast::<c_uint>(), 0)?
                    },
                    _ => return Err(CUresult::ERROR_NOT_SUPPORTED),
                }
            }
        }
        Ok(())
    })
}

/// Sets `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`, the only attribute that can be set. On a GPU it affects writes by devices other
/// than GPUs, which do not exist here: the value is stored and has no effect.
unsafe extern "C" fn set_attribute(
    value: *const c_void,
    attribute: c_int,
    address: u64,
) -> CUresult {
    enter("cuPointerSetAttribute", || {
        let known = identify(address).ok_or(CUresult::ERROR_INVALID_VALUE)?;
        if attribute != 6 || value.is_null() || known.host {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller passes a number of 32 bits.
        let on = unsafe { value.cast::<c_uint>().read() } != 0;
        let mut set = SYNCHRONOUS.lock();
        let set = set.get_or_insert_default();
        match on {
            true => set.insert(known.id),
            false => set.remove(&known.id),
        };
        Ok(())
    })
}

unsafe extern "C" fn get_address_range(
    start: *mut u64,
    size: *mut usize,
    address: u64,
) -> CUresult {
    enter("cuMemGetAddressRange", || {
        let known = identify(address).ok_or(CUresult::ERROR_NOT_FOUND)?;
        for (place, value) in [(start, known.start), (size.cast::<u64>(), known.size)] {
            if !place.is_null() {
                // SAFETY: not null, and the caller passes places of 64 bits.
                unsafe { store(place, value)? };
            }
        }
        Ok(())
    })
}

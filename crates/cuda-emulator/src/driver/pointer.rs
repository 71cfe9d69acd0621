//! What an address is: `cuPointerGetAttribute(s)`, `cuMemGetAddressRange`.

use std::ffi::{c_int, c_uint, c_void};

use super::{CUresult, context, enter, store};
use crate::elf::Symbol;
use crate::memory;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuPointerGetAttribute", get_attribute as *const c_void),
        (c"cuPointerGetAttributes", get_attributes as *const c_void),
        (
            c"cuMemGetAddressRange_v2",
            get_address_range as *const c_void,
        ),
    ]
}

const HOST: c_uint = 1;
const DEVICE: c_uint = 2;

/// What is known of an address that CUDA knows.
struct Known {
    host: bool,
    device: i32,
    start: u64,
    size: u64,
}

fn identify(address: u64) -> Option<Known> {
    if let Some((device, start, size)) = memory::range(address) {
        return Some(Known {
            host: false,
            device,
            start,
            size,
        });
    }
    let block = memory::host_block(address as usize)?;
    Some(Known {
        host: true,
        device: block.device,
        start: block.start as u64,
        size: block.len as u64,
    })
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
            // DEVICE_POINTER: pinned memory has none here
            3 if known.host => Err(CUresult::ERROR_INVALID_VALUE),
            3 => store(place.cast(), address),
            // HOST_POINTER
            4 if known.host => store(place.cast(), address),
            4 => Err(CUresult::ERROR_INVALID_VALUE),
            // SYNC_MEMOPS, IS_MANAGED
            6 | 8 => store(place.cast::<c_uint>(), 0),
            // BUFFER_ID
            7 => store(place.cast(), known.start),
            // DEVICE_ORDINAL
            9 => store(place.cast(), known.device),
            // RANGE_START_ADDR, RANGE_SIZE
            11 => store(place.cast(), known.start),
            12 => store(place.cast(), known.size as usize),
            // MAPPED
            13 => store(place.cast::<c_uint>(), 1),
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
                // Unlike the single question, this one answers with zero where there is nothing to
                // say.
                match attribute {
                    // SAFETY: these are 64 bits wide.
                    1 | 3 | 4 | 7 | 11 | 12 => unsafe { store(place.cast::<u64>(), 0)? },
                    // SAFETY: a signed 32 bit number.
                    9 => unsafe { store(place.cast::<c_int>(), -2)? },
                    // SAFETY: these are 32 bits wide.
                    2 | 6 | 8 | 13 => unsafe { store(place.cast::<c_uint>(), 0)? },
                    _ => return Err(CUresult::ERROR_NOT_SUPPORTED),
                }
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn get_address_range(
    start: *mut u64,
    size: *mut usize,
    address: u64,
) -> CUresult {
    enter("cuMemGetAddressRange", || {
        let (_, from, len) = memory::range(address).ok_or(CUresult::ERROR_NOT_FOUND)?;
        for (place, value) in [(start, from), (size.cast::<u64>(), len)] {
            if !place.is_null() {
                // SAFETY: not null, and the caller passes places of 64 bits.
                unsafe { store(place, value)? };
            }
        }
        Ok(())
    })
}

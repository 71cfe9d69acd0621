//! Device memory: allocation and free, at once and in stream order, and the one pool that each
//! device has.

use std::ffi::{c_int, c_void};

use super::context;
use super::{CUresult, capture, enter, refuse, store, stream_of};
use crate::elf::Symbol;
use crate::exec::{self, Step, Stream, Work};
use crate::memory::{self, Freeing, Placement, Pool};

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuMemAlloc_v2", alloc as *const c_void),
        (c"cuMemFree_v2", free as *const c_void),
        (c"cuMemAllocAsync", alloc_async as *const c_void),
        (c"cuMemFreeAsync", free_async as *const c_void),
        (
            c"cuMemAllocFromPoolAsync",
            alloc_from_pool_async as *const c_void,
        ),
        (c"cuMemGetInfo_v2", get_info as *const c_void),
        (c"cuDeviceGetDefaultMemPool", get_mem_pool as *const c_void),
        (c"cuDeviceGetMemPool", get_mem_pool as *const c_void),
        (c"cuDeviceSetMemPool", set_mem_pool as *const c_void),
        (
            c"cuMemPoolGetAttribute",
            pool_get_attribute as *const c_void,
        ),
        (
            c"cuMemPoolSetAttribute",
            pool_set_attribute as *const c_void,
        ),
        (c"cuMemPoolTrimTo", pool_trim_to as *const c_void),
    ]
}

unsafe extern "C" fn alloc(place: *mut u64, size: usize) -> CUresult {
    enter("cuMemAlloc", || {
        if place.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        capture::unsafe_call()?;
        let context = context::current()?;
        let pool = memory::pool(context.device())?;
        let placement = pool.allocate(size as u64, context.number(), false)?;
        // SAFETY: not null, and the caller passes a place for the address.
        unsafe { store(place, placement.address) }
    })
}

unsafe extern "C" fn free(address: u64) -> CUresult {
    enter("cuMemFree", || {
        if address == 0 {
            return Ok(());
        }
        capture::unsafe_call()?;
        let context = context::current()?;
        let freeing =
            memory::begin_free(address).map_err(|violation| refuse(violation, &context))?;
        // Nothing that is under way on the device may still use it.
        exec::synchronize_device(freeing.device());
        freeing.finish();
        context.check()
    })
}

/// A stream has got to an allocation.
struct Reach {
    pool: &'static Pool,
    placement: Placement,
}

impl Work for Reach {
    fn step(&mut self, _budget: usize) -> Step {
        self.pool.reached(self.placement);
        Step::Done
    }

    fn describe(&self) -> String {
        format!("allocation of 0x{:x}", self.placement.address)
    }
}

/// A stream has got to a free; dropping the job frees as well.
struct Release(Option<Freeing>);

impl Work for Release {
    fn step(&mut self, _budget: usize) -> Step {
        if let Some(freeing) = self.0.take() {
            freeing.finish();
        }
        Step::Done
    }

    fn describe(&self) -> String {
        "free".into()
    }
}

const NO_MEMORY_NODES: &str =
    "on a stream that is being captured: the emulator's graphs cannot allocate memory";

fn allocate_on(stream: &std::sync::Arc<Stream>, size: usize) -> Result<u64, CUresult> {
    let context = stream.context();
    if stream.capturing() {
        super::refused::say("cuMemAllocAsync", NO_MEMORY_NODES);
    }
    capture::refuse(stream, CUresult::ERROR_NOT_SUPPORTED)?;
    stream.mark()?;
    let pool = memory::pool(context.device())?;
    // On an idle stream the allocation is reached at once.
    let pending = !stream.idle();
    let placement = pool.allocate(size as u64, context.number(), pending)?;
    if pending {
        stream.enqueue(Box::new(Reach { pool, placement }))?;
    }
    Ok(placement.address)
}

unsafe extern "C" fn alloc_async(place: *mut u64, size: usize, stream: *mut c_void) -> CUresult {
    enter("cuMemAllocAsync", || {
        if place.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let stream = stream_of(stream)?;
        // Unlike cuMemAlloc, which refuses it.
        let address = if size == 0 {
            0
        } else {
            allocate_on(&stream, size)?
        };
        // SAFETY: not null, and the caller passes a place for the address.
        unsafe { store(place, address) }
    })
}

unsafe extern "C" fn free_async(address: u64, stream: *mut c_void) -> CUresult {
    enter("cuMemFreeAsync", || {
        let stream = stream_of(stream)?;
        if address == 0 {
            return stream.context().check();
        }
        // A graph may only free what it allocates itself, and here it allocates nothing.
        capture::refuse(&stream, CUresult::ERROR_INVALID_VALUE)?;
        stream.mark()?;
        let freeing =
            memory::begin_free(address).map_err(|violation| refuse(violation, stream.context()))?;
        if stream.idle() {
            freeing.finish();
            return Ok(());
        }
        stream.enqueue(Box::new(Release(Some(freeing))))?;
        Ok(())
    })
}

unsafe extern "C" fn get_info(free: *mut usize, total: *mut usize) -> CUresult {
    enter("cuMemGetInfo", || {
        let (left, all) = memory::pool(context::current()?.device())?.usage();
        // SAFETY: the caller passes null or places for the numbers.
        unsafe {
            store(free, left as usize)?;
            store(total, all as usize)
        }
    })
}

/// The handle of a device's pool: no object stands behind it.
const POOL: usize = 0x47 << 56;

fn pool_of(handle: *mut c_void) -> Result<&'static Pool, CUresult> {
    let device = handle.addr().wrapping_sub(POOL) >> 4;
    if handle.addr() & 0xf != 0 || device >= super::visible::count() as usize {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    memory::pool(device as i32)
}

unsafe extern "C" fn get_mem_pool(place: *mut *mut c_void, device: c_int) -> CUresult {
    enter("cuDeviceGetDefaultMemPool", || {
        memory::pool(device)?;
        // SAFETY: the caller passes null or a place for the pool.
        unsafe {
            store(
                place,
                std::ptr::without_provenance_mut(POOL + ((device as usize) << 4)),
            )
        }
    })
}

unsafe extern "C" fn set_mem_pool(device: c_int, pool: *mut c_void) -> CUresult {
    enter("cuDeviceSetMemPool", || {
        if pool_of(pool)?.device() == device {
            Ok(())
        } else {
            Err(CUresult::ERROR_INVALID_VALUE)
        }
    })
}

unsafe extern "C" fn alloc_from_pool_async(
    place: *mut u64,
    size: usize,
    pool: *mut c_void,
    stream: *mut c_void,
) -> CUresult {
    enter("cuMemAllocFromPoolAsync", || {
        if place.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let (pool, stream) = (pool_of(pool)?, stream_of(stream)?);
        if pool.device() != stream.device() {
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        let address = if size == 0 {
            0
        } else {
            allocate_on(&stream, size)?
        };
        // SAFETY: not null, and the caller passes a place for the address.
        unsafe { store(place, address) }
    })
}

unsafe extern "C" fn pool_get_attribute(
    pool: *mut c_void,
    attribute: c_int,
    value: *mut c_void,
) -> CUresult {
    enter("cuMemPoolGetAttribute", || {
        let (free, total) = pool_of(pool)?.usage();
        let used = total - free;
        match attribute {
            // Reuse policies: on, as by default.
            // SAFETY: the caller passes null or a place for an int.
            1..=3 => unsafe { store(value.cast::<c_int>(), 1) },
            // Release threshold; reserved and used memory now and at most.
            // SAFETY: the caller passes null or a place for a 64-bit number.
            4 => unsafe { store(value.cast::<u64>(), 0) },
            // SAFETY: as above.
            5..=8 => unsafe { store(value.cast::<u64>(), used) },
            _ => Err(CUresult::ERROR_INVALID_VALUE),
        }
    })
}

unsafe extern "C" fn pool_set_attribute(
    pool: *mut c_void,
    attribute: c_int,
    _value: *mut c_void,
) -> CUresult {
    enter("cuMemPoolSetAttribute", || {
        pool_of(pool)?;
        // Hints for a cache that the emulator has no use for.
        if (1..=8).contains(&attribute) {
            Ok(())
        } else {
            Err(CUresult::ERROR_INVALID_VALUE)
        }
    })
}

unsafe extern "C" fn pool_trim_to(pool: *mut c_void, _keep: usize) -> CUresult {
    enter("cuMemPoolTrimTo", || pool_of(pool).map(drop))
}

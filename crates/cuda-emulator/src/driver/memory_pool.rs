//! Memory pools (`cuMemPool*`), and stream-ordered allocation from them.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::call::{enter, store};
use super::handles::stream_of;
use super::virtual_memory::{Grant, PINNED, RawLocation, known_grants};
use super::{capture, refused};
use crate::exec::{Step, Stream, Work};
use crate::memory::{self, Location, MemPool, Placement, Pool};
use crate::result::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuMemAllocAsync", alloc_async as *const c_void),
        (
            c"cuMemAllocFromPoolAsync",
            alloc_from_pool_async as *const c_void,
        ),
        (
            c"cuDeviceGetDefaultMemPool",
            get_default_mem_pool as *const c_void,
        ),
        (c"cuDeviceGetMemPool", get_mem_pool as *const c_void),
        (c"cuDeviceSetMemPool", set_mem_pool as *const c_void),
        (c"cuMemPoolCreate", create as *const c_void),
        (c"cuMemPoolDestroy", destroy as *const c_void),
        (c"cuMemPoolGetAttribute", get_attribute as *const c_void),
        (c"cuMemPoolSetAttribute", set_attribute as *const c_void),
        (c"cuMemPoolSetAccess", set_access as *const c_void),
        (c"cuMemPoolGetAccess", get_access as *const c_void),
        (c"cuMemPoolTrimTo", trim_to as *const c_void),
    ]
}

/// The job of a stream-ordered allocation: the stream has reached it.
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

/// How long an allocation waits for a free of its stream.
const PATIENCE: Duration = Duration::from_secs(10);

const NO_MEMORY_NODES: &str =
    "on a stream that is being captured: the emulator's graphs cannot allocate memory";

fn allocate_on(stream: &Arc<Stream>, size: usize, mempool: &MemPool) -> Result<u64, CUresult> {
    // `cuMemAlloc` refuses size 0, this function does not.
    if size == 0 {
        return Ok(0);
    }
    let context = stream.context();
    if stream.capturing() {
        refused::say("cuMemAllocAsync", NO_MEMORY_NODES);
    }
    capture::refuse(stream, CUresult::ERROR_NOT_SUPPORTED)?;
    stream.mark()?;
    let pool = memory::pool(mempool.device())?;
    // Memory that the stream frees before this call can be used again, even if the free was not reached yet.
    let last_free = stream.pending_free();
    // On an idle stream the allocation is reached at once.
    let try_it = || {
        let pending = !stream.idle();
        let placement = mempool.allocate(size as u64, context.number(), pending);
        placement.map(|placement| (pending, placement))
    };
    let (pending, placement) = match (try_it(), last_free) {
        (Err(CUresult::ERROR_OUT_OF_MEMORY), Some(sequence)) => {
            // Not for ever: the stream may wait for something that this thread has not begun yet.
            let until = Instant::now() + PATIENCE;
            while !stream.poll(sequence)? && Instant::now() < until {
                thread::sleep(Duration::from_micros(100));
            }
            try_it()?
        }
        (placed, _) => placed?,
    };
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
        let pool = MemPool::current_of(stream.device())?;
        let address = allocate_on(&stream, size, &pool)?;
        // SAFETY: not null, and the caller passes a place for the address.
        unsafe { store(place, address) }
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
        let (pool, stream) = (MemPool::of(pool)?, stream_of(stream)?);
        if pool.device() != stream.device() {
            refused::say(
                "cuMemAllocFromPoolAsync",
                "the emulator allocates on a stream of the pool's own device",
            );
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        let address = allocate_on(&stream, size, &pool)?;
        // SAFETY: not null, and the caller passes a place for the address.
        unsafe { store(place, address) }
    })
}

unsafe extern "C" fn get_default_mem_pool(place: *mut *mut c_void, device: c_int) -> CUresult {
    // SAFETY: the caller passes null or a place for the pool.
    enter("cuDeviceGetDefaultMemPool", || unsafe {
        store(place, MemPool::default_of(device)?.handle())
    })
}

unsafe extern "C" fn get_mem_pool(place: *mut *mut c_void, device: c_int) -> CUresult {
    // SAFETY: the caller passes null or a place for the pool.
    enter("cuDeviceGetMemPool", || unsafe {
        store(place, MemPool::current_of(device)?.handle())
    })
}

unsafe extern "C" fn set_mem_pool(device: c_int, pool: *mut c_void) -> CUresult {
    enter("cuDeviceSetMemPool", || {
        let pool = MemPool::of(pool)?;
        if pool.device() != device {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        pool.make_current()
    })
}

/// `CUmemPoolProps`; the remaining fields are reserved.
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_uint,
    location: RawLocation,
    windows: *mut c_void,
    limit: usize,
}

unsafe extern "C" fn create(place: *mut *mut c_void, properties: *const Properties) -> CUresult {
    const NO_SHARING: &str =
        "memory of the emulator's pools is not exported: share memory of cuMemAlloc or cuMemCreate";
    const NO_HOST: &str = "the emulator's memory pools are of devices";
    enter("cuMemPoolCreate", || {
        // SAFETY: the caller passes null or properties.
        let given = unsafe { properties.as_ref() }.ok_or(CUresult::ERROR_INVALID_VALUE)?;
        if place.is_null() || given.kind != PINNED {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        if given.handle_types != 0 {
            refused::say("cuMemPoolCreate", NO_SHARING);
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        let Location::Device(device) = given.location.known()? else {
            refused::say("cuMemPoolCreate", NO_HOST);
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        };
        // 0 selects the driver's default.
        let limit = match given.limit {
            0 => u64::MAX,
            limit => limit as u64,
        };
        // SAFETY: not null, and the caller passes a place for the pool.
        unsafe { store(place, MemPool::create(device, limit)?.handle()) }
    })
}

unsafe extern "C" fn destroy(pool: *mut c_void) -> CUresult {
    enter("cuMemPoolDestroy", || MemPool::of(pool)?.destroy())
}

/// The release threshold, the first attribute of 64 bits.
const RELEASE_THRESHOLD: c_int = 4;

unsafe extern "C" fn get_attribute(
    pool: *mut c_void,
    attribute: c_int,
    value: *mut c_void,
) -> CUresult {
    enter("cuMemPoolGetAttribute", || {
        let pool = MemPool::of(pool)?;
        let (used, most) = pool.usage();
        let hint = |at: c_int| {
            let hint = pool.hints().get((at - 1).cast_unsigned() as usize);
            hint.map_or(0, |hint| hint.load(Ordering::Relaxed))
        };
        match attribute {
            // Reuse policies.
            // SAFETY: the caller passes null or a place for an int.
            1..RELEASE_THRESHOLD => unsafe {
                store(value.cast::<c_int>(), hint(attribute) as c_int)
            },
            // SAFETY: the caller passes null or a place for a 64-bit number.
            RELEASE_THRESHOLD => unsafe { store(value.cast::<u64>(), hint(attribute)) },
            // Present values of reserved and used memory.
            // SAFETY: as above.
            5 | 7 => unsafe { store(value.cast::<u64>(), used) },
            // Peak values of reserved and used memory.
            // SAFETY: as above.
            6 | 8 => unsafe { store(value.cast::<u64>(), most) },
            _ => Err(CUresult::ERROR_INVALID_VALUE),
        }
    })
}

unsafe extern "C" fn set_attribute(
    pool: *mut c_void,
    attribute: c_int,
    value: *const c_void,
) -> CUresult {
    enter("cuMemPoolSetAttribute", || {
        let pool = MemPool::of(pool)?;
        if value.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let value = match attribute {
            // SAFETY: not null, and the caller passes an int.
            1..RELEASE_THRESHOLD => u64::from(unsafe { value.cast::<c_uint>().read() }),
            // SAFETY: not null, and the caller passes a 64-bit number.
            RELEASE_THRESHOLD | 6 | 8 => unsafe { value.cast::<u64>().read() },
            _ => return Err(CUresult::ERROR_INVALID_VALUE),
        };
        match attribute {
            // A peak value can only be reset to 0.
            6 | 8 if value != 0 => return Err(CUresult::ERROR_INVALID_VALUE),
            6 | 8 => pool.reset_peak(),
            hint => {
                let hint = pool.hints().get((hint - 1).cast_unsigned() as usize);
                hint.ok_or(CUresult::ERROR_INVALID_VALUE)?
                    .store(value, Ordering::Relaxed);
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn set_access(pool: *mut c_void, grants: *const Grant, count: usize) -> CUresult {
    enter("cuMemPoolSetAccess", || {
        let pool = MemPool::of(pool)?;
        // SAFETY: the caller passes null or `count` descriptions.
        for (location, flags) in unsafe { known_grants(grants, count) }? {
            match (location, flags) {
                (Location::Device(device), 0 | 1 | 3) => pool.grant(device, flags)?,
                _ => return Err(CUresult::ERROR_INVALID_VALUE),
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn get_access(
    place: *mut c_uint,
    pool: *mut c_void,
    location: *const RawLocation,
) -> CUresult {
    enter("cuMemPoolGetAccess", || {
        let pool = MemPool::of(pool)?;
        // SAFETY: the caller passes null or a location.
        let location = unsafe { location.as_ref() }.ok_or(CUresult::ERROR_INVALID_VALUE)?;
        let Location::Device(device) = location.known()? else {
            return Err(CUresult::ERROR_INVALID_VALUE);
        };
        // SAFETY: the caller passes null or a place for the flags.
        unsafe { store(place, pool.access_of(device) as c_uint) }
    })
}

/// Does nothing: a pool keeps no free memory.
unsafe extern "C" fn trim_to(pool: *mut c_void, _keep: usize) -> CUresult {
    enter("cuMemPoolTrimTo", || MemPool::of(pool).map(drop))
}

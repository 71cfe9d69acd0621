//! Memory pools made by programs, in addition to the default pools of devices.

mod common;

use std::ffi::{c_int, c_uint, c_void};

use common::*;
use cuda_emulator::memory::access;

#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_uint,
    location: [c_int; 2],
    windows: *mut c_void,
    limit: usize,
    reserved: [u64; 7],
}

fn create(device: c_int, limit: usize, handle_types: c_uint) -> Result<*mut c_void, u32> {
    let properties = Properties {
        kind: 1,
        handle_types,
        location: [1, device],
        windows: std::ptr::null_mut(),
        limit,
        reserved: [0; 7],
    };
    let mut pool = std::ptr::null_mut();
    match call!(c"cuMemPoolCreate", &raw mut pool => *mut *mut c_void, &raw const properties => *const Properties)
    {
        SUCCESS => Ok(pool),
        error => Err(error),
    }
}

fn take(pool: *mut c_void, size: usize, stream: *mut c_void) -> Result<u64, u32> {
    let mut address = 0;
    match call!(c"cuMemAllocFromPoolAsync", &raw mut address => *mut u64, size => usize, pool => *mut c_void, stream => *mut c_void)
    {
        SUCCESS => Ok(address),
        error => Err(error),
    }
}

fn number(pool: *mut c_void, attribute: c_int) -> u64 {
    let mut value = 0_u64;
    done!(c"cuMemPoolGetAttribute", pool => *mut c_void, attribute => c_int, (&raw mut value).cast() => *mut c_void);
    value
}

#[test]
fn a_pool_counts_what_is_allocated_from_it_and_keeps_its_limit() {
    context(0);
    let (stream, pool) = (stream(), create(0, 1 << 20, 0).unwrap());
    let one = take(pool, 600 << 10, stream).unwrap();
    assert_eq!(take(pool, 600 << 10, stream), Err(OUT_OF_MEMORY));
    write(one, b"pool");
    assert_eq!(read(one, 4), b"pool");
    assert_eq!((number(pool, 7), number(pool, 8)), (600 << 10, 600 << 10));
    assert_eq!(
        attribute::<u64>(17, one),
        Ok(pool.addr() as u64),
        "its pool"
    );
    assert_eq!(attribute::<c_uint>(10, one), Ok(0), "no legacy IPC");
    done!(c"cuMemFreeAsync", one => u64, stream => *mut c_void);
    done!(c"cuStreamSynchronize", stream => *mut c_void);
    assert_eq!((number(pool, 7), number(pool, 8)), (0, 600 << 10));
    let zero = 0_u64;
    done!(c"cuMemPoolSetAttribute", pool => *mut c_void, 8 => c_int, (&raw const zero).cast() => *const c_void);
    assert_eq!(number(pool, 8), 0);
    let threshold = u64::MAX;
    done!(c"cuMemPoolSetAttribute", pool => *mut c_void, 4 => c_int, (&raw const threshold).cast() => *const c_void);
    assert_eq!(number(pool, 4), u64::MAX);
    done!(c"cuMemPoolTrimTo", pool => *mut c_void, 0 => usize);
    done!(c"cuMemPoolDestroy", pool => *mut c_void);
    assert_eq!(
        call!(c"cuMemPoolDestroy", pool => *mut c_void),
        INVALID_VALUE
    );
    assert_eq!(take(pool, 1, stream), Err(INVALID_VALUE));
}

#[test]
fn memory_that_a_stream_is_going_to_free_can_be_allocated_on_it_again() {
    context(0);
    let (stream, pool) = (stream(), create(0, 1 << 20, 0).unwrap());
    let one = take(pool, 600 << 10, stream).unwrap();
    hold(stream, std::time::Duration::from_millis(50));
    done!(c"cuMemFreeAsync", one => u64, stream => *mut c_void);
    let other = take(pool, 600 << 10, stream).unwrap();
    write(other, b"again");
    // Without a free under way the limit holds at once.
    assert_eq!(take(pool, 600 << 10, stream), Err(OUT_OF_MEMORY));
    done!(c"cuMemFreeAsync", other => u64, stream => *mut c_void);
    done!(c"cuMemPoolDestroy", pool => *mut c_void);
}

#[test]
fn memory_of_a_pool_is_used_by_the_devices_it_is_open_to() {
    context(1);
    let (stream, pool) = (stream(), create(1, 0, 0).unwrap());
    let memory = take(pool, 100, stream).unwrap();
    done!(c"cuStreamSynchronize", stream => *mut c_void);
    access(1, memory, 100).unwrap();
    let refused = access(2, memory, 100).unwrap_err().to_string();
    assert!(refused.contains("cuMemPoolSetAccess"), "{refused}");
    #[repr(C)]
    struct Grant([c_int; 2], c_uint);
    let grant = Grant([1, 2], 3);
    done!(c"cuMemPoolSetAccess", pool => *mut c_void, &raw const grant => *const Grant, 1 => usize);
    access(2, memory, 100).unwrap();
    access(3, memory, 100).unwrap_err();
    let mut flags: c_uint = 7;
    for (device, wanted) in [(1, 3), (2, 3), (3, 0)] {
        let location = [1, device];
        done!(c"cuMemPoolGetAccess", &raw mut flags => *mut c_uint, pool => *mut c_void, location.as_ptr() => *const c_int);
        assert_eq!(flags, wanted, "device {device}");
    }
}

#[test]
fn a_device_allocates_from_the_pool_that_it_was_given() {
    context(2);
    let stream = stream();
    let get = |name: &std::ffi::CStr| {
        let mut pool = std::ptr::null_mut::<c_void>();
        let code = match name.to_bytes() {
            b"default" => {
                call!(c"cuDeviceGetDefaultMemPool", &raw mut pool => *mut *mut c_void, 2 => c_int)
            }
            _ => call!(c"cuDeviceGetMemPool", &raw mut pool => *mut *mut c_void, 2 => c_int),
        };
        assert_eq!(code, SUCCESS);
        pool
    };
    let default = get(c"default");
    assert_eq!(get(c"current"), default);
    assert_eq!(
        call!(c"cuMemPoolDestroy", default => *mut c_void),
        INVALID_VALUE
    );
    let own = create(2, 0, 0).unwrap();
    done!(c"cuDeviceSetMemPool", 2 => c_int, own => *mut c_void);
    assert_eq!(get(c"current"), own);
    let mut memory = 0_u64;
    done!(c"cuMemAllocAsync", &raw mut memory => *mut u64, 100 => usize, stream => *mut c_void);
    assert_eq!((number(own, 7), number(default, 7)), (100, 0));
    done!(c"cuMemPoolDestroy", own => *mut c_void);
    assert_eq!(get(c"current"), default, "instead of one that is gone");
    done!(c"cuMemFreeAsync", memory => u64, stream => *mut c_void);
    assert_eq!(
        create(2, 0, 1),
        Err(NOT_SUPPORTED),
        "nothing to export it as"
    );
}

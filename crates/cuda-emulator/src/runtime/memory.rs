//! Memory: allocation, copies, IPC, and the properties of addresses.

use std::ffi::{c_int, c_uint, c_void};

use super::caller::{Cuda, caller};
use super::device::{context, start, store};
use super::driver::{self, IpcMemHandle};
use super::error::{Code, run};
use super::layouts::Address;
use crate::driver::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols(cuda: Cuda) -> Vec<Symbol> {
    let batch = match cuda {
        Cuda::V12 => copy_batch_v12 as *const c_void,
        Cuda::V13 => copy_batch_v13 as *const c_void,
    };
    vec![
        (c"cudaMalloc", malloc as *const c_void),
        (c"cudaFree", free as *const c_void),
        (c"cudaFreeAsync", free_async as *const c_void),
        (c"cudaHostAlloc", host_alloc as *const c_void),
        (c"cudaFreeHost", free_host as *const c_void),
        (c"cudaMemPoolCreate", pool_create as *const c_void),
        (c"cudaMemcpy", copy as *const c_void),
        (c"cudaMemcpyAsync", copy_async as *const c_void),
        (c"cudaMemcpyBatchAsync", batch),
        (c"cudaMemset", set as *const c_void),
        (c"cudaMemsetAsync", set_async as *const c_void),
        (c"cudaIpcGetMemHandle", ipc_get as *const c_void),
        (c"cudaIpcOpenMemHandle", ipc_open as *const c_void),
        (c"cudaIpcCloseMemHandle", ipc_close as *const c_void),
        (c"cudaPointerGetAttributes", get_attributes as *const c_void),
    ]
}

/// Returns an address as the driver expects it. The memory may be the caller's own.
fn number(address: *const c_void) -> u64 {
    address.expose_provenance() as u64
}

/// Allocates memory. For size 0 the address is null, and nothing has to be freed.
unsafe extern "C" fn malloc(place: *mut u64, size: usize) -> Code {
    run(|| {
        context()?;
        // SAFETY: the caller passes null or a place for the address.
        unsafe {
            match size {
                0 => store(place, 0),
                _ => driver::cuMemAlloc_v2(place, size),
            }
        }
    })
}

unsafe extern "C" fn free(address: *mut c_void) -> Code {
    run(|| {
        context()?;
        if address.is_null() {
            return Ok(());
        }
        // SAFETY: the driver looks the address up.
        unsafe { driver::cuMemFree_v2(number(address)) }
    })
}

unsafe extern "C" fn free_async(address: *mut c_void, stream: *mut c_void) -> Code {
    run(|| {
        context()?;
        // SAFETY: the driver looks both up.
        unsafe { driver::cuMemFreeAsync(number(address), stream) }
    })
}

unsafe extern "C" fn host_alloc(place: *mut *mut c_void, size: usize, flags: c_uint) -> Code {
    run(|| {
        context()?;
        // SAFETY: the caller passes null or a place for the address.
        unsafe {
            match size {
                0 => store(place, std::ptr::null_mut()),
                _ => driver::cuMemHostAlloc(place, size, flags),
            }
        }
    })
}

unsafe extern "C" fn free_host(address: *mut c_void) -> Code {
    run(|| {
        context()?;
        if address.is_null() {
            return Ok(());
        }
        // SAFETY: the caller gives the memory up.
        unsafe { driver::cuMemFreeHost(address) }
    })
}

/// Refuses a structure whose layout the caller's build does not describe.
fn described(has: bool, name: &str) -> Result<(), Code> {
    if has {
        return Ok(());
    }
    eprintln!(
        "cuda-emulator: the calling library describes no {name}: a function that takes one returns \
         cudaErrorNotSupported"
    );
    Err(CUresult::ERROR_NOT_SUPPORTED.into())
}

unsafe extern "C" fn pool_create(place: *mut *mut c_void, properties: *const c_void) -> Code {
    run(|| {
        start()?;
        described(caller()?.layouts.has_pool, "cudaMemPoolProps")?;
        // SAFETY: the caller passes a place for the pool and properties, which are the driver's field by field.
        unsafe { driver::cuMemPoolCreate(place, properties) }
    })
}

/// Checks that the kind of a copy exists. Its value is otherwise ignored: the addresses determine the kinds of memory.
fn check_kind(kind: c_int) -> Result<(), Code> {
    /// `cudaMemcpyDefault`.
    const LAST: c_int = 4;
    match kind {
        0..=LAST => Ok(()),
        _ => Err(Code::INVALID_MEMCPY_DIRECTION),
    }
}

unsafe extern "C" fn copy(to: *mut c_void, from: *const c_void, size: usize, kind: c_int) -> Code {
    run(|| {
        context()?;
        check_kind(kind)?;
        // SAFETY: the caller passes `size` bytes of its own, or of a device's, which the driver looks up.
        unsafe { driver::cuMemcpy(number(to), number(from), size) }
    })
}

unsafe extern "C" fn copy_async(
    to: *mut c_void,
    from: *const c_void,
    size: usize,
    kind: c_int,
    stream: *mut c_void,
) -> Code {
    run(|| {
        context()?;
        check_kind(kind)?;
        // SAFETY: as above.
        unsafe { driver::cuMemcpyAsync(number(to), number(from), size, stream) }
    })
}

/// A batch of copies.
struct Batch {
    to: *const u64,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const c_void,
    first: *const usize,
    attribute_count: usize,
    stream: *mut c_void,
}

/// # Safety
/// There are as many of each as the batch says.
unsafe fn copy_batch(batch: &Batch) -> Result<(), Code> {
    context()?;
    described(caller()?.layouts.has_copy, "cudaMemcpyAttributes")?;
    // SAFETY: the caller's promise; the attributes are the driver's field by field.
    unsafe {
        driver::cuMemcpyBatchAsync_v2(
            batch.to,
            batch.from,
            batch.sizes,
            batch.count,
            batch.attributes,
            batch.first,
            batch.attribute_count,
            batch.stream,
        )
    }
}

unsafe extern "C" fn copy_batch_v13(
    to: *const u64,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const c_void,
    first: *const usize,
    attribute_count: usize,
    stream: *mut c_void,
) -> Code {
    let batch = Batch {
        to,
        from,
        sizes,
        count,
        attributes,
        first,
        attribute_count,
        stream,
    };
    // SAFETY: the same promises.
    run(|| unsafe { copy_batch(&batch) })
}

/// Copies a batch. After a failure, the place for the index of the failed copy gets `usize::MAX`, which is the index of no copy.
unsafe extern "C" fn copy_batch_v12(
    to: *const u64,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const c_void,
    first: *const usize,
    attribute_count: usize,
    failed: *mut usize,
    stream: *mut c_void,
) -> Code {
    /// The index that stands for no particular copy.
    const NONE: usize = usize::MAX;
    let batch = Batch {
        to,
        from,
        sizes,
        count,
        attributes,
        first,
        attribute_count,
        stream,
    };
    run(|| {
        // SAFETY: the same promises.
        let copied = unsafe { copy_batch(&batch) };
        if copied.is_err() && !failed.is_null() {
            // SAFETY: not null, and the caller passes a place for the number.
            unsafe { failed.write(NONE) };
        }
        copied
    })
}

unsafe extern "C" fn set(to: *mut c_void, value: c_int, size: usize) -> Code {
    run(|| {
        context()?;
        // SAFETY: the driver looks the address up.
        unsafe { driver::cuMemsetD8_v2(number(to), value as u8, size) }
    })
}

unsafe extern "C" fn set_async(
    to: *mut c_void,
    value: c_int,
    size: usize,
    stream: *mut c_void,
) -> Code {
    run(|| {
        context()?;
        // SAFETY: the driver looks the address up.
        unsafe { driver::cuMemsetD8Async(number(to), value as u8, size, stream) }
    })
}

unsafe extern "C" fn ipc_get(place: *mut IpcMemHandle, address: *mut c_void) -> Code {
    run(|| {
        context()?;
        // SAFETY: the caller passes null or a place for the handle; the driver looks the address up.
        unsafe { driver::cuIpcGetMemHandle(place, number(address)) }
    })
}

unsafe extern "C" fn ipc_open(place: *mut u64, handle: IpcMemHandle, flags: c_uint) -> Code {
    run(|| {
        context()?;
        // SAFETY: the caller passes null or a place for the address.
        unsafe { driver::cuIpcOpenMemHandle_v2(place, handle, flags) }
    })
}

unsafe extern "C" fn ipc_close(address: *mut c_void) -> Code {
    run(|| {
        context()?;
        // SAFETY: the driver looks the address up.
        unsafe { driver::cuIpcCloseMemHandle(number(address)) }
    })
}

/// Returns the properties of an address. An address that CUDA does not know is reported as such, and is not an error.
unsafe extern "C" fn get_attributes(place: *mut u8, address: *const c_void) -> Code {
    /// `CU_POINTER_ATTRIBUTE_`: MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, DEVICE_ORDINAL, IS_MANAGED.
    const ATTRIBUTES: [c_int; 5] = [2, 3, 4, 9, 8];
    const UNREGISTERED: u32 = 0;
    const MANAGED: u32 = 3;
    run(|| {
        context()?;
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let (mut kind, mut device_pointer, mut host_pointer) = (0u32, 0u64, 0u64);
        let (mut device, mut managed) = (-2i32, 0u32);
        let places: [*mut c_void; 5] = [
            (&raw mut kind).cast(),
            (&raw mut device_pointer).cast(),
            (&raw mut host_pointer).cast(),
            (&raw mut device).cast(),
            (&raw mut managed).cast(),
        ];
        // SAFETY: a place of the right size for each of the five.
        unsafe {
            driver::cuPointerGetAttributes(5, ATTRIBUTES.as_ptr(), places.as_ptr(), number(address))
        }?;
        match kind {
            UNREGISTERED => (device, device_pointer, host_pointer) = (-2, 0, number(address)),
            _ if managed != 0 => kind = MANAGED,
            // The numbers of device and host memory equal the driver's.
            _ => {}
        }
        let layout = &caller()?.layouts.address;
        let mut attributes = layout.empty();
        for (field, meaning) in &layout.fields {
            match meaning {
                Address::Kind => attributes.put_number(*field, kind),
                Address::Device => attributes.put_number(*field, device),
                Address::DevicePointer => attributes.put(*field, &device_pointer.to_ne_bytes()),
                Address::HostPointer => attributes.put(*field, &host_pointer.to_ne_bytes()),
            }
        }
        // SAFETY: not null, and the caller passes a `cudaPointerAttributes` of its build.
        unsafe { attributes.copy_to(place) };
        Ok(())
    })
}
